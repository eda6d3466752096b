"""Pool the hidden states of a row's ids into one embedding, chunk by chunk; decode thread of PROCESS 2.

A mean is made of sums of fixed-point integers, which are exact: it is the same bits however a prompt was cut into
chunks. What a row has pooled so far stays here until another sequence begins in it. Knows no model and no KV cache.
"""

from __future__ import annotations

import dataclasses
import struct

import torch
from torch import Tensor

from inference_api.backend.engines.base import PoolSpec, RowError, RowPlan, RowResult
from inference_api.messages import Pooling

FRACTION_BITS = 30
"""A hidden state counts to the nearest 2^-30, under a tenth of what fp32 tells apart at 0.1."""

_SUM_BITS = 62
"""Of an int64, which holds a sum of states up to 2^(62 - 30) over the number of positions: two millions in 2,048."""

NON_FINITE_STATES = RowError("non_finite_states", "The model produced NaN or infinite numbers for this request.")


@dataclasses.dataclass(slots=True)
class _Sum:
    """The states of a row's first `num_tokens` ids, added up in units of 2^-FRACTION_BITS."""

    units: Tensor  # (hidden,), int64
    num_tokens: int


def pooled_tokens(row: RowPlan, pool: PoolSpec) -> range:
    """Return the indices of the plan's ids whose hidden states `Pools.add` needs."""
    num_tokens = len(row.token_ids)
    if pool.pooling is Pooling.MEAN:
        return range(num_tokens)
    return range(num_tokens - 1, num_tokens) if pool.is_last else range(0)


class Pools:
    """What each row has pooled so far."""

    def __init__(self, context_tokens: int) -> None:
        self._largest = 2.0 ** (_SUM_BITS - FRACTION_BITS) / context_tokens
        self._sums: dict[int, _Sum] = {}

    def add(self, row: RowPlan, pool: PoolSpec, states: Tensor) -> RowResult | None:
        """Take in `states` (tokens, hidden) of the ids that `pooled_tokens` names; return what there is to say.

        That is the embedding after the last ids, an error for a state that cannot be added up, and else nothing.
        """
        before = self._sums.pop(row.row, None)
        if not bool((states.abs() <= self._largest).all()):  # false for NaN too
            return RowResult(row.row, error=NON_FINITE_STATES)
        if pool.pooling is Pooling.LAST:
            return RowResult(row.row, embedding=_encoded(states[-1])) if pool.is_last else None
        units = (states.double() * 2.0**FRACTION_BITS).round_().long().sum(dim=0)  # (hidden,)
        if row.start:
            if before is None or before.num_tokens != row.start:
                fault = f"Position {row.start} does not follow the ids that were pooled."
                return RowResult(row.row, error=RowError("invalid_plan", fault))
            units += before.units
        num_tokens = row.start + len(row.token_ids)
        if not pool.is_last:
            self._sums[row.row] = _Sum(units, num_tokens)
            return None
        # Whole numbers of Python divide exactly, up to the rounding of the quotient.
        means = [total / (num_tokens << FRACTION_BITS) for total in units.tolist()]
        return RowResult(row.row, embedding=_encoded(torch.tensor(means, dtype=torch.float64)))

    def forget(self, row: int) -> None:
        """Drop what a row has pooled: its sequence has left it."""
        self._sums.pop(row, None)


def _encoded(numbers: Tensor) -> bytes:
    """Return `numbers` (hidden,) as little-endian fp32."""
    return struct.pack(f"<{numbers.numel()}f", *numbers.float().tolist())
