"""Hold the KV cache and attend in torch as fused_native/attention.cpp does, bit for bit; decode thread of PROCESS 2.

Keys and values are int8 with a scale for each position and KV head. Scores are exact sums; the softmax is summed in
the lane of a position modulo 8, and what it weighs is added exactly over spans of 512 absolute positions: what a token
gets depends on its position and its row's content alone. Knows no layers' weights and no plans.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from inference_api.backend.engines.fused_computation import KvCopy
from inference_api.backend.engines.fused_shape import LANES, Shape
from inference_api.backend.engines.fused_torch_linear import ACTIVATION_RANGE, MAX_WEIGHT
from inference_api.backend.engines.fused_torch_rows import exponential, lane_sum, quantize

SPAN = 512
"""Positions whose weighted values the library adds in an int32: 512 x 127 x 32,767."""
WEIGHT_RANGE = 2**15 - 1


class KvCache:
    """The keys and values of all rows; memory that nobody has written takes none."""

    def __init__(self, shape: Shape, num_rows: int, context_tokens: int) -> None:
        slots = (len(shape.windows), num_rows, shape.kv_heads, -(-context_tokens // LANES) * LANES)
        self._keys, self._values = (_Int8Heads(slots, shape.head_dim) for _ in range(2))
        self.num_bytes = self._keys.num_bytes + self._values.num_bytes

    def store(self, layer: int, row: int, slots: slice, keys: Tensor, values: Tensor) -> None:
        """Quantize and keep `keys` and `values` (slots, KV heads, head_dim)."""
        for heads, cache in ((keys, self._keys), (values, self._values)):
            cache.store(layer, row, slots, heads.transpose(0, 1))

    def copy(self, copy: KvCopy) -> None:
        """Copy a row's first positions to another row."""
        for cache in (self._keys, self._values):
            cache.copy(copy)

    def scrub(self, row: int, num_slots: int) -> None:
        """Zero a row's first positions, in whole vectors."""
        for cache in (self._keys, self._values):
            cache.scrub(row, -(-num_slots // LANES) * LANES)

    def attend(self, layer: int, row: int, queries: Tensor, positions: Tensor, window: int) -> Tensor:
        """Return what queries (tokens, heads, head_dim) at neighbouring positions see: (tokens, heads x head_dim).

        A token sees the `window` positions up to its own, or all of them with 0; the cache holds them.
        """
        num_tokens, _, head_dim = queries.shape
        first = max(0, int(positions[0]) - window + 1) if window else 0
        # Whole vectors, so that a position keeps its lane; what is too much weighs nothing.
        seen = slice(first // LANES * LANES, (int(positions[-1]) // LANES + 1) * LANES)
        keys, values = (cache.read(layer, row, seen) for cache in (self._keys, self._values))
        grouped = queries.view(num_tokens, len(keys.scales), -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        hidden = _hidden_slots(positions, seen, window).repeat(grouped.shape[1] // num_tokens, 1)
        weights, factors = _weigh(_score(grouped, keys), values.scales.mT, hidden)
        blended = _blend(weights, values.numbers, seen.start) * factors  # (KV heads, group x tokens, head_dim)
        return blended.view(len(blended), -1, num_tokens, head_dim).permute(2, 0, 1, 3).reshape(num_tokens, -1)


class _Heads(NamedTuple):
    numbers: Tensor
    """(KV heads, slots, head_dim), integers in fp64."""
    scales: Tensor
    """(KV heads, slots, 1), fp32."""


class _Int8Heads:
    """Keys or values of all rows."""

    def __init__(self, slots: tuple[int, int, int, int], head_dim: int) -> None:
        self._numbers = torch.empty(*slots, head_dim, dtype=torch.int8)  # (layers, rows, KV heads, slots, head_dim)
        self._scales = torch.empty(*slots, 1)
        self.num_bytes = self._numbers.nbytes + self._scales.nbytes

    def store(self, layer: int, row: int, slots: slice, heads: Tensor) -> None:
        integers, scales = quantize(heads, MAX_WEIGHT)
        self._numbers[layer, row, :, slots] = integers.to(torch.int8)
        self._scales[layer, row, :, slots] = scales

    def read(self, layer: int, row: int, slots: slice) -> _Heads:
        return _Heads(self._numbers[layer, row, :, slots].double(), self._scales[layer, row, :, slots])

    def copy(self, copy: KvCopy) -> None:
        for part in (self._numbers, self._scales):
            part[:, copy.to_row, :, : copy.num_tokens] = part[:, copy.from_row, :, : copy.num_tokens]

    def scrub(self, row: int, num_slots: int) -> None:
        for part in (self._numbers, self._scales):
            part[:, row, :, :num_slots].zero_()


def _hidden_slots(positions: Tensor, seen: slice, window: int) -> Tensor:
    """Return (positions, slots): which of the slots `seen` a query at each position does not see."""
    slots = torch.arange(seen.start, seen.stop)
    hidden = slots > positions.unsqueeze(1)
    return hidden | (slots <= positions.unsqueeze(1) - window) if window else hidden


def _score(queries: Tensor, keys: _Heads) -> Tensor:
    """Return the scores (KV heads, queries, slots) of `queries` (KV heads, queries, head_dim)."""
    head_dim = queries.shape[2]
    integers, scales = quantize(queries, ACTIVATION_RANGE)
    sums = (integers.double() @ keys.numbers.mT).float()  # below 2^31, so exact before it is rounded
    root = torch.tensor(math.sqrt(head_dim), dtype=torch.float32)
    return sums * keys.scales.mT * (root.reciprocal() * scales)


def _weigh(scores: Tensor, value_scales: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Turn scores into integers that weigh the values, and factors (KV heads, queries, 1) that undo them.

    The integers are of e^(score - highest) x `value_scales` (KV heads, 1, slots), and 0 where `hidden` (queries,
    slots); the factors divide by the sum of the softmax too. A factor is NaN where a score is.
    """
    scores = scores.masked_fill(hidden, -torch.inf)
    shares = exponential(scores - scores.amax(dim=2, keepdim=True))
    # Scales of slots that are not seen are anything; NaN x 0 would spread.
    integers, scales = quantize((shares * value_scales).masked_fill(hidden, 0.0), WEIGHT_RANGE)
    return integers, scales / lane_sum(shares)


def _blend(weights: Tensor, values: Tensor, first_slot: int) -> Tensor:
    """Return the sums (KV heads, queries, head_dim) of weighted values, spans added in fp32 in ascending order."""
    total = torch.zeros(*weights.shape[:2], values.shape[2])
    begin, end = first_slot, first_slot + weights.shape[2]
    while begin < end:
        stop = min(end, (begin // SPAN + 1) * SPAN)
        part = slice(begin - first_slot, stop - first_slot)
        total += (weights[:, :, part].double() @ values[:, part]).float()  # below 2^31, so exact before it is rounded
        begin = stop
    return total
