"""Check that a call is cut where it waits, that nothing swallows the cut, and that the next request is spared."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import gevent
import pytest
from gevent import socket as gevent_socket
from gevent.event import Event
from gunicorn.http.body import ChunkedReader

from proxy.connection import ClientConnection, ClientLeft, Deadlines
from proxy.open_calls import CallRevoked
from proxy.pace import PaceRule

pytestmark = pytest.mark.usefixtures("hub")


class SilentSocket:
    """Stand in for the socket of a client that neither sends nor leaves."""

    def setblocking(self, _flag: bool) -> None:
        """Stay as it is."""

    def setsockopt(self, *_options: int) -> None:
        """Take any option."""

    def fileno(self) -> int:
        """Have no descriptor."""
        return -1

    def shutdown(self, _how: int) -> None:
        """Be shut down."""

    def close(self) -> None:
        """Be closed."""


@pytest.fixture
def connection() -> ClientConnection:
    return ClientConnection(SilentSocket(), Deadlines(PaceRule(10.0), PaceRule(10.0), 10.0))


def begin(connection: ClientConnection) -> None:
    body = SimpleNamespace(reader=None)
    connection.begin_head()
    connection.begin_request(SimpleNamespace(_expected_100_continue=False, body=body))


def run(serve: Callable[[], None], *others: Callable[[], None]) -> gevent.Greenlet:
    """Run a request's greenlet, and the others once it waits; return it when it has ended."""
    serving = gevent.spawn(serve)
    gevent.sleep(0)
    for other in others:
        gevent.spawn(other).join()
    serving.join(5)
    assert serving.dead
    return serving


@pytest.mark.parametrize(("answer_started", "reason"), [(False, None), (True, "jwt_revoked")])
def test_a_cut_is_raised_where_the_request_waits(
    connection: ClientConnection, answer_started: bool, reason: str | None
) -> None:
    caught: list[str] = []

    def serve() -> None:
        begin(connection)
        connection.answer_started = answer_started
        with pytest.raises(CallRevoked) as fault:
            Event().wait(5)
        caught.append(fault.value.code)

    run(serve, lambda: connection.cut(CallRevoked()))
    assert (caught, connection.cut_reason) == (["jwt_revoked"], reason)


def test_a_cut_that_was_taken_for_another_fault_still_holds_before_the_upstream_is_asked(
    connection: ClientConnection,
) -> None:
    outcomes: list[str] = []

    def serve() -> None:
        begin(connection)
        try:
            Event().wait(5)
        except Exception:
            outcomes.append("swallowed")
        with pytest.raises(CallRevoked):
            connection.watch()
        outcomes.append("cut")
        connection.end_request()
        begin(connection)
        assert connection._cut_by is None
        outcomes.append("next")

    run(serve, lambda: connection.cut(CallRevoked()))
    assert outcomes == ["swallowed", "cut", "next"]


def test_a_cut_that_comes_when_its_request_has_ended_spares_the_next_one(connection: ClientConnection) -> None:
    outcomes, spared = list[str](), Event()

    def serve() -> None:
        begin(connection)
        ended = connection._request
        connection.end_request()
        begin(connection)
        # What the hub runs when it comes to a cut that was asked for earlier.
        gevent.get_hub().loop.run_callback(connection._throw, ended, CallRevoked())
        gevent.sleep(0)
        gevent.sleep(0)
        outcomes.append("spared")
        spared.set()
        with pytest.raises(CallRevoked):
            Event().wait(5)
        outcomes.append("cut by its own")

    run(serve, lambda: spared.wait(5), lambda: connection.cut(CallRevoked()))
    assert outcomes == ["spared", "cut by its own"]


def test_who_waits_where_no_socket_is_seen_is_given_up_at_once(connection: ClientConnection) -> None:
    ended: list[str] = []

    def serve() -> None:
        begin(connection)
        with pytest.raises(ClientLeft):
            Event().wait(60)
        ended.append("given up")

    run(serve, connection.give_up)
    assert ended == ["given up"] and connection.cut_reason == "made_room"


def test_what_came_ahead_behind_a_good_bearer_is_not_too_much_for_the_strangers_request_in_it() -> None:
    ours, peer = gevent_socket.socketpair()
    with ours, peer:
        connection = ClientConnection(ours, Deadlines(PaceRule(10.0), PaceRule(10.0), 10.0))
        connection._ahead += bytes(30_000)

        def serve() -> None:
            begin(connection)
            connection.watch()
            gevent.sleep(0.05)
            connection.end_request()

        run(serve)
    assert (connection.left, connection.cut_reason) == (False, None)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_closed_connection_goes_at_once_and_is_no_garbage_to_collect(chunked: bool) -> None:
    connection = ClientConnection(SilentSocket(), Deadlines(PaceRule(10.0), PaceRule(10.0), 10.0))
    request = SimpleNamespace(_expected_100_continue=False, body=SimpleNamespace(reader=None), sock=connection)
    if chunked:
        request.body.reader = ChunkedReader(request, connection)
    connection.begin_request(request)
    connection.end_request()
    connection.close()
    left = weakref.ref(connection)
    gc.collect()
    gc.disable()
    try:
        del connection, request
        assert left() is None
        assert gc.collect() == 0
    finally:
        gc.enable()
