"""Compare attention over the row cache with a plain softmax over each row's own positions."""

from __future__ import annotations

import math

import pytest
import torch

from inference_api.backend.engines import row_kv as module
from inference_api.backend.engines.row_kv import RowBatch, RowKV

pytestmark = pytest.mark.torch

KV_HEADS, GROUP, DIM, CONTEXT = 2, 3, 8, 64


def random_tensor(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def history():
    """Every row's keys and values at every position: (rows, kv_heads, context, dim)."""
    return random_tensor(8, KV_HEADS, CONTEXT, DIM, seed=2), random_tensor(8, KV_HEADS, CONTEXT, DIM, seed=3)


def fill(history, lengths: dict[int, int]) -> RowKV:
    """Return a cache whose rows hold `lengths` positions of the history."""
    kv = RowKV(8, CONTEXT)
    for row, length in lengths.items():
        if length:
            kv.begin(RowBatch([row], [0], length))
            kv.update(*(part[row : row + 1, :, :length] for part in history), 0)
    return kv


def expected(history, query, row, position, window, alibi):
    """Attend with one query (heads, dim) by the definition."""
    outputs = []
    first = 0 if window is None else max(0, position - window + 1)
    for head in range(KV_HEADS * GROUP):
        keys, values = (part[row, head // GROUP, first : position + 1] for part in history)
        scores = keys @ query[head] / math.sqrt(DIM)
        if alibi is not None:
            scores = scores + alibi[head, first : position + 1]
        outputs.append(torch.softmax(scores, 0) @ values)
    return torch.stack(outputs)


LENGTHS = [
    {0: 5, 1: 5, 2: 5},
    {0: 1, 1: 40, 2: 0, 3: 17},
    {1: 9, 4: 30, 7: 2},
    {0: 60},
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["equal", "mixed", "gaps", "alone"])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_alibi", [False, True])
@pytest.mark.parametrize("call_cost", [0, 10**9], ids=["a-call-a-row", "one-call"])
def test_a_decode_step_attends_to_each_rows_own_positions(history, lengths, window, with_alibi, call_cost, monkeypatch):
    monkeypatch.setattr(module.plan_segments, "__defaults__", (call_cost,))
    kv = fill(history, lengths)
    kv.alibi = random_tensor(KV_HEADS * GROUP, CONTEXT, seed=7) if with_alibi else None
    rows = list(lengths)
    kv.begin(RowBatch(rows, [lengths[row] for row in rows], 1))
    new = [torch.stack([part[row, :, lengths[row]] for row in rows]).unsqueeze(2) for part in history]
    keys, values = kv.update(*new, 0)
    query = random_tensor(len(rows), KV_HEADS * GROUP, 1, DIM, seed=5)
    found = kv.attend(query, keys, values, None, window)
    assert found.shape == (len(rows), 1, KV_HEADS * GROUP, DIM)
    for i, row in enumerate(rows):
        wanted = expected(history, query[i, :, 0], row, lengths[row], window, kv.alibi)
        torch.testing.assert_close(found[i, 0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0, 1, 30])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("with_alibi", [False, True])
def test_a_chunk_attends_causally_from_its_own_start(history, start, window, with_alibi):
    kv = fill(history, {3: start})
    kv.alibi = random_tensor(KV_HEADS * GROUP, CONTEXT, seed=7) if with_alibi else None
    kv.begin(RowBatch([3], [start], 11))
    keys, values = kv.update(*(part[3:4, :, start : start + 11] for part in history), 0)
    query = random_tensor(1, KV_HEADS * GROUP, 11, DIM, seed=5)
    found = kv.attend(query, keys, values, DIM**-0.5, window)
    for offset in range(11):
        wanted = expected(history, query[0, :, offset], 3, start + offset, window, kv.alibi)
        torch.testing.assert_close(found[0, offset], wanted, rtol=0, atol=1e-12)


def test_a_cleared_row_carries_no_nan_into_a_call_that_pads_over_it(history):
    kv = fill(history, {0: 2, 1: 50})
    kv.begin(RowBatch([0], [10], 1))
    nan = torch.full((1, KV_HEADS, 1, DIM), math.nan, dtype=torch.float64)
    keys, values = kv.update(nan, nan, 0)
    batch = RowBatch([0, 1], [2, 50], 1)
    query = random_tensor(2, KV_HEADS * GROUP, 1, DIM, seed=5)
    kv.begin(batch)
    assert len(batch.views((KV_HEADS, GROUP), None, None, query.dtype)) == 1
    assert kv.attend(query, keys, values, None)[0].isnan().all()
    kv.clear(0)
    assert not kv.attend(query, keys, values, None).isnan().any()


def test_every_layer_is_allocated_once_and_written_in_place(history):
    kv = fill(history, {0: 3})
    kv.begin(RowBatch([0], [3], 1))
    first = kv.update(*(part[:1, :, 3:4] for part in history), 0)
    kv.begin(RowBatch([0], [4], 1))
    second = kv.update(*(part[:1, :, 4:5] for part in history), 0)
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]
    assert first[0].shape == (8, KV_HEADS, CONTEXT, DIM)
    assert kv.num_bytes == 2 * 8 * KV_HEADS * CONTEXT * DIM * 8
    torch.testing.assert_close(first[0][0, :, :5], history[0][0, :, :5])


def test_chunks_of_several_rows_in_one_forward_are_refused():
    with pytest.raises(ValueError, match="one row at a time"):
        RowBatch([0, 1], [0, 0], 4)
