"""Check on the real proxy process that more connections than it takes keep nobody out who asks properly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integration.echo_upstream import EchoUpstream, ScriptedUpstream
from tests.integration.proxy_process import ProxyProcess, RawClient
from tests.integration.service import wait_for

NUM_PLACES = 20
# Far beyond what a test takes: whoever is let in here did not wait for a deadline.
DEADLINE_SECONDS = "60"


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


def flooded(port: int, start: bytes, number: int, cleanup: contextlib.ExitStack) -> list[RawClient]:
    clients = [cleanup.enter_context(RawClient(port)) for _ in range(number)]
    for client in clients:
        client.send_pieces([start])
    return clients


@pytest.mark.parametrize("start", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_flood_of_silent_connections_keeps_neither_health_nor_a_bearer_out(
    upstream: EchoUpstream, start: bytes
) -> None:
    settings = {"PROXY_MAX_CONNECTIONS": str(NUM_PLACES), "PROXY_HEADER_DEADLINE_SECONDS": DEADLINE_SECONDS}
    with ProxyProcess(upstream.port, **settings) as proxy, contextlib.ExitStack() as cleanup:
        silent = flooded(proxy.port, start, 10 * NUM_PLACES, cleanup)
        for path in ("/health", "/rows"):
            with RawClient(proxy.port) as client:
                client.request("GET", path)
                assert client.read_answer()[0] == 200
        assert silent[0].read_to_end() == b"", "the longest-waiting one is closed without a word"
        crowded = "all connections are in use"
        wait_for(lambda: any(crowded in line for line in proxy.lines), 10.0, "a line about the flood")
        assert sum(crowded in line for line in proxy.lines) == 1


def test_streams_with_a_good_bearer_outlive_a_flood(upstream: EchoUpstream) -> None:
    settings = {"PROXY_MAX_CONNECTIONS": str(NUM_PLACES), "PROXY_HEADER_DEADLINE_SECONDS": DEADLINE_SECONDS}
    with (
        ScriptedUpstream() as scripted,
        ProxyProcess(scripted.port, **settings) as proxy,
        contextlib.ExitStack() as cleanup,
        RawClient(proxy.port) as client,
    ):
        client.request("POST", "/inference/m", body=b"{}")
        exchange = scripted.accept()
        exchange.start_stream()
        assert client.read_head()[0] == 200
        flooded(proxy.port, b"GET /hea", 10 * NUM_PLACES, cleanup)
        exchange.send_chunk(b"still here")
        assert client.read_chunk() == b"still here"


def test_when_streams_take_all_places_health_answers_and_others_are_told_to_come_again() -> None:
    with (
        ScriptedUpstream() as scripted,
        ProxyProcess(scripted.port, PROXY_MAX_CONNECTIONS="2") as proxy,
        contextlib.ExitStack() as cleanup,
    ):
        streams = [cleanup.enter_context(RawClient(proxy.port)) for _ in range(2)]
        exchanges = []
        for stream in streams:
            stream.request("POST", "/inference/m", body=b"{}")
            exchanges.append(scripted.accept())
            exchanges[-1].start_stream()
            assert stream.read_head()[0] == 200
        with RawClient(proxy.port) as late:
            late.request("POST", "/inference/m", body=b"{}")
            status, headers, _body = late.read_answer()
            assert (status, headers["retry-after"], headers["x-error-code"]) == (503, "1", "connections_exhausted")
            assert late.read_to_end() == b""
        assert not scripted.has_caller()
        with RawClient(proxy.port) as probe:
            probe.send("GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            scripted.accept().answer(b"OK", content_type="text/plain")
            assert probe.read_answer()[0] == 200
        exchanges[0].send_chunk(b"")
        assert streams[0].read_chunk() == b""
        streams[0].sock.close()
        with RawClient(proxy.port) as late:
            late.request("GET", "/rows")
            scripted.accept().answer(b"{}")
            assert late.read_answer()[0] == 200
