"""Check what drafts save step by step: their ends, their share of a step, and who does not draft."""

from __future__ import annotations

import dataclasses

import pytest

from inference_api.backend.engines.base import PrefixCopy, RowPlan, RowResult, SampleSpec, StepResult
from inference_api.backend.engines.mock import MockScript
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.sequence import Sequence
from inference_api.backend.step_planning import MAX_DRAFTED_STEP_TOKENS, SchedulerOptions
from inference_api.sampling_params import TokenLogprobs
from tests.backend.factories import DIGITS, ECHO, NOISE, WORKER, Rig, figure, ids_alone

DRAFTS = SchedulerOptions(draft_tokens=4)


def drafted(rig: Rig) -> list[RowPlan]:
    """Return the row plans with drafts."""
    return [row for plan in rig.plans for row in plan.rows if row.draft_ids]


def test_a_text_that_repeats_itself_comes_in_fewer_steps_and_is_the_same() -> None:
    rig = Rig(1, script=DIGITS, options=DRAFTS)
    rig.submit("s0", b"hello", max_tokens=60)
    rig.run()
    assert rig.ids["s0"] == ids_alone(b"hello", DIGITS, max_tokens=60)
    assert len(rig.plans) < 30
    accepted, num_drafts = figure(rig, "accepted_draft_tokens"), figure(rig, "draft_tokens")
    assert len(rig.plans) + accepted == 60
    assert accepted <= num_drafts == sum(len(row.draft_ids) for row in drafted(rig))


@pytest.mark.parametrize("max_tokens", range(20, 26))
def test_drafts_end_where_max_tokens_does(max_tokens: int) -> None:
    rig = Rig(1, script=DIGITS, options=DRAFTS)
    rig.submit("s0", b"hello", max_tokens=max_tokens)
    rig.run()
    assert len(rig.ids["s0"]) == max_tokens
    assert figure(rig, "discarded_tokens") == 0


@pytest.mark.parametrize("context_tokens", range(30, 36))
def test_drafts_end_where_the_context_does(context_tokens: int) -> None:
    rig = Rig(1, script=DIGITS, context_tokens=context_tokens, options=DRAFTS)
    rig.submit("s0", b"hello", max_tokens=99)
    rig.run()
    assert len(rig.ids["s0"]) == context_tokens - 5
    assert figure(rig, "discarded_tokens") == 0
    assert max(row.start + len(row.token_ids) + len(row.draft_ids) for row in drafted(rig)) <= context_tokens


def test_an_end_within_accepted_drafts_is_the_end_and_the_rest_is_discarded() -> None:
    prompt = b"one STOP one STOP one STOP"
    rig = Rig(1, script=ECHO, options=SchedulerOptions(draft_tokens=8, prefix_reuse=True))
    rig.submit("s0", prompt, max_tokens=50, stop_sequences=[b"STO"])
    rig.run()
    assert rig.text("s0") == b"one STO"
    assert rig.ends["s0"].stop == b"STO"
    assert (figure(rig, "completion_tokens"), figure(rig, "discarded_tokens")) == (7, 2)
    rig.submit("s1", prompt + b"one STOP and so on", max_tokens=50)
    assert rig.step().rows[0].prefix == PrefixCopy(0, len(prompt) + 7), "what was sent is what is remembered"
    rig.run()
    assert rig.ids["s1"] == ids_alone(prompt + b"one STOP and so on", ECHO, max_tokens=50)


def test_a_step_with_drafts_stays_small_and_rows_share_it() -> None:
    for num_rows in range(1, 10):
        rig = Rig(num_rows, script=DIGITS, options=DRAFTS)
        for number in range(num_rows):
            rig.submit(f"s{number}", b"hello", max_tokens=40)
        rig.run()
        most = max(sum(len(row.token_ids) + len(row.draft_ids) for row in plan.rows) for plan in rig.plans[1:])
        assert most == max(num_rows, min(MAX_DRAFTED_STEP_TOKENS, 5 * num_rows))
        full = [plan for plan in rig.plans if len(plan.rows) == num_rows]
        num_drafting = max(sum(bool(row.draft_ids) for row in plan.rows) for plan in full)
        assert num_drafting == min(num_rows, max(0, MAX_DRAFTED_STEP_TOKENS - num_rows))


def test_the_last_chunk_of_a_short_prompt_may_draft_too() -> None:
    rig = Rig(1, script=ECHO, options=DRAFTS)
    rig.submit("s0", b"ababab", max_tokens=6)
    (row,) = rig.step().rows
    assert (row.start, len(row.token_ids), row.draft_ids) == (0, 6, tuple(b"ab"))
    assert rig.text("s0") == b"aba"


def test_drafts_keep_within_the_bound_of_the_kv_cache() -> None:
    rig = Rig(2, script=DIGITS, context_tokens=64, options=SchedulerOptions(66, draft_tokens=8))
    rig.submit("s0", b"hello", max_tokens=99)
    rig.submit("s1", b"hello", max_tokens=99)
    rig.run()
    used = [sum(row.start + len(row.token_ids) + len(row.draft_ids) for row in plan.rows) for plan in rig.plans]
    assert max(used) == 66
    assert figure(rig, "accepted_draft_tokens") > 0


def test_a_text_whose_drafts_are_refused_stops_drafting() -> None:
    rig = Rig(1, script=NOISE, options=DRAFTS)
    rig.submit("s0", b"ab" * 20, max_tokens=200)
    rig.run()
    assert rig.ids["s0"] == ids_alone(b"ab" * 20, max_tokens=200)
    assert figure(rig, "draft_tokens") < 60


def test_a_row_whose_draws_are_ruled_one_by_one_does_not_draft() -> None:
    rig = Rig(2, script=DIGITS, options=DRAFTS)
    rig.submit("ruled", b"hello", max_tokens=40)
    rig.submit("free", b"hello", max_tokens=40)
    plain_spec = rig.scheduler._planner._sample_spec

    def ruled_spec(sequence: Sequence) -> SampleSpec:
        spec = plain_spec(sequence)
        return dataclasses.replace(spec, barred_ids=frozenset({1})) if sequence.session_id == "ruled" else spec

    rig.scheduler._planner._sample_spec = ruled_spec
    rig.run()
    assert {row.row for row in drafted(rig)} == {1}


def test_logprobs_go_with_the_ids_that_are_sent() -> None:
    rig = Rig(1)
    rig.submit("s0", max_tokens=2)
    plan = rig.scheduler.schedule(rig.now)
    logprobs = tuple(TokenLogprobs(-0.5 * number, []) for number in range(3))
    outputs = rig.scheduler.update(plan, StepResult((RowResult(0, (97, 98, 99), logprobs),)), rig.now)
    (output,) = outputs[WORKER].outputs
    assert (output.token_ids, output.logprobs) == ([97, 98], list(logprobs[:2]))


def test_an_engine_without_drafts_gets_none() -> None:
    rig = Rig(1, script=MockScript("digits", tokens_per_second=1e6), options=DRAFTS)
    rig.submit("s0", b"hello", max_tokens=60)
    rig.run()
    assert not drafted(rig)


def test_a_lost_worker_takes_its_drafts_with_it() -> None:
    rig = Rig(2, script=DIGITS, options=DRAFTS)
    rig.submit("mine", max_tokens=50)
    rig.submit("other", worker="worker-2", max_tokens=50)
    for _ in range(15):
        rig.step()
    rig.apply(WorkerGone(WORKER))
    assert [row.row for row in rig.step().rows] == [1]
    rig.run()
    assert rig.ids["other"] == ids_alone(b"hello", DIGITS, max_tokens=50)
