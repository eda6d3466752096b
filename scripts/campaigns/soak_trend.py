"""Judge whether what was measured again and again grows: pure, so that a soak of a second and of an hour judge alike.

The slope is Theil and Sen's, the median of the slopes between all pairs of samples: a step that an allocator makes once
weighs far less than what every call adds. Knows no process.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

MIB = 1 << 20
MAX_BYTES_AN_HOUR = 10 * MIB
MAX_SHARE = 0.05
LEAST_BYTES = 4 * MIB
"""Less than that is no growth, however short the time: a server's first ten thousand calls fill what is remembered of
ended ones, and the allocators' pools of its threads."""

MAX_SAMPLES = 600
"""More are thinned out: the pairs are as many as their square."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What a process held at one moment: when, in seconds, and how much memory, in bytes."""

    at: float
    resident_bytes: int


def growth_bytes(samples: Sequence[Sample]) -> float:
    """Return by how much memory grew over all samples, as the median of all slopes tells it."""
    thinned = samples[:: -(-len(samples) // MAX_SAMPLES) or 1]
    pairs = itertools.combinations(thinned, 2)
    slopes = [(later.resident_bytes - first.resident_bytes) / (later.at - first.at) for first, later in pairs]
    return statistics.median(slopes) * (samples[-1].at - samples[0].at) if slopes else 0.0


def fault_of_growth(samples: Sequence[Sample]) -> str | None:
    """Return by how much too much memory grew; None if it did not."""
    grown = growth_bytes(samples)
    hours = (samples[-1].at - samples[0].at) / 3600
    allowed = min(MAX_BYTES_AN_HOUR * hours, MAX_SHARE * samples[0].resident_bytes)
    if grown <= max(allowed, LEAST_BYTES):
        return None
    return f"grew by {grown / MIB:.1f} MiB in {hours * 60:.1f} minutes, {allowed / MIB:.1f} MiB are allowed"
