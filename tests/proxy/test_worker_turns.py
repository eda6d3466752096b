"""Check that a client that sends as fast as it is read leaves the others their turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import gevent
import pytest
from gevent import socket

from proxy.connection import ClientConnection
from tests.proxy.bare_worker import DEADLINES, App, bare_worker

pytestmark = pytest.mark.usefixtures("hub")

NUM_REQUESTS = 40
BODY = b"1\r\nx\r\n" * 8192 + b"0\r\n\r\n"
MAX_BODY_BYTES = 65536


class OtherClient:
    """Wait for a byte of a socket of its own; note how far the first client had come when it was heard."""

    def __init__(self, progress: Callable[[], int]) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._progress = progress
        self._waiting = gevent.spawn(self._hear)
        gevent.sleep(0)

    def speak(self) -> None:
        self._theirs.send(b"x")

    def heard_at(self) -> int:
        heard: int = self._waiting.get(timeout=5)
        self._ours.close()
        self._theirs.close()
        return heard

    def _hear(self) -> int:
        self._ours.recv(1)
        return self._progress()


def serve(app: App, sent: bytes) -> None:
    """Serve one client that has sent everything already, with the worker's own code around the application."""
    worker = bare_worker(app)
    client, ours = socket.socketpair()
    with client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        worker.handle(ours, ours, ("127.0.0.1", 1))


def test_requests_that_are_sent_without_waiting_for_answers_leave_others_their_turns() -> None:
    served: list[str] = []
    other = OtherClient(lambda: len(served))

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        served.append(environ["PATH_INFO"])
        other.speak()
        start_response("204 No Content", [])
        return ()

    serve(app, b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n" * NUM_REQUESTS)
    assert len(served) == NUM_REQUESTS
    assert other.heard_at() <= 2


def test_a_body_in_small_chunks_leaves_others_their_turns() -> None:
    bodies: list[bytes] = []
    other = OtherClient(lambda: len(bodies))

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        other.speak()
        bodies.append(environ["proxy.connection"].read_body(MAX_BODY_BYTES))
        start_response("204 No Content", [])
        return ()

    serve(app, b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY)
    assert bodies == [b"x" * 8192]
    assert other.heard_at() == 0, "before the body was whole"


def test_what_was_read_ahead_gives_turns_like_what_is_read_and_a_first_buffer_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[None] = []
    monkeypatch.setattr("proxy.connection.give_way", lambda: turns.append(None))
    client, ours = socket.socketpair()
    with client, ours:
        connection = ClientConnection(ours, DEADLINES)
        connection._ahead += b"x" * 24
        assert [connection.recv(8) for _ in range(3)] == [b"x" * 8] * 3
    assert len(turns) == 2
