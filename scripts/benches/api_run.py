"""Hold what a load tool reported of a server, and turn several such reports into figures.

A tool's runs against one server are pooled over the rounds: a percentile of all its requests says more than a median of
few rounds' percentiles. Pure; knows times and counts, neither a tool nor a server.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from benches.figures import median, percentile

MIN_P95_SAMPLES = 40
"""Below this a 95th percentile is the longest one or its neighbour, and none is printed."""


@dataclasses.dataclass(frozen=True, slots=True)
class ToolRun:
    """One run as its tool reported it: a number a request that was answered, in milliseconds, and counts."""

    latency_ms: Sequence[float]
    first_token_ms: Sequence[float]
    inter_token_ms: Sequence[float]
    num_tokens: int
    seconds: float
    num_errors: int = 0
    first_error: str = ""


def pooled_figures(runs: Sequence[ToolRun]) -> dict[str, float | str]:
    """Return the median rate of the runs, and p50 and p95 of each time over the requests of all of them."""
    figures: dict[str, float | str] = {
        "requests": sum(len(run.latency_ms) for run in runs),
        "errors": sum(run.num_errors for run in runs),
        "tokens": sum(run.num_tokens for run in runs),
        "tokens_per_second": median([run.num_tokens / run.seconds if run.seconds else 0.0 for run in runs]),
    }
    for name in ("latency_ms", "first_token_ms", "inter_token_ms"):
        pooled = sorted(sample for run in runs for sample in getattr(run, name))
        if pooled:
            figures[f"{name}_p50"] = round(statistics.median(pooled), 1)
        if len(pooled) >= MIN_P95_SAMPLES:
            figures[f"{name}_p95"] = round(percentile(pooled, 95), 1)
    errors = [run.first_error for run in runs if run.first_error]
    return figures | ({"first_error": errors[0]} if errors else {})
