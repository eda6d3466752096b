"""Check what a plan may ask of rows: order, range, positions that follow, ids of the vocabulary."""

from __future__ import annotations

import pytest

from inference_api.backend.engines.base import EngineInfo, RowPlan, StepPlan
from inference_api.backend.engines.row_lengths import RowLengths

INFO = EngineInfo("x", "x", "x", num_rows=4, context_tokens=8, vocab_size=10, row_independent=True, digest="")


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
