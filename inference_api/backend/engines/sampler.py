"""Draw the next id of every row from its logits; runs in the decode thread of PROCESS 2.

One rule for every row: temperature, then top_k, then top_p over what is left, then the inverse of the cumulative
distribution over the kept ids in ascending id order, at one uniform number keyed by (seed, choice, position). Ties go
to the lowest id, at the borders of top_k and top_p too. The vocabulary is never sorted, no noise of its size drawn.
Invariant: every sum runs over one row in fp64, so that a row's id does not depend on its neighbours.
Knows no sequences, no KV cache and no stop rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from inference_api.backend.engines.base import RowError, SampleSpec
from inference_api.backend.engines.philox import uniform
from inference_api.messages import SamplingParams

BLOCK = 64
"""Ids a block; the k highest block maxima bound the k-th highest logit from below."""

USUAL_NUCLEUS = 256
"""So many of the highest ids are tried first: a language model's nucleus is rarely larger."""

NUM_BINS = 512
LOWEST_LOG_WEIGHT = -1000.0
"""exp() of it is 0 in fp64; keeps a tiny temperature from making infinities."""

SMALL = 1024
"""A nucleus border among at most so many ids is found by sorting them."""


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> tuple[list[int], list[RowError | None]]:
    """Draw one id a row of `logits` (rows, vocab), fp32 or fp64; one spec a row.

    A row with NaN or infinite logits, or whose draw fails, gets a RowError and the id -1; the others are not touched.
    """
    lowest, highest = torch.aminmax(logits, dim=1)  # (rows,) each; a NaN in a row comes through
    finite = (torch.isfinite(lowest) & torch.isfinite(highest)).tolist()
    best = logits.argmax(dim=1).tolist()  # the first of equal maxima: the lowest id
    ids: list[int] = []
    errors: list[RowError | None] = []
    for row, spec in enumerate(specs):
        token_id, error = -1, None
        if not finite[row]:
            error = RowError("non_finite_logits", "The model produced NaN or infinite logits for this request.")
        elif is_greedy(spec.params):
            token_id = best[row]
        else:
            try:
                token_id = draw(logits[row], spec)
            except Exception as failure:  # one row's fault must not end the others
                error = RowError("sampling_failed", f"Sampling failed for this request: {type(failure).__name__}.")
        ids.append(token_id)
        errors.append(error)
    return ids, errors


def is_greedy(params: SamplingParams) -> bool:
    """Say whether the highest logit is taken without a random number."""
    return params.temperature == 0 or params.top_k == 1


def draw(logits: Tensor, spec: SampleSpec) -> int:
    """Draw one id from the finite `logits` (vocab,) of one row with a temperature above 0."""
    params = spec.params
    ids: Tensor | None = None
    if 0 < params.top_k < logits.numel():
        ids = top_k_ids(logits, params.top_k)  # (k,)
        logits = logits[ids]
    scaled = logits.double()
    log_weights = ((scaled - scaled.max()) / params.temperature).clamp_(min=LOWEST_LOG_WEIGHT)  # (kept,)
    weights = torch.exp(log_weights)  # (kept,) unnormalised, the highest is 1
    if params.top_p < 1:
        kept = nucleus(log_weights, weights, params.top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    index = invert(weights, uniform(params.seed, spec.choice, spec.position))
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
    candidates = _at_least(logits, k)  # (at least k,), ascending
    values = logits[candidates]
    border = values.topk(k, sorted=False).values.min()
    kept = values > border
    tied = torch.nonzero(values == border).squeeze(1)
    kept[tied[: k - int(kept.sum())]] = True  # of those on the border the lowest ids
    return candidates[kept]


def _at_least(values: Tensor, k: int) -> Tensor:
    """Return the indices of the `k` highest of `values` (vocab,) and of a few more, ascending."""
    return torch.nonzero(values >= _lower_bound(values, k)).squeeze(1)


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
    if inside.numel() > SMALL:
        highest = _at_least(log_weights, USUAL_NUCLEUS)
        inside = highest if float(weights[highest].sum()) >= goal else inside
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
