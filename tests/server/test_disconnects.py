"""Check that a client that leaves is noticed, once and at once, and that one that stays is not."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from inference_api.server.disconnects import DisconnectWatcher

WAIT_SECONDS = 10.0


@pytest.fixture
def watcher() -> Iterator[DisconnectWatcher]:
    watcher = DisconnectWatcher(on_death=lambda: None)
    watcher.start()
    yield watcher
    watcher.stop()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    yield client, server
    client.close()
    server.close()


def _reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


LEAVING = {
    "close": lambda client: client.close(),
    "half-close": lambda client: client.shutdown(socket.SHUT_WR),
    "reset": _reset,
}


@pytest.mark.parametrize("how", LEAVING)
def test_a_client_that_leaves_is_told_with_nothing_written_to_it(watcher: DisconnectWatcher, pair, how: str) -> None:
    client, server = pair
    left = threading.Event()
    handle = watcher.watch(server, left.set)
    LEAVING[how](client)
    assert left.wait(WAIT_SECONDS)
    watcher.forget(handle)


def test_a_client_that_has_left_before_the_watch_is_told_too(watcher: DisconnectWatcher, pair) -> None:
    client, server = pair
    client.close()
    left = threading.Event()
    handle = watcher.watch(server, left.set)
    assert left.wait(WAIT_SECONDS)
    watcher.forget(handle)


def test_leaving_is_told_once(watcher: DisconnectWatcher, pair) -> None:
    client, server = pair
    calls: list[int] = []
    left = threading.Event()
    handle = watcher.watch(server, lambda: (calls.append(1), left.set()))
    client.shutdown(socket.SHUT_WR)
    assert left.wait(WAIT_SECONDS)
    client.close()
    _leave_another(watcher)
    assert calls == [1]
    watcher.forget(handle)


def _leave_another(watcher: DisconnectWatcher) -> None:
    """Watch a second pair that leaves: once it is told, everything before it has been."""
    left = threading.Event()
    ours, theirs = socket.socketpair()
    handle = watcher.watch(ours, left.set)
    theirs.close()
    assert left.wait(WAIT_SECONDS)
    watcher.forget(handle)
    ours.close()


def test_bytes_that_a_client_sends_do_not_mean_that_it_left(watcher: DisconnectWatcher, pair) -> None:
    client, server = pair
    left = threading.Event()
    handle = watcher.watch(server, left.set)
    client.sendall(b"GET / HTTP/1.1\r\n")
    _leave_another(watcher)
    assert not left.is_set()
    watcher.forget(handle)


def test_a_forgotten_client_is_not_told_any_more(watcher: DisconnectWatcher, pair) -> None:
    client, server = pair
    left = threading.Event()
    handle = watcher.watch(server, left.set)
    assert watcher.num_watched == 1
    watcher.forget(handle)
    watcher.forget(handle)
    client.close()
    _leave_another(watcher)
    assert not left.is_set()
    assert watcher.num_watched == 0


def test_one_thread_watches_many_clients_and_tells_the_one_that_left(watcher: DisconnectWatcher) -> None:
    pairs = [socket.socketpair() for _ in range(200)]
    left: list[int] = []
    told = threading.Event()
    before = threading.active_count()
    handles = [
        watcher.watch(ours, lambda number=number: (left.append(number), told.set()))
        for number, (ours, _) in enumerate(pairs)
    ]
    assert threading.active_count() == before
    pairs[137][1].close()
    assert told.wait(WAIT_SECONDS)
    assert left == [137]
    for handle, (ours, theirs) in zip(handles, pairs, strict=True):
        watcher.forget(handle)
        ours.close()
        theirs.close()


def test_a_stale_event_does_not_end_the_connection_that_has_the_number_now(watcher: DisconnectWatcher, pair) -> None:
    _client, server = pair
    left = threading.Event()
    handle = watcher.watch(server, left.set)
    watcher._tell(handle)
    assert not left.is_set(), "the client is still there, whatever the event said"
    watcher.forget(handle)


def test_a_callback_that_raises_is_told_of(pair) -> None:
    client, server = pair
    died = threading.Event()
    watcher = DisconnectWatcher(on_death=died.set)
    watcher.start()

    def fail() -> None:
        raise RuntimeError("a defect")

    handle = watcher.watch(server, fail)
    client.close()
    assert died.wait(WAIT_SECONDS)
    watcher.forget(handle)
    watcher.stop()
