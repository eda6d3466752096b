"""Check that a connection which was accepted is served, whatever becomes of its listener meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import gevent
import pytest
from gevent import socket
from gevent.pool import Pool

from tests.proxy.bare_worker import bare_worker

pytestmark = pytest.mark.usefixtures("hub")


def test_a_connection_accepted_just_before_the_drain_is_served_after_its_listener_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def app(_environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        start_response("204 No Content", [])
        return ()

    worker = bare_worker(app)
    serve = worker.handle

    def close_and_serve(*connection: Any) -> None:
        server.close()
        serve(*connection)

    monkeypatch.setattr(worker, "handle", close_and_serve)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = worker.server_of(listener, Pool(8))
        with gevent.Timeout(10), socket.create_connection(listener.getsockname()) as client:
            server.start()
            client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 204 ")
