"""Check how long a client may take for an answer, and that whatever ends with a request ends with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.connection import ClientConnection, ClientLeft, Deadlines
from proxy.pace import PaceRule

pytestmark = pytest.mark.usefixtures("hub")

STALL_SECONDS = 20.0
ANSWER_SECONDS = 30.0


class DrippingSocket:
    """Stand in for the socket of a client that takes 2 KiB at a time, each after a while of a clock of its own."""

    def __init__(self, seconds_between: float) -> None:
        self.now = 0.0
        self._seconds_between = seconds_between
        self._takes_at = 0.0

    def setblocking(self, _flag: bool) -> None:
        """Stay as it is."""

    def setsockopt(self, *_options: object) -> None:
        """Take any option."""

    def fileno(self) -> int:
        """Have no descriptor."""
        return -1

    def send(self, data: bytes) -> int:
        """Take a little when it is time again."""
        if self.now < self._takes_at:
            raise BlockingIOError
        self._takes_at = self.now + self._seconds_between
        return min(2048, len(data))

    def wait(self, _wait: Callable[..., None], seconds: float) -> None:
        """Let the time pass until this client takes more, at most the seconds."""
        self.now = min(self._takes_at, self.now + seconds)


def connect(monkeypatch: pytest.MonkeyPatch, sock: DrippingSocket) -> ClientConnection:
    deadlines = Deadlines(PaceRule(10.0), PaceRule(ANSWER_SECONDS), STALL_SECONDS)
    connection = ClientConnection(sock, deadlines, lambda: sock.now)
    monkeypatch.setattr(connection, "_wait", sock.wait)
    return connection


def test_a_bounded_answer_that_drips_is_cut_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = DrippingSocket(5.0)
    connection = connect(monkeypatch, sock)
    connection.bound_answer()
    with pytest.raises(ClientLeft):
        connection.sendall(bytes(2**20))
    assert (connection.cut_reason, connection.left, sock.now) == ("write_overdue", True, ANSWER_SECONDS)


def test_a_bounded_answer_that_stalls_is_cut_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = DrippingSocket(100.0)
    connection = connect(monkeypatch, sock)
    connection.bound_answer()
    with pytest.raises(ClientLeft):
        connection.sendall(bytes(2**20))
    assert (connection.cut_reason, sock.now) == ("write_stalled", STALL_SECONDS)


def test_an_answer_may_drip_unless_it_is_bounded_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sock = DrippingSocket(5.0)
    connection = connect(monkeypatch, sock)
    connection.bound_answer()
    connection.begin_head()
    connection.sendall(bytes(2**16))
    assert connection.cut_reason is None and sock.now > ANSWER_SECONDS


def test_what_was_registered_for_the_end_runs_whatever_another_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect(monkeypatch, DrippingSocket(0.0))
    ended: list[str] = []

    def fail(name: str) -> Callable[[], None]:
        def ending() -> None:
            ended.append(name)
            raise RuntimeError(name)

        return ending

    connection.on_end(lambda: ended.append("first registered"))
    connection.on_end(fail("second"))
    connection.on_end(fail("third"))
    with pytest.raises(RuntimeError, match="third"):
        connection.end_request()
    assert ended == ["third", "second", "first registered"]
    connection.end_request()
