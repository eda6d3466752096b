"""Own what `/metrics` tells, in Prometheus' text format: the families, and where each one's value comes from.

Runs in PROCESS 1. The backend owns every number, workers report theirs to it, so that several workers tell the same
story. Families of vLLM's names mean what vLLM's do, so that what reads those can read these; own ones are
`inference_api_*`. Where names say requests, sequences are counted. Labels are a fixed set: no tenant, no request id, no
text. docs/metrics.md is made of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from inference_api.messages import FinishReason, HistogramView, Snapshot

OWN_PREFIX = "inference_api_"
VLLM_PREFIX = "vllm:"
NO_VALUES = HistogramView([], [0], 0.0)

Values = dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Gauge:
    """A family of values that rise and fall; `label` names what its values, if several, are told apart by."""

    name: str
    summary: str
    values: Callable[[Snapshot], Values]
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Counter:
    """A family of sums since the backend's start, of the backend's count of that name, or of one for each reason."""

    name: str
    summary: str
    count: str
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """A family of one of the backend's histograms."""

    name: str
    summary: str
    histogram: str
    label: str = ""


Family = Gauge | Counter | Histogram


def _own(count: str, summary: str) -> Counter:
    return Counter(OWN_PREFIX + count, summary, count)


FAMILIES: tuple[Family, ...] = (
    Gauge(
        "inference_api_user_rows",
        "User rows by state.",
        lambda told: {"in_use": told.num_rows_in_use, "free": told.num_rows - told.num_rows_in_use},
        "state",
    ),
    Gauge("inference_api_input_queue_depth", "Sequences waiting.", lambda told: {"": told.num_waiting}),
    _own("requests", "Sequences that took a place in the input queue."),
    _own("refused", "Sequences that got no place in it."),
    _own("prompt_tokens", "Prompt tokens of those that took one."),
    _own("prefilled_tokens", "Prompt tokens of sequences that had their first token, or ended without wanting one."),
    _own("completion_tokens", "Tokens made and sent."),
    _own("discarded_tokens", "Tokens computed and never sent."),
    _own("scheduled_tokens", "Tokens computed, prompts and completions."),
    _own("steps", "Forward passes."),
    _own("prefix_queried_tokens", "Known tokens of sequences that got a row while rows remember."),
    _own("prefix_hits", "Sequences that began with what a row of their tenant held."),
    _own("prefix_tokens", "Tokens that were not computed for that reason."),
    _own("preemptions", "Rows that were taken back to make room for others."),
    _own("draft_tokens", "Guesses of next tokens that were computed."),
    _own("accepted_draft_tokens", "Guesses that were right."),
    _own("late_tokens", "Tokens for sessions that had just ended."),
    _own("foreign_tokens", "Tokens that matched no rule; always 0."),
    Counter("inference_api_finished", "Ended sequences by reason.", "finished_", "reason"),
    Gauge("vllm:num_requests_running", "Sequences that have a row.", lambda told: {"": told.num_rows_in_use}),
    Gauge("vllm:num_requests_waiting", "Sequences that wait for one.", lambda told: {"": told.num_waiting}),
    Gauge(
        "vllm:kv_cache_usage_perc",
        "Known tokens of running sequences as a share, 0 to 1, of what the rows may hold.",
        lambda told: {"": told.kv_usage},
    ),
    Counter(
        "vllm:prompt_tokens",
        "Prompt tokens, counted with the first token, or the end of what wants none.",
        "prefilled_tokens",
    ),
    Counter("vllm:generation_tokens", "Tokens made and sent.", "completion_tokens"),
    Counter("vllm:request_success", "Ended sequences by reason.", "finished_", "finished_reason"),
    Counter("vllm:num_preemptions", "Rows that were taken back to make room for others.", "preemptions"),
    Counter("vllm:prefix_cache_queries", "Tokens looked up in what rows remember.", "prefix_queried_tokens"),
    Counter("vllm:prefix_cache_hits", "Tokens of those that were found there.", "prefix_tokens"),
    Histogram(
        "vllm:time_to_first_token_seconds", "From a sequence's submit to its first token.", "first_token_seconds"
    ),
    Histogram(
        "vllm:inter_token_latency_seconds",
        "Between two steps that made tokens of one sequence; tokens of one step count as one.",
        "inter_token_seconds",
    ),
    Histogram(
        "vllm:e2e_request_latency_seconds", "From a sequence's submit to its end, whatever the end.", "request_seconds"
    ),
    Histogram("vllm:request_queue_time_seconds", "From a sequence's submit to its first row.", "queue_seconds"),
    Histogram("vllm:request_prefill_time_seconds", "From the first row to the first token.", "prefill_seconds"),
    Histogram("vllm:request_decode_time_seconds", "From the first token to the end.", "decode_seconds"),
    Histogram("vllm:request_prompt_tokens", "Prompt tokens of ended sequences.", "prompt_tokens"),
    Histogram("vllm:request_generation_tokens", "Tokens made for ended sequences.", "completion_tokens"),
)
"""Every family, in the order in which they are told."""


class SnapshotCollector(Collector):
    """Turn one Snapshot into metric families; vLLM's have the label `model_name`."""

    def __init__(self, snapshot: Snapshot, model_name: str) -> None:
        self._snapshot = snapshot
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        for family in FAMILIES:
            labels = {"model_name": self._model_name} if family.name.startswith(VLLM_PREFIX) else {}
            match family:
                case Histogram():
                    view = self._snapshot.histograms.get(family.histogram, NO_VALUES)
                    histogram = HistogramMetricFamily(family.name, family.summary, labels=[*labels])
                    histogram.add_metric([*labels.values()], _buckets(view), view.total)
                    yield histogram
                case _:
                    yield self._of_values(family, labels)

    def _of_values(self, family: Gauge | Counter, labels: dict[str, str]) -> Metric:
        """Return a family of one value, or of one for each word of its own label."""
        make = GaugeMetricFamily if isinstance(family, Gauge) else CounterMetricFamily
        metric = make(family.name, family.summary, labels=[*labels, *([family.label] if family.label else [])])
        values = family.values(self._snapshot) if isinstance(family, Gauge) else self._counts(family)
        for word, value in values.items():
            metric.add_metric([*labels.values(), *([word] if family.label else [])], value)
        return metric

    def _counts(self, family: Counter) -> Values:
        words = [reason.value for reason in FinishReason] if family.label else [""]
        return {word: self._snapshot.metrics.get(family.count + word, 0.0) for word in words}


def render_metrics(snapshot: Snapshot, model_name: str) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot, model_name))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _buckets(view: HistogramView) -> list[tuple[str, float]]:
    """Return the cumulative counts that Prometheus wants, each with the bound that its values do not exceed."""
    bounds = [*(str(bound) for bound in view.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(view.counts), strict=True))
