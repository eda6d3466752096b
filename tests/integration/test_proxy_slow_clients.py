"""Check that slow, silent and oversized clients are told and cut in time, and that nobody else notices them."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import AUTHORIZATION, TIMEOUT_SECONDS, ProxyProcess, RawClient, seconds_since

HEADER_DEADLINE_SECONDS = 1.0
BODY_GRACE_SECONDS = 0.5
BODY_DEADLINE_SECONDS = 1.0
# Deadlines are asserted generously: the machine may be busy.
SLACK_SECONDS = 2.0
MAX_BODY_BYTES = 256 * 1024


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(upstream: EchoUpstream) -> Iterator[ProxyProcess]:
    settings = {
        "PROXY_HEADER_DEADLINE_SECONDS": str(HEADER_DEADLINE_SECONDS),
        "PROXY_BODY_GRACE_SECONDS": str(BODY_GRACE_SECONDS),
        "PROXY_BODY_DEADLINE_SECONDS": str(BODY_DEADLINE_SECONDS),
    }
    with ProxyProcess(upstream.port, **settings) as running:
        yield running


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[RawClient]:
    with RawClient(proxy.port) as connected:
        yield connected


def post_head(*headers: str) -> str:
    return "\r\n".join(["POST /inference/m HTTP/1.1", "Host: x", AUTHORIZATION, *headers, "", ""])


def num_worker_files(proxy: ProxyProcess) -> int:
    supervisor = proxy.process.pid
    worker = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[0]
    return len(list(Path(f"/proc/{worker}/fd").iterdir()))


def test_a_thousand_half_sent_heads_disturb_nobody_and_are_cut(proxy: ProxyProcess) -> None:
    with RawClient(proxy.port) as first:
        first.request("GET", "/rows", "Connection: close")
        first.read_to_end()
    num_files_before = num_worker_files(proxy)
    slow = [RawClient(proxy.port) for _ in range(1000)]
    try:
        for half in slow:
            half.send("GET /health HT")
        started = time.monotonic()
        with RawClient(proxy.port) as legitimate:
            legitimate.request("GET", "/rows")
            assert legitimate.read_answer()[0] == 200
        assert seconds_since(started) < HEADER_DEADLINE_SECONDS
        for half in slow:
            assert half.read_to_end().startswith(b"HTTP/1.1 408 ")
        assert seconds_since(started) < HEADER_DEADLINE_SECONDS + SLACK_SECONDS
    finally:
        for half in slow:
            half.sock.close()
    with RawClient(proxy.port) as legitimate:
        legitimate.request("GET", "/rows", "Connection: close")
        legitimate.read_to_end()
    assert num_worker_files(proxy) <= num_files_before + 5


def test_a_head_that_drips_is_cut_at_the_total_deadline(client: RawClient) -> None:
    started = time.monotonic()
    client.sock.settimeout(0.2)
    client.send("GET /health HTTP/1.1\r\n")
    answer = b""
    while not answer:
        client.send("X")
        try:
            answer = client.sock.recv(4096)
        except TimeoutError:
            assert seconds_since(started) < HEADER_DEADLINE_SECONDS + SLACK_SECONDS
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed_without_an_answer(client: RawClient) -> None:
    assert client.read_to_end() == b""


def test_a_body_that_stops_is_a_408(client: RawClient, upstream: EchoUpstream) -> None:
    before, started = len(upstream.seen), time.monotonic()
    client.send(post_head("Content-Length: 100") + "abc")
    assert client.read_answer()[0] == 408
    assert BODY_GRACE_SECONDS * 0.9 < seconds_since(started) < BODY_GRACE_SECONDS + SLACK_SECONDS
    assert client.read_to_end() == b""
    assert len(upstream.seen) == before


def test_a_body_over_the_cap_is_a_413_without_being_read(client: RawClient) -> None:
    client.send(post_head(f"Content-Length: {MAX_BODY_BYTES + 1}"))
    assert client.read_answer()[0] == 413
    assert client.read_to_end() == b""


def test_a_chunked_body_over_the_cap_is_a_413_while_it_is_read(client: RawClient, upstream: EchoUpstream) -> None:
    before = len(upstream.seen)
    client.send(post_head("Transfer-Encoding: chunked"))
    piece = b"10000\r\n" + bytes(65536) + b"\r\n"
    client.send_pieces([piece] * 5)
    assert client.read_answer()[0] == 413
    assert len(upstream.seen) == before


def test_a_chunked_body_that_drips_on_is_cut_at_the_cap_and_read_no_further(
    client: RawClient, upstream: EchoUpstream
) -> None:
    before = len(upstream.seen)
    client.send(post_head("Transfer-Encoding: chunked"))
    num_sent = 0
    client.sock.settimeout(0.0)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while num_sent < 2**30:
            try:
                client.sock.sendall(b"1000\r\n" + bytes(4096) + b"\r\n")
            except BlockingIOError:
                select.select([], [client.sock], [], TIMEOUT_SECONDS)
            num_sent += 4096
    assert num_sent < 2**24, "of a gigabyte hardly more than the kernel's buffers was taken"
    assert len(upstream.seen) == before


def test_a_body_of_exactly_the_cap_passes(client: RawClient, upstream: EchoUpstream) -> None:
    client.request("POST", "/inference/m", body=bytes(MAX_BODY_BYTES))
    assert client.read_answer()[0] == 200
    assert len(upstream.seen[-1].body) == MAX_BODY_BYTES


def test_expect_100_continue_is_sent_after_admission(client: RawClient, upstream: EchoUpstream) -> None:
    client.send(post_head("Content-Length: 3", "Expect: 100-continue"))
    assert client.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send("abc")
    assert client.read_answer()[0] == 200
    assert upstream.seen[-1].body == b"abc"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (f"POST /inference/m HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}\r\nContent-Length: 999999\r\n", 413),
        ("POST /inference/m HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n", 401),
        ("POST /inference/m HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n", 401),
        (f"POST /nowhere HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}\r\nContent-Length: 3\r\n", 404),
    ],
)
def test_a_refused_expectation_never_gets_a_100(client: RawClient, head: str, status: int) -> None:
    client.send(head + "Expect: 100-continue\r\n\r\n")
    assert client.read_answer()[0] == status
    assert client.read_to_end() == b""


def test_a_client_that_leaves_in_its_body_is_forgotten(proxy: ProxyProcess, upstream: EchoUpstream) -> None:
    before = len(upstream.seen)
    with RawClient(proxy.port) as client:
        client.send(post_head("Content-Length: 100") + "abc")
        client.sock.shutdown(1)
        assert client.read_to_end() == b""
    assert len(upstream.seen) == before
