"""Own what those without a good bearer share: few turns at a time, and one answer about health for all who ask at once.

Runs in the proxy's worker; who waits for a turn gives way. However many strangers ask, and whatever they are told, the
processor's time and the server's threads are for those who have shown a bearer. It does not know what an answer says.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gevent.event import Event

from proxy.answers import Refusal
from proxy.connection import give_way

_NUM_TURNS = 4
_WAIT_SECONDS = 5.0
_RECENT_SECONDS = 0.1
_RETRY_AFTER_SECONDS = "1"


@dataclass(frozen=True, slots=True)
class SharedAnswer:
    """Keep what the server answered: the status, the headers as they came, the body."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


class Strangers:
    """Give turns, and keep the last answers for a moment; one object in the worker. `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with all turns free."""
        self._now = now
        self._num_free = _NUM_TURNS
        # Oldest first; a turn goes from hand to hand. gevent's semaphore lets those in first who have just come, and a
        # flood comes all the time.
        self._waiting: collections.OrderedDict[Event, None] = collections.OrderedDict()
        self._recent: dict[str, tuple[float, SharedAnswer]] = {}

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

    def recent(self, path: str) -> SharedAnswer | None:
        """Return what the server has answered for this path a moment ago; None if it has to be asked."""
        at, answer = self._recent.get(path, (0.0, None))
        return answer if answer is not None and self._now() - at <= _RECENT_SECONDS else None

    def keep(self, path: str, answer: SharedAnswer) -> None:
        """Keep the server's answer for the others who ask now."""
        self._recent[path] = self._now(), answer
