"""Find out how likely a model holds known ids, a piece of a prompt at a time; decode thread of PROCESS 2.

What the sampler tells of an id that it has drawn, here of ids that the caller knows: the same selection and the same
arithmetic on the model's own logits. Logits are made of a few positions at a time and are dropped again, so that a long
prompt needs no more memory than a short one. Knows no model, no KV cache and no sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from inference_api.backend.engines.base import RowPlan, RowResult, ScoreSpec
from inference_api.backend.engines.sampler import NON_FINITE, row_result, sample, token_logprobs
from inference_api.backend.engines.selection import TORCH_SELECTION, Selection, Wish
from inference_api.sampling_params import TokenLogprobs

SCORED_TOKENS = 128
"""Positions whose logits exist at once: 25 MB with a vocabulary of 49,152."""


def score_row(
    row: RowPlan, score: ScoreSpec, compute: Callable[[RowPlan], Tensor], selection: Selection = TORCH_SELECTION
) -> RowResult:
    """Compute a row's plan in pieces; return the logprobs of its `next_ids`, and what it draws after its last id.

    `compute` makes the logits (tokens, vocab) of each id of a piece, and `selection` finds the highest for the draw, as
    for any other row. For the logprobs torch does, so that numeric paths of the same logits tell the same numbers.
    """
    scores: list[TokenLogprobs] = []
    result = RowResult(row.row)
    for piece in _pieces(row):
        logits = compute(piece)  # (tokens, vocab)
        if None in TORCH_SELECTION.highest_ids(logits):
            return RowResult(row.row, error=NON_FINITE)
        scores += _scores(logits, score.next_ids[len(scores) :][: len(piece.token_ids)], score.num_top)
        if piece.sample is not None:
            result = row_result(row.row, sample(logits[-1:], [piece.sample], selection))
    return result if result.error is not None else dataclasses.replace(result, scores=tuple(scores))


def _pieces(row: RowPlan) -> Iterator[RowPlan]:
    """Cut a row's plan into such of at most SCORED_TOKENS ids."""
    for first in range(0, len(row.token_ids), SCORED_TOKENS):
        token_ids = row.token_ids[first : first + SCORED_TOKENS]
        is_last = first + len(token_ids) == len(row.token_ids)
        yield RowPlan(row.row, row.start + first, token_ids, row.sample if is_last else None)


def _scores(logits: Tensor, next_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return the logprobs of the ids that follow the first of the `logits` (tokens, vocab)."""
    heads = TORCH_SELECTION.heads(logits, [Wish(index, num_top + 1, 1.0) for index in range(len(next_ids))])
    return [
        token_logprobs(logits[index], next_id, num_top, head)
        for index, (next_id, head) in enumerate(zip(next_ids, heads, strict=True))
    ]
