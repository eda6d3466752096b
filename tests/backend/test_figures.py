"""Check what is counted of a known run, by injected time: each histogram's values, and which ends count where."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.figures import (
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    REQUEST_SECONDS,
    Histogram,
    token_bounds,
)
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import HistogramView, QueryKind, Snapshot
from tests.backend.factories import DIGITS, ECHO, Rig

DRAFTS = SchedulerOptions(draft_tokens=4)


def told(rig: Rig) -> Snapshot:
    """Return what the scheduler tells of itself."""
    return rig.query(QueryKind.METRICS)


def seen(rig: Rig, name: str) -> tuple[int, float]:
    """Return how many values a histogram has counted, and their sum."""
    view = told(rig).histograms[name]
    return sum(view.counts), pytest.approx(view.total)


@pytest.mark.parametrize(("most", "last"), [(1, 1), (9, 5), (10, 10), (99, 50), (2048, 2000), (8192, 5000)])
def test_the_bounds_of_lengths_end_where_the_context_does(most: int, last: int) -> None:
    assert token_bounds(most)[-1] == last
    assert token_bounds(99) == (1, 2, 5, 10, 20, 50)


@pytest.mark.parametrize("bounds", [FIRST_TOKEN_SECONDS, INTER_TOKEN_SECONDS, REQUEST_SECONDS, token_bounds(8192)])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert all(low < high for low, high in itertools.pairwise(bounds))


@given(st.lists(st.sampled_from([0.0, 0.5, 0.999, 1.0, 1.001, 2.0, 5.0, 6.0])))
def test_each_value_counts_at_the_first_bound_that_it_does_not_exceed(values: list[float]) -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in values:
        histogram.observe(value)
    edges = [float("-inf"), 1.0, 2.0, 5.0, float("inf")]
    expected = [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]
    assert histogram.view() == HistogramView([1.0, 2.0, 5.0], expected, pytest.approx(sum(values)))


def test_a_known_run_is_counted_once_in_each_histogram() -> None:
    rig = Rig(1, script=DIGITS)
    rig.submit("s0", b"hello", max_tokens=3)
    rig.submit("s1", b"goodbye", max_tokens=1)
    rig.step(0.25)  # s0 has its row and its first id after 0.25 s
    rig.step(0.5)
    rig.step(2.0)  # and its last after 2.75 s
    rig.step(0.25)  # s1 waited for 3 s
    assert seen(rig, "queue_seconds") == (2, 0.25 + 3.0)
    assert seen(rig, "first_token_seconds") == (2, 0.25 + 3.0)
    assert seen(rig, "prefill_seconds") == (2, 0.0)
    assert seen(rig, "inter_token_seconds") == (2, 0.5 + 2.0)
    assert seen(rig, "decode_seconds") == (2, 2.5)
    assert seen(rig, "request_seconds") == (2, 2.75 + 3.0)
    assert seen(rig, "prompt_tokens") == (2, 12)
    assert seen(rig, "completion_tokens") == (2, 4)
    counts = told(rig).metrics
    assert (counts["prefilled_tokens"], counts["completion_tokens"], counts["finished_length"]) == (12, 4, 2)


def test_a_prompt_of_several_chunks_counts_its_prefill_and_is_counted_with_its_first_token() -> None:
    rig = Rig(1, script=DIGITS, budget=(4, 4))
    rig.submit("s0", b"0123456789", max_tokens=1)
    for _ in range(2):
        rig.step(1.0)
        assert told(rig).metrics.get("prefilled_tokens", 0) == 0
    rig.step(1.0)
    assert told(rig).metrics["prefilled_tokens"] == 10
    assert (seen(rig, "queue_seconds"), seen(rig, "prefill_seconds")) == ((1, 1.0), (1, 2.0))


def test_one_that_never_had_a_row_counts_as_a_request_and_in_no_phase() -> None:
    rig = Rig(1, script=DIGITS)
    rig.submit("s0", max_tokens=200)
    rig.submit("s1")
    rig.step()
    rig.now += 4.0
    rig.abort("s1")
    assert seen(rig, "request_seconds") == (1, 4.0)
    assert [seen(rig, name)[0] for name in ("queue_seconds", "prefill_seconds", "decode_seconds")] == [0, 0, 0]
    assert seen(rig, "completion_tokens") == (1, 0)
    assert told(rig).metrics["finished_abort"] == 1


def test_one_that_ends_in_its_prefill_counts_in_the_queue_alone() -> None:
    rig = Rig(1, script=DIGITS, budget=(2, 2))
    rig.submit("s0", b"0123456789")
    rig.step(1.0)
    rig.abort("s0")
    assert [seen(rig, name)[0] for name in ("queue_seconds", "prefill_seconds", "first_token_seconds")] == [1, 0, 0]


def test_ids_that_came_with_one_step_count_as_one_gap() -> None:
    rig = Rig(1, script=ECHO, options=DRAFTS)
    rig.submit("s0", b"abcdabcdabcdabcdabcd", max_tokens=16)
    while not rig.scheduler.is_empty:
        rig.step(1.0)
    num_steps = len([plan for plan in rig.plans if plan.rows[0].sample])
    assert len(rig.ids["s0"]) == 16 > num_steps
    assert seen(rig, "inter_token_seconds") == (num_steps - 1, num_steps - 1)


def test_one_that_goes_on_after_another_backend_has_no_first_token_here() -> None:
    rig = Rig(1, script=DIGITS)
    rig.submit("s0", b"helloab", num_prompt_tokens=5, max_tokens=4)
    rig.step(1.0)
    rig.step(1.0)
    assert seen(rig, "first_token_seconds")[0] == 0
    assert seen(rig, "inter_token_seconds") == (1, 1.0)
    assert told(rig).metrics.get("prefilled_tokens", 0) == 0


def test_the_share_of_the_kv_cache_is_of_what_the_rows_may_hold() -> None:
    rig = Rig(2, script=DIGITS, context_tokens=50)
    assert told(rig).kv_usage == 0
    rig.submit("s0", b"0123456789", max_tokens=20)
    rig.step()
    assert told(rig).kv_usage == 11 / 100
    bounded = Rig(2, script=DIGITS, context_tokens=50, options=SchedulerOptions(kv_tokens=60))
    bounded.submit("s0", b"0123456789", max_tokens=20)
    bounded.step()
    assert told(bounded).kv_usage == 11 / 60
    rig.run()
    assert told(rig).kv_usage == 0


def test_prompts_are_looked_up_only_while_rows_remember() -> None:
    for options, num_queried, num_found in ((None, 0, 0), (SchedulerOptions(prefix_reuse=True), 80, 39)):
        rig = Rig(1, options=options)
        for number in range(2):
            rig.submit(f"s{number}", b"0123456789" * 4, max_tokens=1)
            rig.run()
        counts = told(rig).metrics
        found = (counts.get("prefix_queried_tokens", 0), counts.get("prefix_tokens", 0))
        assert found == (num_queried, num_found)


def test_only_those_who_ask_for_figures_get_them() -> None:
    rig = Rig(1)
    rig.submit("s0")
    rig.run()
    for kind in (QueryKind.ROWS, QueryKind.REQUEST):
        snapshot = rig.query(kind)
        assert (snapshot.metrics, snapshot.histograms) == ({}, {})
