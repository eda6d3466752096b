"""Own what those without a good bearer share: few turns at a time, and one answer about health for all who wait for it.

Runs in the proxy's worker; who waits for a turn gives way. However many strangers ask, and whatever they are told, the
processor's time and the server's threads are for those who have shown a bearer. It does not know what an answer says.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gevent.event import Event

from proxy.answers import Refusal
from proxy.connection import give_way

_NUM_TURNS = 4
_WAIT_SECONDS = 5.0
_RETRY_AFTER_SECONDS = "1"


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """Keep what the server answered, and when it was asked: monotonic seconds, the status, the headers, the body."""

    asked_at: float
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


class Strangers:
    """Give turns, and keep the last answers for those who still wait; one object in the worker."""

    def __init__(self) -> None:
        """Begin with all turns free."""
        self._num_free = _NUM_TURNS
        # Oldest first; a turn goes from hand to hand. gevent's semaphore lets those in first who have just come, and a
        # flood comes all the time.
        self._waiting: collections.OrderedDict[Event, None] = collections.OrderedDict()
        self._answers: dict[str, SharedAnswer] = {}

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold one of the turns for the block; raise Refusal 503 when none was free in time."""
        self._take()
        try:
            # What needs no wait would otherwise be done for all strangers before anybody else's turn.
            give_way()
            yield
        finally:
            self._pass_on()

    def wait_for_turn(self) -> None:
        """Wait as long as others have the turns, but go on in any case."""
        with contextlib.suppress(Refusal), self.turn():
            pass

    def _take(self) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        mine = Event()
        self._waiting[mine] = None
        try:
            mine.wait(_WAIT_SECONDS)
        except BaseException:
            if mine.is_set():
                self._pass_on()
            raise
        finally:
            self._waiting.pop(mine, None)
        if not mine.is_set():
            message = "Too many requests without a bearer at once, try again later."
            raise Refusal(503, "public_busy", message, {"Retry-After": _RETRY_AFTER_SECONDS})

    def _pass_on(self) -> None:
        if self._waiting:
            self._waiting.popitem(last=False)[0].set()
        else:
            self._num_free += 1

    def asked_since(self, moment: float, path: str) -> SharedAnswer | None:
        """Return an answer that the server was asked for after this moment; None if it has to be asked.

        Who came before the question gets what was true after that: an older answer would not be about now.
        """
        answer = self._answers.get(path)
        return answer if answer is not None and answer.asked_at >= moment else None

    def keep(self, path: str, answer: SharedAnswer) -> None:
        """Keep the server's answer for the others who wait, unless there is one to a later question."""
        if self.asked_since(answer.asked_at, path) is None:
            self._answers[path] = answer
