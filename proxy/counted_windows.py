"""Own the counting of moving windows in this process, with the `limits` library.

Runs in the proxy's worker and never waits, so that nothing comes between a look and a count. It does not know tenants,
routes or Redis: a window has a key, and two windows of one key and length are one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from limits import RateLimitItemPerSecond
from limits.strategies import MovingWindowRateLimiter

from proxy.window_storage import BoundedStorage


@dataclass(frozen=True, slots=True)
class CountedWindow:
    """Count the calls of `key`: at most `count` in any `seconds`."""

    key: str
    count: int
    seconds: int


@dataclass(frozen=True, slots=True)
class WindowState:
    """Say how a window stands: what it has left, in how many seconds it has one more, and whether it refused a call."""

    remaining: int
    reset_seconds: float
    is_full: bool


class CountUnavailable(Exception):
    """Tell that whoever counts did not answer right and in time; the text is the kind of fault."""


class _Item(RateLimitItemPerSecond):
    """A limit of the library whose key is the window's alone: who changes the count does not start anew."""

    def key_for(self, *identifiers: bytes | str | int | float) -> str:
        return f"{identifiers[0]!s}:{self.get_expiry()}"


class LocalWindows:
    """Count calls in memory."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing counted; `now` gives seconds that never go back."""
        self._now = now
        self._storage = BoundedStorage(now)
        self._limiter = MovingWindowRateLimiter(self._storage)

    def look(self, windows: Sequence[CountedWindow]) -> list[WindowState]:
        """Return how the windows stand, counting nothing; `is_full` says of each that it would refuse a call."""
        return [self._state(window, is_full=not self._limiter.test(_item(window), window.key)) for window in windows]

    def take(self, windows: Sequence[CountedWindow]) -> list[WindowState]:
        """Count one call in all windows if it fits into each, else in none; return how each stands then."""
        before = self.look(windows)
        if any(state.is_full for state in before):
            return before
        for window in windows:
            self._limiter.hit(_item(window), window.key)
        return [self._state(window, is_full=False) for window in windows]

    def count(self, window: CountedWindow, since: float = float("-inf")) -> int:
        """Return how many calls in the window passed after `since`."""
        item = _item(window)
        return self._storage.count_since(item.key_for(window.key), item.get_expiry(), since)

    def _state(self, window: CountedWindow, *, is_full: bool) -> WindowState:
        stats = self._limiter.get_window_stats(_item(window), window.key)
        return WindowState(max(0, stats.remaining), max(0.0, stats.reset_time - self._now()), is_full)


def _item(window: CountedWindow) -> _Item:
    return _Item(window.count, window.seconds)
