"""Check how a connection is closed: the peer's end is waited for, within bounds, and never on another thread."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from gunicorn.http import errors
from gunicorn.workers.gthread import ThreadWorker

from inference_api.server import worker
from inference_api.server.worker import AT_WORKER_END, StreamWorker, linger


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end and the peer's, with a short time to linger."""
    monkeypatch.setattr(worker, "LINGER_SECONDS", 0.2)
    ours, peer = socket.socketpair()
    with ours, peer:
        yield ours, peer


def test_a_peer_that_closes_is_not_waited_for_any_longer(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = pair
    peer.close()
    began = time.monotonic()
    linger(ours)
    assert time.monotonic() - began < 0.15


def test_a_peer_sees_fin_at_once_and_what_it_still_sends_is_read(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, peer = pair
    thread = threading.Thread(target=linger, args=(ours,))
    thread.start()
    assert peer.recv(1) == b""
    peer.sendall(b"late")
    peer.shutdown(socket.SHUT_WR)
    thread.join(5)
    assert not thread.is_alive()


def test_a_peer_that_keeps_its_side_open_is_left_after_the_time_and_reading_returns_at_once(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, _peer = pair
    began = time.monotonic()
    linger(ours)
    assert 0.15 < time.monotonic() - began < 2.0
    ours.settimeout(5)
    assert ours.recv(1) == b"", "gunicorn's own wait on its main thread ends at once"


def test_a_peer_that_keeps_sending_is_left_after_64_kib(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LINGER_SECONDS", 30.0)
    ours, peer = pair
    thread = threading.Thread(target=linger, args=(ours,))
    thread.start()
    peer.sendall(b"x" * worker.MAX_LINGER_BYTES)
    thread.join(5)
    assert not thread.is_alive()


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def error(self, text: str, *values: object) -> None:
        self.lines.append(text % values)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidHeader("Authorization Bearer CANARY"), 400),
        (errors.LimitRequestLine(9999, 4094), 414),
        (errors.LimitRequestHeaders("CANARY"), 431),
        (RuntimeError("CANARY"), 500),
    ],
)
def test_an_error_before_the_app_is_json_and_quotes_nothing_of_the_client(
    pair: tuple[socket.socket, socket.socket], error: Exception, status: int
) -> None:
    ours, peer = pair
    worker_object = StreamWorker.__new__(StreamWorker)
    worker_object.log = Log()
    worker_object.handle_error(None, ours, ("127.0.0.1", 1), error)
    head, _, body = peer.recv(65536).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(body)["status_code"] == status
    assert b"CANARY" not in head + body
    assert "CANARY" not in "".join(worker_object.log.lines)
    assert len(worker_object.log.lines) == (status == 500)


def test_an_end_without_a_grace_waits_for_no_lock_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gunicorn.workers.base.time.sleep", lambda _seconds: None)
    worker_object = StreamWorker.__new__(StreamWorker)
    worker_object.cfg = SimpleNamespace(worker_int=lambda _worker: None)
    with ThreadPoolExecutor() as pool:
        worker_object.tpool = pool
        monkeypatch.setattr(pool, "shutdown", lambda **_options: pytest.fail("it asked for the lock"))
        with pytest.raises(SystemExit):
            worker_object.handle_quit(signal.SIGQUIT, None)
        monkeypatch.undo()
    assert not worker_object.alive


class ServedApp:
    def __init__(self, **extensions: object) -> None:
        self.extensions = extensions


def test_what_the_application_wants_at_the_end_comes_after_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    worker_object = StreamWorker.__new__(StreamWorker)
    worker_object.wsgi = ServedApp(**{AT_WORKER_END: [lambda: events.append("closed")]})
    monkeypatch.setattr(ThreadWorker, "run", lambda _worker: events.append("served"))
    worker_object.run()
    assert events == ["served", "closed"]
    worker_object.wsgi = ServedApp()
    worker_object.run()
    assert events == ["served", "closed", "served"]
