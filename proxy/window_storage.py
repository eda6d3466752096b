"""Own the in-process memory of the moving windows: a storage for the `limits` library that stays bounded.

Runs in the proxy's worker and never waits. The library's own memory storage keeps a key of every tenant that ever came,
starts a timer a request and counts by the wall clock; this one forgets what has expired, holds at most `max_keys`, and
takes its clock. It does not know tenants or limits.
"""

from __future__ import annotations

import bisect
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from limits.storage import MovingWindowSupport, Storage

MAX_KEYS = 32_768
# Each call drops this many expired keys of its window's length at most: more than one a call, so that they run out.
_SWEPT_A_CALL = 2


@dataclass(slots=True)
class _Entries:
    """When calls of one key passed, the oldest first, and when somebody last asked."""

    asked_at: float = 0.0
    times: deque[float] = field(default_factory=deque)


class BoundedStorage(Storage, MovingWindowSupport):
    """Keep the times of what passed, by key, for as long as the key's window is; a key has one window length.

    A time counts for less than the window's length: what passed at 0 with a window of 60 s is forgotten at 60.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        """Begin empty; `now` gives seconds that never go back."""
        super().__init__()
        self._now = now
        self._max_keys = max_keys
        # By window length; in each the longest unasked key first, so that expired ones are found at the front.
        self._by_length: dict[float, OrderedDict[str, _Entries]] = {}

    def __len__(self) -> int:
        """Return the number of keys held."""
        return sum(len(keys) for keys in self._by_length.values())

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count `amount` calls if `limit` allows them within `expiry` seconds; say whether they were counted."""
        entries = self._entries(key, expiry)
        if len(entries.times) + amount > limit:
            return False
        entries.times.extend([entries.asked_at] * amount)
        return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """Return when the oldest of the newest `limit` calls passed, and how many of those still count."""
        entries = self._entries(key, expiry)
        count = min(limit, len(entries.times))
        return (entries.times[-count] if count else entries.asked_at), count

    def count_since(self, key: str, expiry: int, moment: float) -> int:
        """Return how many calls passed after `moment` and still count."""
        times = self._entries(key, expiry).times
        return len(times) - bisect.bisect_right(times, moment)

    def _entries(self, key: str, expiry: float) -> _Entries:
        now = self._now()
        keys = self._by_length.setdefault(expiry, OrderedDict())
        self._sweep(keys, now - expiry)
        entries = keys.get(key)
        if entries is None:
            self._make_room(keys)
            entries = keys[key] = _Entries()
        keys.move_to_end(key)
        entries.asked_at = now
        while entries.times and entries.times[0] <= now - expiry:
            entries.times.popleft()
        return entries

    def _sweep(self, keys: OrderedDict[str, _Entries], expired_at: float) -> None:
        for _ in range(min(_SWEPT_A_CALL, len(keys))):
            key, entries = next(iter(keys.items()))
            if entries.asked_at > expired_at:
                return
            del keys[key]

    def _make_room(self, keys: OrderedDict[str, _Entries]) -> None:
        """Forget the key that nobody has asked about for the longest time, when all places are taken.

        Only somebody who signs bearers of ever new tenants gets here; the memory ends, not the service.
        """
        if len(self) >= self._max_keys:
            fullest = keys or max(self._by_length.values(), key=len)
            fullest.popitem(last=False)

    # The rest of what the library's interface asks of a storage.

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """Name what an outage raises: there is none in memory."""
        return ()

    def get(self, key: str) -> int:
        """Refuse: fixed windows are not kept."""
        raise NotImplementedError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Refuse: fixed windows are not kept."""
        raise NotImplementedError

    def get_expiry(self, key: str) -> float:
        """Refuse: fixed windows are not kept."""
        raise NotImplementedError

    def check(self) -> bool:
        """Say that memory answers."""
        return True

    def reset(self) -> int:
        """Forget all keys and return how many there were."""
        num_keys = len(self)
        self._by_length.clear()
        return num_keys

    def clear(self, key: str) -> None:
        """Forget one key."""
        for keys in self._by_length.values():
            keys.pop(key, None)
