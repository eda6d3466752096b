"""Draw the next id of every row from its logits; runs in the decode thread of PROCESS 2.

One rule for every row, in this order: logit_rules.py, temperature, top_k, top_p, min_p, typical_p, xtc (or mirostat in
place of these five), then the inverse of the cumulative distribution over the kept ids in ascending id order, at one
uniform number keyed by (seed, choice, position). Ties go to the lowest id. No noise is drawn. Where nothing but a mask
leaves ids out, some draws are tried without it first. Batched over the rows is only what is exact in any shape:
comparing, selecting. Every other number is computed a row at a time, most in fp64; a row without an option skips it.
Invariant: a row's id does not depend on its neighbours. Knows no sequences, no KV cache and no stop rules.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from inference_api.backend.engines.base import LEAST_TEMPERATURE, RowError, RowResult, SampleSpec
from inference_api.backend.engines.logit_rules import (
    RuleError,
    change_logits,
    check_highest,
    mask_bits,
    only_id,
)
from inference_api.backend.engines.mirostat import draw_with_mirostat, first_mu
from inference_api.backend.engines.philox import uniform
from inference_api.backend.engines.sampling_rules import (
    Few,
    draw_by_block,
    draw_of_all,
    draw_of_few,
    few_of,
    top_k_ids,
    total_of,
)
from inference_api.backend.engines.selection import TORCH_SELECTION, Head, Selection, Wish, first_highest
from inference_api.sampling_params import SamplingParams, TokenLogprobs

FEW = 256
"""A top_k of at most so many ids is selected for all rows at once."""

XTC_STREAM = 1
"""Numbers the second random number of a draw: whether xtc takes the likeliest out."""

TRY_STREAMS = (0, 2, 3, 4)
"""Number the random numbers of the draws that are tried before a mask is found. At a temperature of 1, four of five
first tries keep to their form and nine of ten rows need no mask; a fifth one would save few."""

MASKED_STREAM = 5
"""Numbers the random number of the draw under the mask that follows those tries: one of theirs would favour ids."""

MAX_XTC_THRESHOLD = 0.5
"""No two ids can have a larger share."""

NON_FINITE = RowError("non_finite_logits", "The model produced NaN or infinite logits for this request.")


class Draw(NamedTuple):
    """What one row drew: an id, with its logprobs where the params ask for them; or an error and the id -1.

    `mu` is mirostat's state after it.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: RowError | None = None
    mu: float | None = None


def sample(logits: Tensor, specs: Sequence[SampleSpec], selection: Selection = TORCH_SELECTION) -> list[Draw]:
    """Draw one id a row of `logits` (rows, vocab), fp32 or fp64, which are only read; one spec a row.

    `selection` finds the highest logits; another one is another numeric path. A row with NaN or infinite logits, or
    whose draw fails, gets a RowError; the others are not touched.
    """
    draws = [Draw(-1, error=NON_FINITE)] * len(specs)
    highest = {row: token_id for row, token_id in enumerate(selection.highest_ids(logits)) if token_id is not None}
    done = _draw_before_masks(logits, specs, highest, selection)
    changed = [row for row in highest if row not in done and (specs[row].mask or specs[row].changes_logits)]
    plain = {row: highest[row] for row in highest.keys() - done.keys() - set(changed)} if done or changed else highest
    done |= _draw_rows(logits, specs, plain, selection)
    for row in changed:
        if (token_id := only_id(specs[row], logits.shape[1])) is not None:
            done[row] = Draw(token_id)
    if changed := [row for row in changed if row not in done]:
        drawn = _draw_changed(logits, changed, [specs[row] for row in changed], selection)
        done |= dict(zip(changed, drawn, strict=True))
    for row, draw in done.items():
        draws[row] = draw
    _add_logprobs(draws, logits, specs, selection)
    return draws


def drafted_specs(spec: SampleSpec, draft_ids: Sequence[int]) -> list[SampleSpec]:
    """Return the spec of each position that a row with drafts draws at: its own, and one after each draft.

    Invariant: what is drawn with them is what the row would draw without drafts, one step after another. That needs
    specs that differ in position and known ids alone: raises ValueError for drafts beside barred ids or mirostat, whose
    state is known one draw after another. A mask has to allow each draft where it stands.
    """
    if draft_ids and (spec.barred_ids or spec.params.mirostat):
        raise ValueError("a row with barred ids or mirostat has drafts")
    reads_known_ids = spec.params.reads_known_ids or spec.mask is not None
    specs = [spec]
    for count, draft_id in enumerate(draft_ids, start=1):
        known = (*specs[-1].known_ids, draft_id) if reads_known_ids else spec.known_ids
        specs.append(dataclasses.replace(spec, position=spec.position + count, known_ids=known))
    return specs


def accepted(draws: Sequence[Draw], draft_ids: Sequence[int]) -> list[Draw]:
    """Return the draws that stand, of those made with `drafted_specs`: up to the first one that is not its draft.

    A draw that failed after others stand is left out: the next step makes it again.
    """
    count = 1
    while count <= len(draft_ids) and draws[count - 1].token_id == draft_ids[count - 1]:
        count += 1
    stands = list(draws[:count])
    return stands[:-1] if count > 1 and stands[-1].error is not None else stands


def row_result(row: int, draws: Sequence[Draw]) -> RowResult:
    """Return what an engine says of a row: the draws that stand, at least one; or the error of the only one."""
    if draws[0].error is not None:
        return RowResult(row, error=draws[0].error)
    logprobs = tuple(draw.logprobs for draw in draws if draw.logprobs is not None)
    return RowResult(row, tuple(draw.token_id for draw in draws), logprobs or None, mu=draws[-1].mu)


def _draw_before_masks(
    logits: Tensor, specs: Sequence[SampleSpec], highest_ids: Mapping[int, int], selection: Selection
) -> dict[int, Draw]:
    """Draw in the rows with a mask as if there were none, and return those draws that keep to the form.

    A try that is allowed has the shares that allowed ids have among each other, and so has the draw under the mask that
    follows where none is: which of the two it was favours nobody, and most masks are never found.
    """
    draws, trying = {}, {}
    for row, highest_id in highest_ids.items():
        if specs[row].tries_before_mask:
            token_id = _without_fault(_forced_id, specs[row])
            if token_id is None:
                trying[row] = highest_id
            else:
                draws[row] = Draw(token_id)
    heads = _heads(logits, specs, [row for row in trying if not specs[row].params.is_greedy], selection)
    for row, highest_id in trying.items():
        token_id = _without_fault(_tried_id, logits[row], specs[row], highest_id, heads.get(row))
        if token_id is not None:
            draws[row] = Draw(token_id)
    return draws


def _without_fault(find: Callable[..., int | None], *arguments: object) -> int | None:
    """Return what a function finds; nothing if it fails: whatever it is, the draw under the mask meets it again."""
    try:
        return find(*arguments)
    except Exception:
        return None


def _forced_id(spec: SampleSpec) -> int | None:
    return None if spec.mask is None else spec.mask.forced_id(spec.known_ids)


def _tried_id(logits: Tensor, spec: SampleSpec, highest_id: int, head: Head | Exception | None) -> int | None:
    """Return the first id of a row's tries that its mask takes; None if it takes none of them."""
    mask, params = spec.mask, spec.params
    if mask is None:
        return None
    if params.is_greedy:
        return highest_id if mask.takes(spec.known_ids, highest_id) else None
    if not isinstance(head, Head) or head.block_weights is None:
        return None
    for stream in TRY_STREAMS:
        number = uniform(params.seed, spec.choice, spec.position, stream)
        token_id = draw_by_block(logits, head.block_weights, head.logits[0], params.temperature, number)
        if mask.takes(spec.known_ids, token_id):
            return token_id
    return None


def _draw_changed(logits: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec], selection: Selection) -> list[Draw]:
    """Draw one id in each of `rows` of `logits` (rows, vocab), copied and changed by their options; each may fail."""
    draws = [Draw(-1)] * len(specs)
    masks: list[bytes | None] = [None] * len(specs)
    for index, spec in enumerate(specs):
        try:
            masks[index] = mask_bits(spec, logits.shape[1])
        except Exception as failure:  # a request's own form must not end the others
            draws[index] = _failed(failure)
    copied, highest = selection.masked(logits, rows, masks)
    changing = [index for index, spec in enumerate(specs) if draws[index].error is None and spec.changes_logits]
    for index in changing:
        try:
            change_logits(copied[index], specs[index])
        except Exception as failure:  # nor must its other options
            draws[index] = _failed(failure)
    _find_highest_again(copied, changing, highest)
    ready = {}
    for index, token_id in enumerate(highest):
        try:
            check_highest(-math.inf if token_id is None else copied[index, token_id].item())
        except RuleError as failure:
            draws[index] = draws[index] if draws[index].error is not None else _failed(failure)
        if token_id is not None and draws[index].error is None:
            ready[index] = token_id
    for index, draw in _draw_rows(copied, specs, ready, selection).items():
        draws[index] = draw
    return draws


def _find_highest_again(logits: Tensor, changed: Sequence[int], highest_ids: list[int | None]) -> None:
    """Set the highest ids of the rows of `logits` (rows, vocab) that were changed."""
    if changed:
        part = logits if len(changed) == len(logits) else logits.index_select(0, torch.tensor(changed))
        for row, token_id in zip(changed, first_highest(part), strict=True):
            highest_ids[row] = token_id


def _draw_rows(
    logits: Tensor, specs: Sequence[SampleSpec], highest_ids: Mapping[int, int], selection: Selection
) -> dict[int, Draw]:
    """Draw one id in each of the rows of `logits` (rows, vocab) that have a highest id, whose logit is finite.

    None of these rows holds NaN; what is in the others is of no interest.
    """
    sampled = [row for row in highest_ids if not specs[row].params.is_greedy]
    heads = _heads(logits, specs, sampled, selection)
    draws = {}
    for row, highest_id in highest_ids.items():
        spec, head = specs[row], heads.get(row)
        if isinstance(head, Exception):
            draws[row] = _failed(head)
            continue
        try:
            draws[row] = Draw(highest_id) if spec.params.is_greedy else _draw(logits[row], spec, head)
        except Exception as failure:  # one row's fault must not end the others
            draws[row] = _failed(failure)
    return draws


def _failed(failure: Exception) -> Draw:
    text = str(failure) if isinstance(failure, RuleError) else type(failure).__name__  # others may quote a request
    return Draw(-1, error=RowError("sampling_failed", f"Sampling failed for this request: {text}"))


def _add_logprobs(draws: list[Draw], logits: Tensor, specs: Sequence[SampleSpec], selection: Selection) -> None:
    """Add the logprobs of the model's own `logits` (rows, vocab) to the draws of the rows that ask for them."""
    wishes = []
    for row, (spec, draw) in enumerate(zip(specs, draws, strict=True)):
        if spec.params.logprobs is not None and draw.error is None:
            wishes.append(Wish(row, spec.params.logprobs + 1, 1.0))
    for wish, head in zip(wishes, _select(logits, wishes, selection), strict=True):
        if isinstance(head, Exception):
            draws[wish.row] = _failed(head)
            continue
        try:
            draw = draws[wish.row]
            found = token_logprobs(logits[wish.row], draw.token_id, wish.num_ids - 1, head)
            draws[wish.row] = draw._replace(logprobs=found)
        except Exception as failure:  # one row's fault must not end the others
            draws[wish.row] = _failed(failure)


def token_logprobs(logits: Tensor, token_id: int, num_top: int, head: Head) -> TokenLogprobs:
    """Return the logprobs of an id and of the `num_top` most likely ones of a row's `logits` (vocab,).

    `head` has one id more, where there are as many, and weights at the temperature 1; raises ValueError without.
    """
    if head.block_weights is None:
        raise ValueError("a head without weights")
    total = head.logits[0] + math.log(total_of(head.block_weights))
    values, ids = _first_of(logits, head, min(num_top, logits.numel()))
    top = [(token_id, value - total) for token_id, value in zip(ids, values, strict=True)]
    return TokenLogprobs(float(logits[token_id]) - total, top)


def _select(logits: Tensor, wishes: Sequence[Wish], selection: Selection) -> Sequence[Head | Exception]:
    """Return a head for each wish, or why the selection failed: which ends the rows that wished, and no others."""
    try:
        return selection.heads(logits, wishes)
    except Exception as failure:  # such as no memory for it
        return [failure] * len(wishes)


def _heads(
    logits: Tensor, specs: Sequence[SampleSpec], rows: list[int], selection: Selection
) -> dict[int, Head | Exception]:
    """Select the head of each of `rows`, as far as one helps to draw; see `_select` for what fails."""
    vocab = logits.shape[1]
    wishes: dict[str, list[Wish]] = {"few": [], "border": [], "whole": []}
    for row in rows:
        params = specs[row].params
        if params.mirostat:
            continue
        if 0 < params.top_k < vocab:
            if params.top_k <= FEW:
                wishes["few"].append(Wish(row, params.top_k + 1))
        elif params.temperature < LEAST_TEMPERATURE:
            continue
        elif params.top_p < 1:
            wishes["border"].append(Wish(row, selection.nucleus + 1, params.temperature))
        elif params.min_p > 0:
            wishes["border"].append(Wish(row, selection.nucleus + 1))
        elif params.typical_p >= 1:
            wishes["whole"].append(Wish(row, 1, params.temperature))
    heads: dict[int, Head | Exception] = {}
    for alike in wishes.values():
        heads.update(zip((wish.row for wish in alike), _select(logits, alike, selection), strict=True))
    return heads


def _draw(logits: Tensor, spec: SampleSpec, head: Head | None) -> Draw:
    """Draw one id from the `logits` (vocab,) of one row with a temperature above 0; `head` is the row's own."""
    params = spec.params
    number = uniform(params.seed, spec.choice, spec.position, MASKED_STREAM if spec.tries_before_mask else 0)
    if params.mirostat:
        token_id, mu = draw_with_mirostat(logits, params, first_mu(params) if spec.mu is None else spec.mu, number)
        return Draw(token_id, mu=mu)
    cuts_top = _xtc_cuts(spec)
    few = None
    if head is not None:
        if 0 < params.top_k < logits.numel():
            few = _top_k(logits, params, head)
        elif params.top_p < 1 or params.min_p > 0:
            few = _border(params, head)
        elif head.block_weights is not None and not cuts_top:
            return Draw(draw_by_block(logits, head.block_weights, head.logits[0], params.temperature, number))
    if few is None:
        return Draw(draw_of_all(logits, params, number, cuts_top=cuts_top))
    return Draw(draw_of_few(few, params, number, cuts_top=cuts_top))


def _xtc_cuts(spec: SampleSpec) -> bool:
    """Throw the dice of xtc: say whether it takes the likeliest ids out this time."""
    params = spec.params
    if params.xtc_probability <= 0 or params.xtc_threshold > MAX_XTC_THRESHOLD:
        return False
    return uniform(params.seed, spec.choice, spec.position, XTC_STREAM) < params.xtc_probability


def _top_k(logits: Tensor, params: SamplingParams, head: Head) -> Few:
    """Return what top_k, of at most FEW, and top_p leave of a row."""
    values, ids = _first_of(logits, head, params.top_k)
    few = few_of(values, ids, params.temperature)
    if params.top_p < 1:
        cumulative = list(accumulate(few.weights))
        few = few.first(bisect_left(cumulative, cumulative[-1] * params.top_p) + 1)
    return few


def _first_of(logits: Tensor, head: Head, count: int) -> tuple[list[float], list[int]]:
    """Return the `count` highest logits of a row (vocab,) and their ids, in a head's order; complete on the border.

    Impossible ids among them are left out: where few ids are left there would be a border of all the others.
    """
    if count > 0 and head.logits[count - 1] == -math.inf:
        count = head.logits.index(-math.inf)
    if not 0 < count < len(head.ids) or head.logits[count - 1] > head.logits[count]:
        return head.logits[:count], head.ids[:count]
    border = top_k_ids(logits, count)  # (count,), ascending: others on the border may have lower ids than the head's
    values, order = (part.tolist() for part in logits[border].sort(descending=True, stable=True))
    return values, [int(border[index]) for index in order]


def _border(params: SamplingParams, head: Head) -> Few | None:
    """Return what top_p, or min_p alone, leaves of a row without a top_k; None if the head may not hold all of it."""
    if head.block_weights is not None:
        goal = total_of(head.block_weights) * params.top_p
        few = few_of(head.logits, head.ids, params.temperature, goal=goal)
    else:
        few = few_of(head.logits, head.ids, params.temperature, least=params.min_p)
    count = len(few.ids)
    return few if count < len(head.ids) and head.logits[count - 1] > head.logits[-1] else None
