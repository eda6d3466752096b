"""Check on the real proxy process that a reader that takes nothing is cut, told of, and costs little until then."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.echo_upstream import Exchange, ScriptedUpstream
from tests.integration.proxy_process import ProxyProcess, RawClient, seconds_since
from tests.integration.service import wait_for


@pytest.fixture(scope="module")
def proxy(shared_upstream: ScriptedUpstream) -> Iterator[ProxyProcess]:
    with ProxyProcess(shared_upstream.port, PROXY_WRITE_STALL_SECONDS="0.5") as running:
        yield running


def test_a_reader_that_stalls_is_cut_and_its_upstream_closed(proxy: ProxyProcess, upstream: ScriptedUpstream) -> None:
    with RawClient(proxy.port, receive_buffer_bytes=4096) as client:
        client.request("POST", "/inference/m", body=b"{}")
        exchange = upstream.accept()
        exchange.start_stream()
        flood = bytes(2**26)
        started = time.monotonic()
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):
            exchange.send(b"%x\r\n" % len(flood) + flood)
        assert 0.4 < seconds_since(started) < 5
    told = "status_code=499 "
    lines = proxy.lines
    wait_for(
        lambda: any(told in line and line.endswith(" cut_reason=write_stalled") for line in lines), 2.0, "a reason"
    )


def test_the_kernel_keeps_little_of_an_answer_for_a_reader_that_stalls(
    proxy: ProxyProcess, upstream: ScriptedUpstream
) -> None:
    with RawClient(proxy.port, receive_buffer_bytes=4096) as client:
        client.request("POST", "/inference/m", body=b"{}")
        exchange = upstream.accept()
        exchange.start_stream()
        sender = threading.Thread(target=send_until_cut, args=(exchange, bytes(2**24)))
        sender.start()
        kept = [0]
        while sender.is_alive():
            kept.append(unsent_bytes(proxy.port))
            sender.join(0.02)
        assert 0 < max(kept) < 2**18


def send_until_cut(exchange: Exchange, data: bytes) -> None:
    with contextlib.suppress(OSError):
        exchange.send(b"%x\r\n" % len(data) + data)


def unsent_bytes(port: int) -> int:
    """Return how many bytes wait in the kernel for the readers of a port's connections (proc_net_tcp, tx_queue)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].partition(":")[0], 16) for fields in lines if fields[1].endswith(f":{port:04X}"))
