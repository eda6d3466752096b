"""Check what a plan may ask of rows: order, range, positions that follow, ids of the vocabulary."""

from __future__ import annotations

import dataclasses

import pytest

from inference_api.backend.engines.base import (
    EngineInfo,
    PoolSpec,
    PrefixCopy,
    RowPlan,
    SampleSpec,
    ScoreSpec,
    StepPlan,
)
from inference_api.backend.engines.row_lengths import RowLengths
from inference_api.messages import Pooling
from inference_api.sampling_params import SamplingParams

INFO = EngineInfo(
    "x",
    "x",
    "x",
    num_rows=4,
    context_tokens=8,
    vocab_size=10,
    row_independent=True,
    digest="",
    copies_prefixes=True,
    max_draft_tokens=3,
    embedding_size=4,
)
POOL = PoolSpec(Pooling.MEAN, is_last=True)
SAMPLE = SampleSpec(SamplingParams(1.0, 1, 1.0, 7), 0, 1)


@pytest.fixture
def lengths() -> RowLengths:
    return RowLengths(INFO)


def fault_of(lengths: RowLengths, row: RowPlan) -> str:
    sound, faults = lengths.split(StepPlan((row,)))
    assert (sound == [row]) == (not faults)
    error = faults[row.row].error if faults else None
    return error.message if error else ""


@pytest.mark.parametrize("rows", [(1, 0), (3, 3), (4,), (-1, 0)])
def test_rows_that_do_not_ascend_within_the_range_are_no_plan(lengths: RowLengths, rows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not ascend"):
        lengths.split(StepPlan(tuple(RowPlan(row, 0, (1,), None) for row in rows)))


def test_a_row_goes_on_where_it_stood_or_begins_again(lengths: RowLengths) -> None:
    lengths.advance(RowPlan(2, 0, (1, 2, 3), None))
    assert fault_of(lengths, RowPlan(2, 3, (1,), None)) == ""
    assert fault_of(lengths, RowPlan(2, 0, (1,), None)) == ""
    assert "does not follow the 3" in fault_of(lengths, RowPlan(2, 4, (1,), None))
    lengths.forget(2)
    assert "does not follow the 0" in fault_of(lengths, RowPlan(2, 3, (1,), None))


def test_the_last_slot_may_be_used_and_the_one_behind_it_not(lengths: RowLengths) -> None:
    assert fault_of(lengths, RowPlan(0, 0, (1,) * 8, None)) == ""
    assert "0 to 8 are not within the context of 8" in fault_of(lengths, RowPlan(0, 0, (1,) * 9, None))


@pytest.mark.parametrize("token_id", [-1, 10])
def test_an_id_out_of_the_vocabulary_is_named(lengths: RowLengths, token_id: int) -> None:
    assert f"Token id {token_id} " in fault_of(lengths, RowPlan(0, 0, (9, token_id), None))


def test_a_row_without_tokens_is_a_fault(lengths: RowLengths) -> None:
    assert fault_of(lengths, RowPlan(0, 0, (), None)) == "No tokens to compute."


def test_a_row_begins_with_what_another_one_or_itself_holds(lengths: RowLengths) -> None:
    lengths.advance(RowPlan(2, 0, (1, 2, 3, 4), None))
    assert fault_of(lengths, RowPlan(0, 3, (1,), None, PrefixCopy(2, 3))) == ""
    assert fault_of(lengths, RowPlan(2, 2, (1,), None, PrefixCopy(2, 2))) == ""
    assert "does not follow a prefix of 3" in fault_of(lengths, RowPlan(0, 4, (1,), None, PrefixCopy(2, 3)))


@pytest.mark.parametrize(
    ("prefix", "fault"),
    [
        (PrefixCopy(2, 5), "Row 2 holds 4 positions, not a prefix of 5."),
        (PrefixCopy(2, 0), "Row 2 holds 4 positions, not a prefix of 0."),
        (PrefixCopy(1, 1), "Row 1 holds 0 positions, not a prefix of 1."),
        (PrefixCopy(4, 1), "Row 4 is not within 0 to 3."),
        (PrefixCopy(-1, 1), "Row -1 is not within 0 to 3."),
    ],
)
def test_a_prefix_that_its_source_does_not_hold_is_a_fault(lengths: RowLengths, prefix: PrefixCopy, fault: str) -> None:
    lengths.advance(RowPlan(2, 0, (1, 2, 3, 4), None))
    assert fault_of(lengths, RowPlan(0, prefix.num_tokens, (1,), None, prefix)) == fault


@pytest.mark.parametrize("neighbour", [RowPlan(2, 0, (1,), None), RowPlan(2, 1, (1,), None, PrefixCopy(2, 1))])
def test_a_row_that_begins_a_sequence_itself_is_no_source(lengths: RowLengths, neighbour: RowPlan) -> None:
    lengths.advance(RowPlan(2, 0, (1, 2, 3, 4), None))
    sound, faults = lengths.split(StepPlan((RowPlan(0, 3, (1,), None, PrefixCopy(2, 3)), neighbour)))
    assert sound == [neighbour]
    assert faults[0].error is not None
    assert faults[0].error.message == "Row 2 begins a sequence itself in this step."


def test_accepted_drafts_stay_in_the_row_and_refused_ones_do_not(lengths: RowLengths) -> None:
    plan = RowPlan(0, 0, (1, 2), SAMPLE, draft_ids=(3, 4, 5))
    assert fault_of(lengths, plan) == ""
    lengths.advance(plan, 1)
    assert fault_of(lengths, RowPlan(0, 3, (1,), None)) == ""
    assert "does not follow the 3" in fault_of(lengths, RowPlan(0, 2, (1,), None))


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (RowPlan(0, 0, (1,) * 6, SAMPLE, draft_ids=(1, 2, 3)), "0 to 8 are not within the context of 8"),
        (RowPlan(0, 0, (1,), SAMPLE, draft_ids=(10,)), "Token id 10 is not within the vocabulary"),
        (RowPlan(0, 0, (1,), SAMPLE, draft_ids=(1, 2, 3, 4)), "4 drafts are more than this engine's 3."),
        (RowPlan(0, 0, (1,), None, draft_ids=(1,)), "A row that draws nothing has no use for drafts."),
    ],
)
def test_drafts_that_do_not_fit_are_a_fault(lengths: RowLengths, plan: RowPlan, fault: str) -> None:
    assert fault in fault_of(lengths, plan)


def test_an_engine_that_copies_no_prefixes_refuses_them() -> None:
    lengths = RowLengths(dataclasses.replace(INFO, copies_prefixes=False))
    lengths.advance(RowPlan(2, 0, (1, 2), None))
    assert fault_of(lengths, RowPlan(2, 2, (1,), None, PrefixCopy(2, 2))) == "This engine copies no prefixes."


def test_a_pooled_row_computes_every_id_itself_and_is_asked_for_nothing_else(lengths: RowLengths) -> None:
    lengths.advance(RowPlan(1, 0, (1, 2, 3), None))
    assert fault_of(lengths, RowPlan(0, 0, (1, 2), None, pool=POOL)) == ""
    for row in (
        RowPlan(0, 0, (1, 2), SAMPLE, pool=POOL),
        RowPlan(0, 0, (1, 2), None, pool=POOL, score=ScoreSpec((1,), 0)),
        RowPlan(0, 2, (1, 2), None, PrefixCopy(1, 2), pool=POOL),
    ):
        assert "A row that is pooled" in fault_of(lengths, row)


def test_an_engine_without_embeddings_pools_nothing() -> None:
    lengths = RowLengths(dataclasses.replace(INFO, embedding_size=0))
    assert fault_of(lengths, RowPlan(0, 0, (1, 2), None, pool=POOL)) == "This engine makes no embeddings."


@pytest.mark.parametrize(
    ("next_ids", "text"),
    [
        ((1,), ""),
        ((1, 2), ""),
        ((), "0 ids to score do not follow 2"),
        ((1, 2, 3), "3 ids to score do not follow 2"),
        ((1, 10), "Token id 10 is not within the vocabulary of 10."),
        ((-1,), "Token id -1 is not within the vocabulary of 10."),
    ],
)
def test_ids_to_score_follow_computed_ones_and_are_of_the_vocabulary(
    lengths: RowLengths, next_ids: tuple[int, ...], text: str
) -> None:
    fault = fault_of(lengths, RowPlan(0, 0, (1, 2), SAMPLE, score=ScoreSpec(next_ids, 5)))
    assert text in fault
    assert bool(fault) == bool(text)


def test_a_scored_row_takes_no_prefix_and_guesses_nothing(lengths: RowLengths) -> None:
    lengths.advance(RowPlan(1, 0, (1, 2, 3), None))
    score = ScoreSpec((1,), 5)
    for row in (
        RowPlan(0, 2, (1, 2), None, PrefixCopy(1, 2), score=score),
        RowPlan(0, 0, (1, 2), SAMPLE, draft_ids=(3,), score=score),
    ):
        assert "A row that is scored" in fault_of(lengths, row)
