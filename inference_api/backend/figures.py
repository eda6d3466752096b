"""Count what the scheduler sees: counters by name, and histograms of times and lengths, for `/metrics`.

Pure; used by the scheduler alone, in the decode thread, so that every gunicorn worker tells the same numbers. Times are
of the decode thread's monotonic clock, from when it takes a Submit in to when it has an id or an end to send.
A step costs one observation for each row that draws. Knows no names of `/metrics` and no HTTP.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Sequence as Several

from inference_api.backend.sequence import Sequence
from inference_api.messages import Finished, FinishReason, HistogramView

# vllm/v1/metrics/loggers.py (Apache 2.0), the bounds of its histograms of the same names, so that quantiles over both
# services can be drawn from one query; the finer ones below its first are ours, where a small model's times lie.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
INTER_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)


def token_bounds(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … as far as `most`, as vLLM's `build_1_2_5_buckets` does."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(float(step) for step in steps if step <= most)


class Histogram:
    """Count values by size. `bounds` ascend; a value that equals one counts below it."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Several[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._total += value

    def view(self) -> HistogramView:
        """Return what was counted so far."""
        return HistogramView(list(self._bounds), list(self._counts), self._total)


class Figures:
    """The scheduler's counters, which it adds to by itself, and the histograms."""

    def __init__(self, context_tokens: int) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._first_token = Histogram(FIRST_TOKEN_SECONDS)
        self._inter_token = Histogram(INTER_TOKEN_SECONDS)
        self._request = Histogram(REQUEST_SECONDS)
        self._queue = Histogram(REQUEST_SECONDS)
        self._prefill = Histogram(REQUEST_SECONDS)
        self._decode = Histogram(REQUEST_SECONDS)
        self._prompt_tokens = Histogram(token_bounds(context_tokens))
        self._completion_tokens = Histogram(token_bounds(context_tokens))

    def take_draw(self, sequence: Sequence, now: float) -> None:
        """Count that a step has drawn for a sequence, which does not know its new ids yet.

        One that goes on after another backend's ids has neither a first id here nor a gap before its first one.
        """
        if sequence.last_token_at is not None:
            self._inter_token.observe(now - sequence.last_token_at)
        elif sequence.num_completion_tokens == 0:
            self._first_token.observe(now - sequence.arrived_at)
            self.counts["prefilled_tokens"] += sequence.submit.num_prompt_tokens

    def take_end(self, sequence: Sequence, finished: Finished) -> None:
        """Count an end; where its time went, as far as it came."""
        timing = finished.timing
        self.counts[f"finished_{finished.reason}"] += 1
        self._request.observe(timing.queue_seconds + timing.prefill_seconds + timing.decode_seconds)
        self._prompt_tokens.observe(sequence.submit.num_prompt_tokens)
        if sequence.draws:
            self._completion_tokens.observe(finished.num_completion_tokens)
        if sequence.started_at is not None:
            self._queue.observe(timing.queue_seconds)
        if sequence.first_token_at is not None:
            self._prefill.observe(timing.prefill_seconds)
            self._decode.observe(timing.decode_seconds)
        elif finished.reason in (FinishReason.STOP, FinishReason.LENGTH):  # all that was asked for is of its prompt
            self._prefill.observe(timing.prefill_seconds)
            self.counts["prefilled_tokens"] += sequence.submit.num_prompt_tokens

    def histograms(self) -> dict[str, HistogramView]:
        """Return the histograms by name."""
        return {
            "first_token_seconds": self._first_token.view(),
            "inter_token_seconds": self._inter_token.view(),
            "request_seconds": self._request.view(),
            "queue_seconds": self._queue.view(),
            "prefill_seconds": self._prefill.view(),
            "decode_seconds": self._decode.view(),
            "prompt_tokens": self._prompt_tokens.view(),
            "completion_tokens": self._completion_tokens.view(),
        }
