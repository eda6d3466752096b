"""Own who waits for company: requests that batch start together, when the first one's window is over or they are many.

Pure; used by the scheduler alone, in the decode thread: time is an argument, in seconds of the monotonic clock. The
window begins with its first request, and later ones do not put it off. Knows nothing of rows, queues or other requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from inference_api.backend.sequence import Sequence


class BatchWindow:
    """The sequences that are held back; none where `seconds` is 0. `max_requests` of them wait no longer."""

    def __init__(self, seconds: float, max_requests: int) -> None:
        self._seconds = seconds
        self._max_requests = max_requests
        self._held: list[Sequence] = []
        self._ready: list[Sequence] = []
        self._ends_at = math.inf

    def __len__(self) -> int:
        return len(self._ready) + len(self._held)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield those that are here, in the order of arrival."""
        yield from self._ready
        yield from self._held

    @property
    def ends_at(self) -> float:
        """The time at which `take` has something to give; infinite while nobody is here."""
        return -math.inf if self._ready else self._ends_at if self._held else math.inf

    def hold(self, sequence: Sequence, now: float) -> bool:
        """Hold a sequence back until its window is over; return False if it need not wait."""
        if not self._seconds:
            return False
        if not self._held:
            self._ends_at = now + self._seconds
        self._held.append(sequence)
        if len(self._held) >= self._max_requests:
            self._close()
        return True

    def drop(self, sequence: Sequence) -> bool:
        """Let a sequence go that has ended; return False if it is not here."""
        for sequences in (self._ready, self._held):
            if sequence in sequences:
                sequences.remove(sequence)
                return True
        return False

    def take(self, now: float, *, at_once: bool = False) -> list[Sequence]:
        """Return those whose waiting is over, in the order of arrival; with `at_once` all."""
        if at_once or now >= self._ends_at:
            self._close()
        ready, self._ready = self._ready, []
        return ready

    def _close(self) -> None:
        self._ready += self._held
        self._held = []
        self._ends_at = math.inf
