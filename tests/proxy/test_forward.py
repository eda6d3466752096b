"""Check the reading of an upstream's answer over real sockets: what a reset leaves, and what it leaves behind."""

from __future__ import annotations

import gc
import select
import socket
import struct
import threading
from collections.abc import Iterator

import gevent
import pytest

from proxy.answers import Refusal
from proxy.forward import AnswerTruncated, Upstream, UpstreamAnswer

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
TIMEOUT_SECONDS = 10.0


@pytest.fixture(scope="module", autouse=True)
def _event_loop() -> Iterator[None]:
    """Make this thread's hub before the first test, so that its own descriptors are no test's, and take it down."""
    hub = gevent.get_hub()
    yield
    hub.destroy(destroy_loop=True)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_SECONDS)
        yield server


def exchange(listener: socket.socket, sent: bytes) -> tuple[UpstreamAnswer, socket.socket]:
    """Send a request, answer it with some bytes; return the answer, and the upstream's end to go on with."""
    accepted: list[socket.socket] = []

    def serve() -> None:
        upstream, _ = listener.accept()
        upstream.settimeout(TIMEOUT_SECONDS)
        assert upstream.recv(65536)
        upstream.sendall(sent)
        accepted.append(upstream)

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        answer = Upstream(url, connect_timeout=5.0, read_timeout=5.0).send("GET", "/", {}, None)
    finally:
        thread.join()
    return answer, accepted[0]


def num_watchers() -> int:
    """Return how many watchers of this thread's event loop are active."""
    return int(gevent.get_hub().loop.activecnt)


def test_a_reset_between_the_head_and_the_first_chunk_truncates_the_answer_and_leaves_no_watcher(
    listener: socket.socket,
) -> None:
    answer, upstream = exchange(listener, HEAD)
    before = num_watchers()
    upstream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    upstream.close()
    poll = select.poll()
    poll.register(answer._raw.fileno(), select.POLLIN)
    assert poll.poll(TIMEOUT_SECONDS * 1000)[0][1] & select.POLLERR
    with pytest.raises(AnswerTruncated, match="ConnectionResetError"):
        next(answer.read_chunks())
    assert num_watchers() == before
    answer.close()


def test_chunks_that_came_with_the_head_and_after_it_are_all_read_and_leave_no_watcher(
    listener: socket.socket,
) -> None:
    answer, upstream = exchange(listener, HEAD + b"1\r\na\r\n")
    before = num_watchers()
    chunks = answer.read_chunks()
    assert next(chunks) == b"1\r\na\r\n"
    assert num_watchers() > before
    with upstream:
        upstream.sendall(b"1\r\nb\r\n")
        assert next(chunks) == b"1\r\nb\r\n"
        upstream.sendall(b"0\r\n\r\n")
        assert list(chunks) == []
    assert num_watchers() == before
    answer.close()


def test_an_exchange_that_fails_leaves_nothing_of_the_request_for_the_garbage_collector(
    listener: socket.socket,
) -> None:
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()

    def fail() -> str:
        try:
            Upstream(url, connect_timeout=5.0, read_timeout=5.0).send("POST", "/", {}, b"x" * 100_000)
        except Refusal as refusal:
            return refusal.code
        return "answered"

    assert fail() == "upstream_down"
    gc.collect()
    gc.disable()
    try:
        fail()
        assert gc.collect() == 0
    finally:
        gc.enable()
