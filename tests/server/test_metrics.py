"""Check the exposition text: every figure is there under its names, histograms add up, no label tells who calls."""

from __future__ import annotations

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from inference_api.messages import Dropped, FinishReason, HistogramView, QueryKind, Snapshot
from inference_api.server.metrics import FAMILIES, render_metrics
from tests.backend.factories import DIGITS, Rig

MODEL = ("model_name", "mock")
ENDS = [reason.value for reason in FinishReason]


def families_of(snapshot: Snapshot) -> dict[str, Metric]:
    """Return the exposition as Prometheus reads it."""
    text, content_type = render_metrics(snapshot, "mock")
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {family.name: family for family in families}


def samples_of(snapshot: Snapshot) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families_of(snapshot).values()
        for sample in family.samples
    }


def test_gauges_and_counters_come_from_the_snapshot() -> None:
    snapshot = Snapshot(1, 7, 32, 5, metrics={"completion_tokens": 11.0, "finished_stop": 3.0}, kv_usage=0.25)
    samples = samples_of(snapshot)
    assert samples[("inference_api_user_rows", (("state", "in_use"),))] == 5
    assert samples[("inference_api_user_rows", (("state", "free"),))] == 27
    assert samples[("inference_api_input_queue_depth", ())] == 7
    assert samples[("inference_api_completion_tokens_total", ())] == 11
    assert samples[("inference_api_finished_total", (("reason", "stop"),))] == 3
    assert samples[("inference_api_finished_total", (("reason", "abort"),))] == 0
    assert samples[("vllm:num_requests_running", (MODEL,))] == 5
    assert samples[("vllm:num_requests_waiting", (MODEL,))] == 7
    assert samples[("vllm:kv_cache_usage_perc", (MODEL,))] == 0.25
    assert samples[("vllm:generation_tokens_total", (MODEL,))] == 11
    assert samples[("vllm:request_success_total", (("finished_reason", "stop"), MODEL))] == 3


def test_a_histogram_is_told_in_cumulative_buckets_with_count_and_sum() -> None:
    view = HistogramView([0.5, 1.0, 2.5], [2, 0, 3, 1], 12.25)
    samples = samples_of(Snapshot(1, 0, 1, 0, histograms={"queue_seconds": view}))
    name = "vllm:request_queue_time_seconds"
    found = {bound: samples[(f"{name}_bucket", (("le", bound), MODEL))] for bound in ("0.5", "1.0", "2.5", "+Inf")}
    assert found == {"0.5": 2, "1.0": 2, "2.5": 5, "+Inf": 6}
    assert (samples[(f"{name}_count", (MODEL,))], samples[(f"{name}_sum", (MODEL,))]) == (6, 12.25)


def test_a_known_run_is_told_under_vllms_names() -> None:
    rig = Rig(1, script=DIGITS)
    rig.submit("s0", b"hello", max_tokens=3)
    for _ in range(3):
        rig.step(0.25)
    rig.submit("s1", b"goodbye")
    rig.abort("s1")
    samples = samples_of(rig.query(QueryKind.METRICS))
    expected = {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 3,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 0.25,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:inter_token_latency_seconds_sum": 0.5,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_sum": 0.75,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prefill_time_seconds_count": 1,
        "vllm:request_decode_time_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_sum": 12,
        "vllm:request_generation_tokens_sum": 3,
    }
    assert {name: samples[(name, (MODEL,))] for name in expected} == pytest.approx(expected)
    ends = {reason: samples[("vllm:request_success_total", (("finished_reason", reason), MODEL))] for reason in ENDS}
    assert ends == {"stop": 0, "length": 1, "abort": 1, "quota": 0, "error": 0}


def test_what_workers_report_as_late_or_foreign_is_added_up() -> None:
    rig = Rig(1)
    rig.apply(Dropped(2, 1), "worker-1")
    rig.apply(Dropped(3, 0), "worker-2")
    samples = samples_of(rig.query(QueryKind.METRICS))
    assert samples[("inference_api_late_tokens_total", ())] == 5
    assert samples[("inference_api_foreign_tokens_total", ())] == 1


def test_every_figure_that_the_scheduler_counts_is_exposed() -> None:
    rig = Rig(1)
    rig.submit("s0")
    rig.run()
    snapshot = rig.query(QueryKind.METRICS)
    exposed = samples_of(snapshot)
    for name, value in snapshot.metrics.items():
        kind, _, reason = name.partition("finished_")
        key = (
            ("inference_api_finished_total", (("reason", reason),)) if not kind else (f"inference_api_{name}_total", ())
        )
        assert exposed[key] == value, name
    counts = [sum(view.counts) for view in snapshot.histograms.values()]
    assert sorted(value for (name, _), value in exposed.items() if name.endswith("_count")) == sorted(counts)


def test_every_family_has_its_kind_and_its_words_and_is_there_before_anything_has_happened() -> None:
    families = families_of(Snapshot(1, 0, 1, 0))
    assert [family.name for family in FAMILIES] == list(families)
    for family in FAMILIES:
        told = families[family.name]
        assert (told.type, told.documentation) == (type(family).__name__.lower(), family.summary)
        assert told.samples, family.name


def test_labels_are_a_fixed_set() -> None:
    labels = {label for _, labels in samples_of(Snapshot(1, 0, 1, 0)) for label in labels}
    states = {("state", "in_use"), ("state", "free")}
    reasons = {(name, reason) for name in ("reason", "finished_reason") for reason in ENDS}
    assert labels == states | reasons | {MODEL, ("le", "+Inf")}
