"""Decide when a child that died is started again; pure, time is an argument in seconds of the monotonic clock.

The first death of a child that had served for a while costs no wait. One that dies again and again, even if it became
ready in between, waits longer and longer. Used by the supervisor, one policy a child.
"""

from __future__ import annotations

BACKOFF_SECONDS = (0.0, 0.25, 0.5, 1.0, 2.0)
"""Waits before a restart, by the number of deaths in a row; the last one repeats."""

SETTLED_SECONDS = 5.0
"""A child that served for so long has recovered: what was before does not count any more."""


class RestartPolicy:
    """Count one child's deaths in a row."""

    def __init__(self) -> None:
        self.num_deaths = 0
        self.has_settled = False
        """Whether the child has ever served for SETTLED_SECONDS."""
        self._serving_since: float | None = None

    def serves(self, now: float) -> None:
        """Note that the child has begun to serve."""
        self._serving_since = now

    def settle(self) -> None:
        """Forget earlier deaths; called when the child has served for SETTLED_SECONDS."""
        self.num_deaths = 0
        self.has_settled = True

    def dies(self, now: float) -> float:
        """Note a death; return the seconds to wait before the restart."""
        if self._serving_since is not None and now - self._serving_since >= SETTLED_SECONDS:
            self.settle()
        self._serving_since = None
        self.num_deaths += 1
        return BACKOFF_SECONDS[min(self.num_deaths, len(BACKOFF_SECONDS)) - 1]

    @property
    def num_failed_restarts(self) -> int:
        """Restarts that did not last; the death of a child that had served is not one yet."""
        return max(0, self.num_deaths - 1)
