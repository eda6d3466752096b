"""Check the exposition text: every counter is there, and no label tells who calls."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from inference_api.messages import Dropped, FinishReason, QueryKind, Snapshot
from inference_api.server.metrics import render_metrics
from tests.backend.factories import Rig


def _samples(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text, content_type = render_metrics(snapshot)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_gauges_and_counters_come_from_the_snapshot() -> None:
    snapshot = Snapshot(1, 7, 32, 5, metrics={"completion_tokens": 11.0, "finished_stop": 3.0})
    samples = _samples(snapshot)
    assert samples[("inference_api_user_rows", (("state", "in_use"),))] == 5
    assert samples[("inference_api_user_rows", (("state", "free"),))] == 27
    assert samples[("inference_api_input_queue_depth", ())] == 7
    assert samples[("inference_api_completion_tokens_total", ())] == 11
    assert samples[("inference_api_finished_total", (("reason", "stop"),))] == 3
    assert samples[("inference_api_finished_total", (("reason", "abort"),))] == 0


def test_what_workers_report_as_late_or_foreign_is_added_up() -> None:
    rig = Rig(1)
    rig.apply(Dropped(2, 1), "worker-1")
    rig.apply(Dropped(3, 0), "worker-2")
    samples = _samples(rig.query(QueryKind.METRICS))
    assert samples[("inference_api_late_tokens_total", ())] == 5
    assert samples[("inference_api_foreign_tokens_total", ())] == 1


def test_every_figure_that_the_scheduler_counts_is_exposed() -> None:
    rig = Rig(1)
    rig.submit("s0")
    rig.run()
    snapshot = rig.query(QueryKind.METRICS)
    exposed = _samples(snapshot)
    for name, value in snapshot.metrics.items():
        kind, _, reason = name.partition("finished_")
        key = (
            ("inference_api_finished_total", (("reason", reason),)) if not kind else (f"inference_api_{name}_total", ())
        )
        assert exposed[key] == value, name


def test_labels_are_a_fixed_set() -> None:
    labels = {label for _, labels in _samples(Snapshot(1, 0, 1, 0)) for label in labels}
    states = {("state", "in_use"), ("state", "free")}
    assert labels == states | {("reason", reason.value) for reason in FinishReason}
