"""Check sequences that ask something of their prompt: an embedding, or how likely each of its ids is."""

from __future__ import annotations

import pytest

from inference_api.backend.engines.base import RowResult, ScoreSpec, StepResult
from inference_api.backend.engines.mock import _embedding, _scores
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason, Pooling, QueryKind
from tests.backend.factories import ECHO, WORKER, Rig, ScriptedEngine

PROMPT = b"a prompt of some length, which several chunks hold"
NUM_TOP = 3
POOLED = {"max_tokens": 0, "pooling": Pooling.MEAN}
SCORED = {"max_tokens": 0, "prompt_logprobs": NUM_TOP}


def expected_scores(prompt: bytes) -> list:
    return list(_scores(0, ScoreSpec(tuple(prompt[1:]), NUM_TOP)))


def counts_of(rig: Rig) -> tuple[dict[str, float], dict[str, tuple[int, float]]]:
    """Return the counters, and of each histogram how many values it has seen and their sum."""
    snapshot = rig.query(QueryKind.METRICS)
    return snapshot.metrics, {name: (sum(view.counts), view.total) for name, view in snapshot.histograms.items()}


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("budget", [(64, 512), (7, 16)])
def test_an_embedding_ends_its_sequence_in_the_step_that_computes_the_last_id(pooling, budget) -> None:
    rig = Rig(budget=budget)
    rig.submit("e", PROMPT, max_tokens=0, pooling=pooling)
    while sum(len(row.token_ids) for plan in rig.plans for row in plan.rows) < len(PROMPT):
        assert not rig.ends
        rig.step()
    end = rig.ends["e"]
    assert (end.reason, end.num_completion_tokens) == (FinishReason.STOP, 0)
    assert end.embedding == _embedding(pooling, list(PROMPT))
    assert rig.scheduler.is_empty
    assert not rig.engine.rows_in_use


def test_a_scored_prompt_without_ids_to_draw_ends_with_length_and_sends_what_each_chunk_found() -> None:
    rig = Rig(budget=(7, 16))
    rig.submit("s", PROMPT, **SCORED)
    rig.run()
    end = rig.ends["s"]
    assert (end.reason, end.num_completion_tokens, end.embedding) == (FinishReason.LENGTH, 0, None)
    assert rig.scores["s"] == expected_scores(PROMPT)
    outputs = [output for messages in rig.steps for message in messages.values() for output in message.outputs]
    assert [len(output.prompt_logprobs) for output in outputs] == [8, 8, 8, 8, 8, 8, 1]


def test_a_prompt_of_one_id_has_nothing_to_score_and_ends_all_the_same() -> None:
    rig = Rig()
    rig.submit("s", b"x", **SCORED)
    rig.run()
    assert rig.scores["s"] == []
    assert rig.ends["s"].reason is FinishReason.LENGTH


def test_a_scored_prompt_draws_what_it_would_draw_unscored() -> None:
    rig = Rig(budget=(7, 16))
    rig.submit("s", PROMPT, prompt_logprobs=NUM_TOP, max_tokens=9)
    rig.submit("plain", PROMPT, max_tokens=9)
    rig.run()
    assert rig.text("s") == rig.text("plain")
    assert rig.scores["s"] == expected_scores(PROMPT)
    assert rig.scores["plain"] == []


def test_what_an_earlier_attempt_delivered_is_not_part_of_the_scored_prompt() -> None:
    rig = Rig(budget=(7, 16))
    known = list(PROMPT) + list(b"known")
    rig.submit("s", PROMPT, token_ids=known, prompt_logprobs=NUM_TOP, max_tokens=9)
    rig.run()
    assert rig.scores["s"] == expected_scores(PROMPT)
    assert len(rig.ids["s"]) == 4


def test_drafts_begin_when_the_prompt_is_scored() -> None:
    drafted = {}
    for num_top in (None, 0):
        rig = Rig(script=ECHO, options=SchedulerOptions(draft_tokens=4))
        rig.submit("s", b"ababab", prompt_logprobs=num_top, max_tokens=6)
        rig.run()
        drafted[num_top] = [bool(row.draft_ids) for plan in rig.plans for row in plan.rows]
    assert drafted[None][0]
    assert not drafted[0][0]
    assert any(drafted[0][1:])


def test_neither_begins_with_what_another_row_holds_and_both_may_be_begun_with() -> None:
    rig = Rig(options=SchedulerOptions(prefix_reuse=True))
    for session_id, changes in {"e": POOLED, "s": SCORED, "plain": {}}.items():
        rig.submit(session_id, PROMPT + session_id.encode(), **changes)
        rig.run()
    prefixes = [
        row.prefix and row.prefix.num_tokens for plan in rig.plans for row in plan.rows if len(row.token_ids) > 1
    ]
    assert prefixes == [None, None, len(PROMPT)]
    assert [rig.ends[name].num_cached_tokens for name in ("e", "s", "plain")] == [0, 0, len(PROMPT)]


@pytest.mark.parametrize("changes", [POOLED, {"prompt_logprobs": NUM_TOP, "max_tokens": 5}])
def test_whoever_makes_room_begins_to_pool_again_and_sends_no_score_twice(changes) -> None:
    rig = Rig(2, context_tokens=96, budget=(1, 30), options=SchedulerOptions(kv_tokens=96, prefix_reuse=True))
    rig.submit("long", b"it grows, others wait", max_tokens=60)
    rig.step()
    rig.submit("a", PROMPT, **changes)
    rig.run()
    assert rig.query(QueryKind.METRICS).metrics["preemptions"] >= 1
    starts = [row.start for plan in rig.plans for row in plan.rows if row.pool is not None or row.score is not None]
    if "pooling" in changes:
        assert starts.count(0) == 2
        assert rig.ends["a"].embedding == _embedding(Pooling.MEAN, list(PROMPT))
    else:
        assert len(starts) == len(set(starts))
        assert rig.scores["a"] == expected_scores(PROMPT)


@pytest.mark.parametrize("changes", [POOLED, SCORED])
def test_no_first_token_is_waited_for_but_the_other_limits_hold(changes) -> None:
    rig = Rig(1, budget=(4, 8))
    rig.submit("a", PROMPT, first_token_seconds=1.0, total_seconds=50.0, **changes)
    rig.submit("b", PROMPT, first_token_seconds=1.0, queue_seconds=4.0, **changes)
    rig.step(2.0)
    assert not rig.ends
    rig.step(3.0)
    assert rig.ends["b"].error.message == "No row became free within 4 seconds."
    rig.step(45.0)
    assert rig.ends["a"].error.message == "The request took longer than 50 seconds."


def test_a_scored_prompt_that_draws_has_the_limit_of_the_first_token() -> None:
    rig = Rig(1, budget=(4, 8))
    rig.submit("a", PROMPT, first_token_seconds=1.0, prompt_logprobs=0)
    rig.step(2.0)
    assert rig.ends["a"].error.message == "The first token took longer than 1 seconds."


@pytest.mark.parametrize(("changes", "budget"), [(POOLED, 25), (SCORED, 50)])
def test_the_figures_have_the_prompt_and_no_token_of_an_answer(changes, budget) -> None:
    rig = Rig(1, budget=(budget, budget))
    rig.submit("a", PROMPT, **changes)
    rig.submit("b", PROMPT, **changes)
    for _ in range(4):
        rig.step(1.0)
    counters, seen = counts_of(rig)
    names = ("requests", "prompt_tokens", "prefilled_tokens", "completion_tokens")
    assert [counters.get(name, 0) for name in names] == [2, 2 * len(PROMPT), 2 * len(PROMPT), 0]
    assert (seen["prompt_tokens"], seen["completion_tokens"]) == ((2, 2 * len(PROMPT)), (0, 0))
    assert (seen["first_token_seconds"], seen["inter_token_seconds"], seen["decode_seconds"]) == ((0, 0),) * 3
    assert (seen["queue_seconds"], seen["prefill_seconds"], seen["request_seconds"]) == ((2, 4), (2, 2), (2, 6))
    timing = rig.ends["b"].timing
    assert (timing.queue_seconds, timing.prefill_seconds, timing.decode_seconds, timing.batch_size) == (3, 1, 0, 1)


@pytest.mark.parametrize("changes", [POOLED, SCORED])
def test_an_engine_that_does_not_answer_ends_the_row_and_what_it_holds_is_not_used(changes) -> None:
    rig = Rig(options=SchedulerOptions(prefix_reuse=True))
    inner = rig.engine
    rig.engine = ScriptedEngine(inner, lambda plan: StepResult(tuple(RowResult(row.row) for row in plan.rows)))
    rig.submit("a", PROMPT, **changes)
    rig.run()
    assert rig.ends["a"].error.message == "The engine made nothing of this request."
    rig.engine = inner
    rig.submit("b", PROMPT + b"!")
    rig.run()
    assert rig.ends["b"].num_cached_tokens == 0


WINDOW = SchedulerOptions(batch_window_seconds=2.0, batch_max_requests=3)


def started(rig: Rig) -> list[str]:
    """Return who has had a row, in the order of starts."""
    return sorted(rig.rows, key=lambda session_id: min(epoch for _, epoch in rig.rows[session_id]))


def test_requests_that_batch_start_together_when_the_first_ones_window_is_over_and_others_are_not_held() -> None:
    rig = Rig(options=WINDOW)
    rig.submit("a", batches=True, **POOLED)
    assert rig.scheduler.next_wake(rig.now) == 1.0
    rig.step(1.5)
    rig.submit("b", batches=True, max_tokens=1)
    rig.submit("other", max_tokens=1)
    assert rig.request("b").place == 3
    rig.step()
    assert started(rig) == ["other"]
    assert rig.scheduler.next_wake(rig.now) == pytest.approx(0.5)
    rig.step(0.5)
    assert started(rig) == ["other", "a", "b"]
    assert rig.ends["a"].timing.batch_size == 2
    assert rig.ends["a"].timing.queue_seconds == pytest.approx(2.0)


def test_a_full_window_starts_at_once() -> None:
    rig = Rig(options=WINDOW)
    for session_id in ("a", "b", "c", "d"):
        rig.submit(session_id, batches=True, max_tokens=1)
    assert rig.scheduler.next_wake(rig.now) == 0.0
    rig.step()
    assert started(rig) == ["a", "b", "c"]
    rig.step(2.0)
    assert started(rig) == ["a", "b", "c", "d"]


def test_a_drain_lets_those_in_the_window_start_at_once() -> None:
    rig = Rig(options=WINDOW)
    rig.submit("a", batches=True, max_tokens=1)
    rig.admission.drain()
    rig.step()
    assert rig.ends["a"].reason is FinishReason.LENGTH


def test_an_abort_a_deadline_and_a_worker_that_is_gone_end_those_in_the_window() -> None:
    rig = Rig(options=SchedulerOptions(batch_window_seconds=9.0))
    rig.submit("aborted", batches=True)
    rig.submit("late", batches=True, queue_seconds=1.0)
    rig.submit("lost", batches=True, worker="worker-2")
    rig.submit("left", batches=True, max_tokens=1)
    rig.abort("aborted")
    rig.apply(WorkerGone("worker-2"), "worker-2")
    assert rig.scheduler.next_wake(rig.now) == 0.0
    rig.step()
    assert rig.scheduler.next_wake(rig.now) == 1.0
    rig.step(1.0)
    assert {name: end.reason for name, end in rig.ends.items()} == {
        "aborted": FinishReason.ABORT,
        "late": FinishReason.ERROR,
    }
    assert rig.admission.num_requests == 1
    rig.step(8.0)
    assert started(rig) == ["left"]
    assert WORKER in rig.steps[-1]
