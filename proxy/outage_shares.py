"""Own how much of a limit one of several proxies may let pass by itself while they do not count together.

Pure; times are arguments, in seconds that never go back. Each proxy has a share, limit ÷ proxies. But what one of them
let pass just before an outage may be all of the limit, and the others do not know: until that has left the window, all
proxies together let a fifth of the limit pass. So 1.2 times the limit is never exceeded. Where there never is a shared
count, a share may be lifted to one call, lest a limit smaller than the number of proxies lets none pass for ever.
"""

from __future__ import annotations

_BLIND_PART = 0.2
# Every proxy looks each 2 s whether the shared count is there: after this time all know that it is, or is not.
_SETTLING_SECONDS = 5.0
# Clocks of two machines, and the way of an answer: only what began later than by this began anew.
_CLOCK_SECONDS = 1.0


class OutageShares:
    """Remember since when there has been a shared count, or none, and when one lost its memory."""

    def __init__(self, num_proxies: int, least_share: int = 0) -> None:
        """Begin without having heard of a shared count; a share other than 0 is for where there never will be one."""
        self._num_proxies = num_proxies
        self._least_share = least_share
        self._since: float | None = None
        self._gone_at: float | None = None
        self._lost_at: float | None = None

    def go(self, now: float) -> None:
        """Note that the shared count is gone."""
        self._since, self._gone_at = None, now

    def come(self, now: float, began: float) -> None:
        """Note that the shared count is there again, and since when it has counted."""
        if self._gone_at is not None and began > self._gone_at - _CLOCK_SECONDS:
            self._lost_at = self._gone_at
        # What passed here until now is not in it.
        self._since, self._gone_at = now, None

    def hear(self, began: float) -> None:
        """Note from any answer of the shared count since when it has counted."""
        if self._since is None:
            self._since = began
        elif began > self._since + _CLOCK_SECONDS:
            self._since = self._lost_at = began

    def is_counted_together(self, seconds: float, now: float) -> bool:
        """Say whether the shared count knows all that passed in the last `seconds`, so that it decides alone."""
        return self._since is not None and now - self._since >= seconds + _SETTLING_SECONDS

    def own_limit(self, count: int, seconds: float, now: float) -> int:
        """Return how many calls this proxy may let pass in any `seconds`, of `count` for all proxies."""
        if self.is_blind(seconds, now) or self.is_counted_together(seconds, now):
            return count
        return max(self._least_share, count // self._num_proxies)

    def is_blind(self, seconds: float, now: float) -> bool:
        """Say whether others may have let pass, in the last `seconds`, what no count knows any more."""
        if self._num_proxies == 1:
            return False
        unknown_until = self._lost_at if self._gone_at is None else self._gone_at
        return unknown_until is not None and now < unknown_until + seconds + _SETTLING_SECONDS

    def blind_limit(self, count: int) -> int:
        """Return how many calls this proxy may let pass in any window in which it was blind."""
        return int(count * _BLIND_PART) // self._num_proxies
