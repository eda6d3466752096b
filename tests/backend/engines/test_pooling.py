"""Hold pooling to its promise: an exact sum, the same bits however the ids are cut into chunks."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.engines.base import PoolSpec, RowPlan
from inference_api.backend.engines.pooling import FRACTION_BITS, NON_FINITE_STATES, Pools, pooled_tokens
from inference_api.messages import Pooling

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

CONTEXT_TOKENS = 2048
WIDTH = 3


def pool_all(pools: Pools, row: int, states: torch.Tensor, borders: list[int], pooling: Pooling) -> bytes:
    """Pool `states` (tokens, hidden) in chunks between `borders`; return the embedding."""
    ends = sorted({0, *borders, len(states)})
    for start, end in pairwise(ends):
        pool = PoolSpec(pooling, is_last=end == len(states))
        plan = RowPlan(row, start, tuple(range(end - start)), None, pool=pool)
        wanted = pooled_tokens(plan, pool)
        result = pools.add(plan, pool, states[start:end][wanted.start : wanted.stop])
        assert (result is None) == (end < len(states))
    assert result is not None
    assert result.embedding is not None
    return result.embedding


NUMBERS = st.floats(-1000, 1000, width=32)


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(*(NUMBERS,) * WIDTH), min_size=1, max_size=30),
    borders=st.lists(st.integers(1, 29), max_size=6),
)
def test_a_mean_is_that_of_the_numbers_as_fractions_in_any_chunks(rows, borders) -> None:
    states = torch.tensor(rows, dtype=torch.float32)
    pools = Pools(CONTEXT_TOKENS)
    found = pool_all(pools, 0, states, [border for border in borders if border < len(rows)], Pooling.MEAN)
    assert found == pool_all(pools, 7, states, [], Pooling.MEAN)
    units = 1 << FRACTION_BITS
    expected = []
    for column in zip(*rows, strict=True):
        total = sum(round(Fraction(number) * units) for number in column)
        expected.append(float(Fraction(total, units * len(rows))))
    assert found == struct.pack(f"<{WIDTH}f", *expected)


def test_the_last_state_is_taken_as_it_is_and_no_other_is_asked_for() -> None:
    states = torch.tensor([[1.0, math.pi, -0.0], [1e-30, 3e38, 0.1]])[:, :WIDTH]
    states[1, 1] = 12345.678
    assert pool_all(Pools(CONTEXT_TOKENS), 0, states, [1], Pooling.LAST) == struct.pack("<3f", *states[1].tolist())
    plan = RowPlan(0, 0, (1, 2), None)
    assert len(pooled_tokens(plan, PoolSpec(Pooling.LAST, is_last=False))) == 0
    assert list(pooled_tokens(plan, PoolSpec(Pooling.MEAN, is_last=False))) == [0, 1]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2.1e6, -2.1e6])
def test_a_number_that_cannot_be_added_up_is_an_error_and_forgets_the_sum(number) -> None:
    pools = Pools(CONTEXT_TOKENS)
    pool = PoolSpec(Pooling.MEAN, is_last=False)
    assert pools.add(RowPlan(0, 0, (1,), None, pool=pool), pool, torch.ones(1, WIDTH)) is None
    bad = pools.add(RowPlan(0, 1, (1,), None, pool=pool), pool, torch.tensor([[1.0, number, 1.0]]))
    assert bad is not None
    assert bad.error == NON_FINITE_STATES
    after = pools.add(RowPlan(0, 2, (1,), None, pool=pool), pool, torch.ones(1, WIDTH))
    assert after is not None
    assert after.error is not None


def test_the_largest_numbers_of_a_whole_context_do_not_overflow() -> None:
    largest = 2.0**21
    states = torch.full((CONTEXT_TOKENS, WIDTH), largest)
    assert pool_all(Pools(CONTEXT_TOKENS), 0, states, [900], Pooling.MEAN) == struct.pack("<3f", *(largest,) * WIDTH)


def test_a_sequence_that_begins_again_begins_its_sum_again_and_a_released_row_has_none() -> None:
    pools = Pools(CONTEXT_TOKENS)
    states = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    unfinished = PoolSpec(Pooling.MEAN, is_last=False)
    pools.add(RowPlan(3, 0, (1, 2), None, pool=unfinished), unfinished, 100 * states)
    assert pool_all(pools, 3, states, [1], Pooling.MEAN) == struct.pack("<3f", 3.0, 4.0, 5.0)
    pools.add(RowPlan(3, 0, (1, 2), None, pool=unfinished), unfinished, states)
    pools.forget(3)
    late = pools.add(RowPlan(3, 2, (1,), None, pool=unfinished), unfinished, states[:1])
    assert late is not None
    assert late.error is not None
