"""Own how long a client may take to send: the total time and the least rate of a head or a body.

Pure: times are arguments, in seconds of one monotonic clock. It does not know sockets; the connection asks it how long
the next read may wait.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PaceRule:
    """Bound one phase: `total_seconds` for all of it, and after `grace_seconds` at least `min_bytes_per_second`."""

    total_seconds: float
    min_bytes_per_second: float = 0.0
    grace_seconds: float = 0.0


@dataclass(slots=True)
class Pace:
    """Follow one phase of reading from its start."""

    rule: PaceRule
    started: float
    num_bytes: int = 0

    def remaining(self, now: float) -> float:
        """Return how many seconds the next read may wait; zero or less means that the client is too slow."""
        deadline = self.started + self.rule.total_seconds
        if self.rule.min_bytes_per_second > 0:
            earned = self.num_bytes / self.rule.min_bytes_per_second
            deadline = min(deadline, self.started + self.rule.grace_seconds + earned)
        return deadline - now
