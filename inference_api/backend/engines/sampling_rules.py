"""Decide which ids of one row stay, and which of them a uniform number selects; decode thread of PROCESS 2.

Every function looks at one row: its logits, or weights made of them, in fp64. A set is the smallest one of highest
values that holds a share; ties go to the lowest id. The vocabulary is never sorted: borders are found by block maxima
and histograms, and only the few ids around a border are sorted. What is long is a tensor, what is short a list, and
both follow the same rule. Knows no rows beside its own, no ids' meaning and no randomness.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from inference_api.sampling_params import SamplingParams

BLOCK = 64
"""Ids a block; the k highest block maxima bound the k-th highest logit from below."""

SERIAL = 384 * BLOCK
"""So many numbers torch computes in the calling thread: it shares out what is more than 32,768."""

NUM_BINS = 512
LOWEST_LOG_WEIGHT = -1000.0
"""exp() of it is 0 in fp64; keeps a tiny temperature from making infinities."""

SMALL = 1024
"""A border among at most so many ids is found by sorting them."""


class Kept(NamedTuple):
    """The ids of a row that may still be drawn, ascending; `ids` None: those of the whole vocabulary."""

    ids: Tensor | None
    log_weights: Tensor
    """Logits over temperature, the highest 0: the logarithms of the weights."""
    weights: Tensor
    """Unnormalised, the highest 1."""

    def only(self, indices: Tensor) -> Kept:
        """Return what stands at `indices`, which ascend."""
        ids = indices if self.ids is None else self.ids[indices]
        return Kept(ids, self.log_weights[indices], self.weights[indices])


class Few(NamedTuple):
    """What `Kept` is, for few ids: lists, the highest weight first, equal ones by ascending id."""

    ids: list[int]
    log_weights: list[float]
    weights: list[float]

    def first(self, count: int) -> Few:
        """Return the `count` highest."""
        return Few(self.ids[:count], self.log_weights[:count], self.weights[:count])


def draw_of_all(logits: Tensor, params: SamplingParams, number: float, *, cuts_top: bool = False) -> int:
    """Draw one id from the logits (vocab,) of a row, by every rule from temperature on; `number` is in [0, 1).

    `cuts_top` says whether xtc takes the likeliest out this time.
    """
    ids = top_k_ids(logits, params.top_k) if 0 < params.top_k < logits.numel() else None  # (k,), ascending
    scaled = (logits if ids is None else logits[ids]).double()  # (kept,), the caller's memory if it is fp64 already
    log_weights = (scaled - scaled.max()).div_(params.temperature).clamp_(min=LOWEST_LOG_WEIGHT)  # (kept,)
    kept = Kept(ids, log_weights, torch.exp(log_weights))
    if params.top_p < 1:
        kept = kept.only(highest_share(kept.log_weights, kept.weights, params.top_p))
    if params.min_p > 0:
        kept = kept.only(torch.nonzero(kept.weights >= params.min_p).squeeze(1))
    if params.typical_p < 1:
        mean = total_of(kept.weights * kept.log_weights) / total_of(kept.weights)
        surprise = (kept.log_weights - mean).abs_().neg_()  # (kept,), 0 where an id is as likely as expected
        kept = kept.only(highest_share(surprise, kept.weights, params.typical_p))
    if cuts_top:
        kept = _without_top(kept, params.xtc_threshold)
    index = invert(kept.weights, number)
    return index if kept.ids is None else int(kept.ids[index])


def draw_by_block(logits: Tensor, block_weights: Tensor, highest: float, temperature: float, number: float) -> int:
    """Draw one id of all from the logits (vocab,) of a row: its block of BLOCK ids by their weights, then the id in it.

    The same number decides both, so that this is the inverse of the cumulative distribution over all ids.
    """
    cumulative = list(accumulate(block_weights.tolist()))  # a third of the time of doing so with tensors
    block = _first_above(cumulative, number)
    before = cumulative[block - 1] if block else 0.0
    share = (number * cumulative[-1] - before) / (cumulative[block] - before)
    first = block * BLOCK
    values = logits[first : first + BLOCK].tolist()
    inside = list(accumulate(math.exp((value - highest) / temperature) for value in values))
    return first + _first_above(inside, min(max(share, 0.0), 1.0))


def draw_of_few(few: Few, params: SamplingParams, number: float, *, cuts_top: bool = False) -> int:
    """Draw one id from what top_k and top_p have left, by the rules after them; `cuts_top` as for `draw_of_all`.

    Scalars only: no vector width or tail can change a bit.
    """
    if params.min_p > 0:
        few = few.first(sum(weight >= params.min_p for weight in few.weights))
    ids, log_weights, weights = few
    if params.typical_p < 1:
        total = sum(weights)
        mean = sum(weight * log_weights[index] for index, weight in enumerate(weights) if weight) / total
        order = sorted(range(len(ids)), key=lambda index: (abs(log_weights[index] - mean), ids[index]))
        cumulative = list(accumulate(weights[index] for index in order))
        count = bisect_left(cumulative, cumulative[-1] * params.typical_p) + 1
        ids, weights = [ids[index] for index in order[:count]], [weights[index] for index in order[:count]]
    if cuts_top:
        least = sum(weights) * params.xtc_threshold
        top = sorted((weight, token_id) for token_id, weight in zip(ids, weights, strict=True) if weight >= least)
        dropped = {token_id for _, token_id in top[1:]}
        weights = [0.0 if token_id in dropped else weight for token_id, weight in zip(ids, weights, strict=True)]
    return pick(ids, weights, number)


def _without_top(kept: Kept, threshold: float) -> Kept:
    """Take out what has a share of `threshold` of what is left, all but the least likely of these: xtc.

    p-e-w, "Exclude top choices", text-generation-webui, pull request 6335; as in llama.cpp, src/llama-sampling.cpp,
    `llama_sample_xtc_apply`. Of the equal ones the lowest id stays.
    """
    top = torch.nonzero(kept.weights >= total_of(kept.weights) * threshold).squeeze(1)  # (top,), ascending
    if top.numel() < 2:
        return kept
    stays = torch.ones(kept.weights.numel(), dtype=torch.bool)  # (kept,)
    stays[top] = False
    stays[top[int(kept.weights[top].argmin())]] = True  # the first of the lowest
    return kept.only(torch.nonzero(stays).squeeze(1))


def pick(ids: list[int], weights: list[float], number: float) -> int:
    """Do as `invert` does, in ascending id order, and return the id."""
    kept = sorted(zip(ids, weights, strict=True))
    return kept[_first_above(list(accumulate(weight for _, weight in kept)), number)][0]


def _first_above(cumulative: list[float], number: float) -> int:
    """Return the first index above the share `number` of the total; rounding may carry it there: the last weight's."""
    index = bisect_right(cumulative, cumulative[-1] * number)
    return index if index < len(cumulative) else bisect_left(cumulative, cumulative[-1])


def total_of(weights: Tensor) -> float:
    """Return the sum of `weights` (kept,), by parts that torch adds in one thread.

    Longer ones it adds in as many parts as it has threads, and the sum then differs in its last bits.
    """
    return sum((float(part.sum()) for part in torch.split(weights, SERIAL)), 0.0)


def invert(weights: Tensor, number: float) -> int:
    """Return the first index whose cumulative weight exceeds the share `number` of the total; its weight is above 0."""
    cumulative = weights.cumsum(0)  # (kept,)
    total = cumulative[-1:]
    index = int(torch.searchsorted(cumulative, total * number, right=True))
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


def highest_share(keys: Tensor, weights: Tensor, share: float) -> Tensor:
    """Return the indices of the smallest set of highest `keys` (kept,) whose weights hold `share`, ascending.

    Narrows the range around the border by histograms until few enough are left to be sorted, or all left are equal.
    """
    goal = total_of(weights) * share
    taken = 0.0  # weight of everything above the range
    inside = torch.arange(weights.numel())
    low, high = float(keys.min()), float(keys.max())  # the border lies in low <= key <= high
    while inside.numel() > SMALL and (width := (high - low) / NUM_BINS) > 0:
        bins = ((keys[inside] - low) / width).long().clamp_(max=NUM_BINS - 1)  # (inside,)
        mass = torch.zeros(NUM_BINS, dtype=torch.float64).scatter_add_(0, bins, weights[inside]).tolist()
        border, taken = _border_bin(mass, taken, goal)
        inside = inside[bins == border]
        low, high = float(keys[inside].min()), float(keys[inside].max())
    if low < high:
        inside = inside[torch.argsort(keys[inside], descending=True, stable=True)]
    cumulative = weights[inside].cumsum(0) + taken
    count = min(int(torch.searchsorted(cumulative, goal)) + 1, inside.numel())
    chosen = keys > high
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


def few_of(
    logits: list[float], ids: list[int], temperature: float, *, goal: float = math.inf, least: float = 0.0
) -> Few:
    """Return weights of descending `logits`, the first of which is the row's highest.

    As many as reach the sum `goal`, and none below `least`.
    """
    log_weights: list[float] = []
    weights: list[float] = []
    mass = 0.0
    for value in logits:
        log_weight = (value - logits[0]) / temperature
        weight = math.exp(log_weight)
        if weight < least or mass >= goal:
            break
        log_weights.append(log_weight)
        weights.append(weight)
        mass += weight
    return Few(ids[: len(weights)], log_weights, weights)
