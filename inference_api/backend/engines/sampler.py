"""Draw the next id of every row from its logits; runs in the decode thread of PROCESS 2.

One rule for every row: temperature, then top_k, then top_p over what is left, then the inverse of the cumulative
distribution over the kept ids in ascending id order, at one uniform number keyed by (seed, choice, position). Ties go
to the lowest id, at the borders of top_k and top_p too. The vocabulary is never sorted, no noise of its size drawn.
Batched over the rows is only what is exact in any shape: comparing, selecting. Every number is computed a row at a
time, in fp64: few candidates in plain Python, the whole vocabulary in tensors of that one row, which stay in the cache.
Invariant: a row's id does not depend on its neighbours. Knows no sequences, no KV cache and no stop rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from inference_api.backend.engines.base import RowError, SampleSpec
from inference_api.backend.engines.philox import uniform
from inference_api.messages import SamplingParams

FEW = 256
"""So many of the highest ids are selected for all rows at once: most top_k and most nuclei are smaller."""

BLOCK = 64
"""Ids a block; the k highest block maxima bound the k-th highest logit from below."""

NUM_BINS = 512
LOWEST_LOG_WEIGHT = -1000.0
"""exp() of it is 0 in fp64; keeps a tiny temperature from making infinities."""

SMALL = 1024
"""A nucleus border among at most so many ids is found by sorting them."""

NON_FINITE = RowError("non_finite_logits", "The model produced NaN or infinite logits for this request.")


class Head(NamedTuple):
    """The highest logits of one row, descending, equal ones by ascending id.

    Of those equal to the last one any may be missing: only what lies above the last logit is complete.
    """

    logits: list[float]
    ids: list[int]


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[list[int], list[RowError | None]]:
    """Draw one id a row of `logits` (rows, vocab), fp32 or fp64; one spec a row.

    A row with NaN or infinite logits, or whose draw fails, gets a RowError and the id -1; the others are not touched.
    """
    finite = (torch.isfinite(logits.amin(dim=1)) & torch.isfinite(logits.amax(dim=1))).tolist()  # NaN comes through
    sound = [row for row in range(len(specs)) if finite[row]]
    greedy = [row for row in sound if is_greedy(specs[row].params)]
    best = dict(zip(greedy, _rows_of(logits, greedy).argmax(dim=1).tolist(), strict=True)) if greedy else {}
    heads = _heads(logits, specs, [row for row in sound if row not in best])
    ids = [best.get(row, -1) for row in range(len(specs))]  # argmax: the first of equal maxima, the lowest id
    errors: list[RowError | None] = [None] * len(specs)
    for row, spec in enumerate(specs):
        if not finite[row]:
            errors[row] = NON_FINITE
        elif row not in best:
            try:
                ids[row] = draw(logits[row], spec, heads.get(row))
            except Exception as failure:  # one row's fault must not end the others
                text = f"Sampling failed for this request: {type(failure).__name__}."
                errors[row] = RowError("sampling_failed", text)
    return ids, errors


def is_greedy(params: SamplingParams) -> bool:
    """Say whether the highest logit is taken without a random number."""
    return params.temperature == 0 or params.top_k == 1


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    """Return those rows of `logits` (rows, vocab), ascending; a copy only if some are left out."""
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _heads(logits: Tensor, specs: Sequence[SampleSpec], rows: list[int]) -> dict[int, Head]:
    """Select the head of each of `rows` whose spec has a small top_k, or a top_p alone."""
    vocab = logits.shape[1]
    limits = {row: specs[row].params.top_k for row in rows}
    few = [row for row in rows if 0 < limits[row] <= FEW and limits[row] < vocab]
    nuclei = [row for row in rows if not 0 < limits[row] < vocab and specs[row].params.top_p < 1]
    heads: dict[int, Head] = {}
    for group, count in ((few, max((limits[row] for row in few), default=0)), (nuclei, FEW)):
        if group:
            heads.update(zip(group, _highest(_rows_of(logits, group), min(count + 1, vocab)), strict=True))
    return heads


def _highest(logits: Tensor, count: int) -> list[Head]:
    """Return the head of every row of `logits` (rows, vocab), `count` ids long."""
    values, ids = logits.topk(count, dim=1)  # (rows, count) each; equal values in any order
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return [Head(*row) for row in zip(values.tolist(), ids.gather(1, order).tolist(), strict=True)]


def draw(logits: Tensor, spec: SampleSpec, head: Head | None = None) -> int:
    """Draw one id from the finite `logits` (vocab,) of one row with a temperature above 0.

    `head` is the row's own, needed for a top_k of at most FEW; for a top_p alone it saves time.
    """
    number = uniform(spec.params.seed, spec.choice, spec.position)
    if head is not None and 0 < spec.params.top_k < logits.numel():
        return _draw_of_few(logits, spec.params, head, number)
    return _draw_of_many(logits, spec.params, head, number)


def _draw_of_few(logits: Tensor, params: SamplingParams, head: Head, number: float) -> int:
    """Draw from the `top_k` highest ids. Scalars only: no vector width or tail can change a bit."""
    k = params.top_k
    values, ids = head.logits[:k], head.ids[:k]
    if head.logits[k - 1] == head.logits[k]:  # others on the border may have lower ids
        border = top_k_ids(logits, k)  # (k,), ascending
        values, order = (part.tolist() for part in logits[border].sort(descending=True, stable=True))
        ids = [int(border[index]) for index in order]
    weights = [math.exp((value - values[0]) / params.temperature) for value in values]  # the highest is 1
    cumulative = list(accumulate(weights))
    count = k if params.top_p >= 1 else bisect_left(cumulative, cumulative[-1] * params.top_p) + 1
    return _pick(ids[:count], weights[:count], number)


def _pick(ids: list[int], weights: list[float], number: float) -> int:
    """Do as `invert` does, in ascending id order, and return the id."""
    kept = sorted(zip(ids, weights, strict=True))
    cumulative = list(accumulate(weight for _, weight in kept))
    index = bisect_right(cumulative, cumulative[-1] * number)
    return kept[index if index < len(kept) else bisect_left(cumulative, cumulative[-1])][0]


def _draw_of_many(logits: Tensor, params: SamplingParams, head: Head | None, number: float) -> int:
    """Draw from the whole vocabulary, or from more ids of it than FEW."""
    ids: Tensor | None = None
    if 0 < params.top_k < logits.numel():
        ids = top_k_ids(logits, params.top_k)  # (k,)
        logits = logits[ids]
    scaled = logits.double()  # (kept,), the caller's own memory where that is fp64 already
    log_weights = (scaled - scaled.max()).div_(params.temperature)  # (kept,)
    weights = torch.exp(log_weights)  # (kept,) unnormalised, the highest is 1
    if params.top_p < 1:
        goal = float(weights.sum()) * params.top_p
        if head is not None:
            likely = weights[head.ids].tolist()
            count = bisect_left(list(accumulate(likely)), goal) + 1
            if count < len(likely) and head.logits[count - 1] > head.logits[-1]:
                return _pick(head.ids[:count], likely[:count], number)
        kept = nucleus(log_weights.clamp_(min=LOWEST_LOG_WEIGHT), weights, params.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    index = invert(weights, number)
    return index if ids is None else int(ids[index])


def invert(weights: Tensor, uniform_number: float) -> int:
    """Return the first index whose cumulative weight exceeds that share of the total; its weight is above 0."""
    cumulative = weights.cumsum(0)  # (kept,)
    total = cumulative[-1:]
    index = int(torch.searchsorted(cumulative, total * uniform_number, right=True))
    if index == weights.numel():  # rounding carried the product up to the total: the last index with a weight
        index = int(torch.searchsorted(cumulative, total))
    return index


def top_k_ids(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the `k` highest of `logits` (vocab,), ascending; k below the vocabulary's size."""
    candidates = torch.nonzero(logits >= _lower_bound(logits, k)).squeeze(1)  # (at least k,), ascending
    values = logits[candidates]
    border = values.topk(k, sorted=False).values.min()
    kept = values > border
    tied = torch.nonzero(values == border).squeeze(1)
    kept[tied[: k - int(kept.sum())]] = True  # of those on the border the lowest ids
    return candidates[kept]


def _lower_bound(logits: Tensor, k: int) -> Tensor:
    """Return a value that at least `k` logits reach and hardly more do: at most the k-th highest."""
    num_blocks = logits.numel() // BLOCK
    if num_blocks < 2 * k:  # blocks would bound too loosely; topk selects, it does not sort
        return logits.topk(k, sorted=False).values.min()
    maxima = logits[: num_blocks * BLOCK].view(num_blocks, BLOCK).amax(dim=1)  # (blocks,)
    return maxima.topk(k, sorted=False).values.min()


def nucleus(log_weights: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Return the indices of the smallest set of highest `weights` (kept,) that holds the share `top_p`, ascending.

    Narrows the range around the border by histograms until few enough are left to be sorted, or all left are equal.
    """
    goal = float(weights.sum()) * top_p
    taken = 0.0  # weight of everything above the range
    inside = torch.arange(weights.numel())
    low, high = float(log_weights.min()), float(log_weights.max())  # the border lies in low <= log weight <= high
    while inside.numel() > SMALL and (width := (high - low) / NUM_BINS) > 0:
        bins = ((log_weights[inside] - low) / width).long().clamp_(max=NUM_BINS - 1)  # (inside,)
        mass = torch.zeros(NUM_BINS, dtype=torch.float64).scatter_add_(0, bins, weights[inside]).tolist()
        border, taken = _border_bin(mass, taken, goal)
        inside = inside[bins == border]
        low, high = float(log_weights[inside].min()), float(log_weights[inside].max())
    if low < high:
        inside = inside[torch.argsort(log_weights[inside], descending=True, stable=True)]
    cumulative = weights[inside].cumsum(0) + taken
    count = min(int(torch.searchsorted(cumulative, goal)) + 1, inside.numel())
    chosen = log_weights > high
    chosen[inside[:count]] = True
    return torch.nonzero(chosen).squeeze(1)


def _border_bin(mass: list[float], taken: float, goal: float) -> tuple[int, float]:
    """Return the highest bin at which the sum from above reaches `goal`, and the sum above it.

    Where rounding keeps the whole sum below the goal, it is the lowest bin with any weight.
    """
    occupied = [index for index in reversed(range(len(mass))) if mass[index] > 0]
    for border in occupied[:-1]:
        if taken + mass[border] >= goal:
            return border, taken
        taken += mass[border]
    return occupied[-1], taken
