"""Render `/metrics`: the backend's counters, in Prometheus' text format.

Runs in PROCESS 1. The backend owns every number, workers report theirs to it, so that several workers tell the same
story. Labels are a fixed set: no tenant, no request id, no text.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from inference_api.messages import FinishReason, Snapshot

_COUNTERS = {
    "requests": "Requests that took a place in the input queue.",
    "refused": "Requests that got no place in it.",
    "prompt_tokens": "Prompt tokens of those requests.",
    "completion_tokens": "Tokens made and sent.",
    "discarded_tokens": "Tokens computed and never sent.",
    "scheduled_tokens": "Tokens computed, prompts and completions.",
    "steps": "Forward passes.",
    "prefix_hits": "Prompts that began with what a row of their tenant held.",
    "prefix_tokens": "Tokens that were not computed for that reason.",
    "preemptions": "Rows that were taken back to make room for others.",
    "draft_tokens": "Guesses of next tokens that were computed.",
    "accepted_draft_tokens": "Guesses that were right.",
    "late_tokens": "Tokens for sessions that had just ended.",
    "foreign_tokens": "Tokens that matched no rule; always 0.",
}


class SnapshotCollector(Collector):
    """Turn one Snapshot into metric families."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        snapshot, metrics = self._snapshot, self._snapshot.metrics
        rows = GaugeMetricFamily("inference_api_user_rows", "User rows by state.", labels=["state"])
        rows.add_metric(["in_use"], snapshot.num_rows_in_use)
        rows.add_metric(["free"], snapshot.num_rows - snapshot.num_rows_in_use)
        yield rows
        yield GaugeMetricFamily("inference_api_input_queue_depth", "Requests waiting.", value=snapshot.num_waiting)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"inference_api_{name}", text, value=metrics.get(name, 0))
        finished = CounterMetricFamily("inference_api_finished", "Ended sequences by reason.", labels=["reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], metrics.get(f"finished_{reason}", 0))
        yield finished


def render_metrics(snapshot: Snapshot) -> tuple[bytes, str]:
    """Return the exposition text and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SnapshotCollector(snapshot))
    return generate_latest(registry), CONTENT_TYPE_LATEST
