"""Find the highest logits of many rows at once, for the sampler; decode thread of PROCESS 2.

`Selection` is what the sampler asks for, `TorchSelection` the way that every machine has. Comparing, selecting and
masking are exact in any shape, so they run over all rows together; a weight is a sum over one row and is computed row
by row. The vocabulary is never sorted. Knows no rule of sampling and no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inference_api.backend.engines.sampling_rules import BLOCK, SERIAL

_ALLOWED_BY_OCTET = torch.tensor([[octet >> bit & 1 for bit in range(8)] for octet in range(256)], dtype=torch.bool)
_LOSSES_BY_OCTET = {
    dtype: torch.where(_ALLOWED_BY_OCTET, 0.0, -math.inf).to(dtype) for dtype in (torch.float32, torch.float64)
}
"""(256, 8): what an octet of a mask adds to eight logits. Adding takes a third of the time of filling in."""


class Wish(NamedTuple):
    """Ask for the `num_ids` highest logits of a row, and for its weights at a temperature (0: not)."""

    row: int
    num_ids: int
    temperature: float = 0.0


class Head(NamedTuple):
    """The highest logits of one row, descending, equal ones by ascending id; at least as many as were wished for.

    Of those equal to the last one any may be missing: only what lies above the last logit is complete.
    """

    logits: list[float]
    ids: list[int]
    block_weights: Tensor | None = None
    """Sums of exp((logit - highest) / temperature) over each BLOCK ids, to some 1e-7, fp64; None if not wished for."""


class Masked(NamedTuple):
    """Copies of rows, in which what a mask does not allow is impossible: -inf."""

    logits: Tensor
    """(rows, vocab), the caller's to change."""
    highest_ids: list[int | None]
    """The lowest id of each row's highest logit; None where all ids are impossible."""


class Selection(Protocol):
    """Select highest ids and heads. What a row gets, above its last logit, depends on that row and its wish alone."""

    nucleus: int
    """So many ids are worth wishing for where the border is not known before, as for a top_p alone."""

    def highest_ids(self, logits: Tensor) -> list[int | None]:
        """Return the lowest id of the highest logit of each row of `logits` (rows, vocab), contiguous.

        None for a row with a logit that is NaN or infinite.
        """
        ...

    def masked(self, logits: Tensor, rows: Sequence[int], masks: Sequence[bytes | None]) -> Masked:
        """Copy `rows`, at least one, of `logits` (rows, vocab), contiguous and finite in them, each under its mask.

        A mask has a bit an id, the lowest one of a byte first; None allows all.
        """
        ...

    def heads(self, logits: Tensor, wishes: Sequence[Wish]) -> list[Head]:
        """Return a head for each wish; `logits` (rows, vocab) fp32 or fp64, contiguous, its wished rows not NaN."""
        ...


class TorchSelection:
    """Select with torch."""

    nucleus = 64

    def highest_ids(self, logits: Tensor) -> list[int | None]:
        """Return the lowest id of each row's highest logit; see `Selection.highest_ids`."""
        finite = (torch.isfinite(logits.amin(dim=1)) & torch.isfinite(logits.amax(dim=1))).tolist()  # NaN comes through
        return [
            token_id if is_finite else None for token_id, is_finite in zip(first_highest(logits), finite, strict=True)
        ]

    def masked(self, logits: Tensor, rows: Sequence[int], masks: Sequence[bytes | None]) -> Masked:
        """Copy rows under their masks; see `Selection.masked`."""
        copied = logits.index_select(0, torch.tensor(rows))  # (rows, vocab), a fifth of indexing's time
        for row, bits in zip(copied, masks, strict=True):
            if bits is not None:
                row += _losses(bits, row.dtype)[: row.numel()]
        highest = copied.amax(dim=1).tolist()
        ids = [None if value == -math.inf else it for it, value in zip(first_highest(copied), highest, strict=True)]
        return Masked(copied, ids)

    def heads(self, logits: Tensor, wishes: Sequence[Wish]) -> list[Head]:
        """Return a head for each wish; see `Selection.heads`."""
        if not wishes:
            return []
        rows = [wish.row for wish in wishes]
        chosen = logits if len(rows) == logits.shape[0] else logits[rows]  # a copy only if some are left out
        values, ids = _topk(chosen, min(max(wish.num_ids for wish in wishes), logits.shape[1]))
        ids, order = ids.sort(dim=1)  # (rows, count); equal values come in any order
        values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
        lists = zip(values.tolist(), ids.gather(1, order).tolist(), wishes, strict=True)
        return [Head(high, high_ids, _block_weights(logits[wish.row], high[0], wish)) for high, high_ids, wish in lists]


TORCH_SELECTION = TorchSelection()


def all_allowed(vocab: int) -> bytes:
    """Return the mask that allows all of `vocab` ids."""
    return b"\xff" * ((vocab + 7) // 8)


def first_highest(logits: Tensor) -> list[int]:
    """Return the lowest id of the highest logit of each row of `logits` (rows, vocab)."""
    rows, vocab = logits.shape
    num_blocks = vocab // BLOCK
    if vocab % BLOCK or num_blocks < 2:
        return [int(token_id) for token_id in logits.argmax(dim=1).tolist()]
    blocks = logits.view(rows, num_blocks, BLOCK)
    best = blocks.amax(dim=2).argmax(dim=1)  # (rows,), the first of the highest blocks; a fifth of argmax's time
    inside = blocks[torch.arange(rows), best].argmax(dim=1)  # (rows,)
    return [int(token_id) for token_id in (best * BLOCK + inside).tolist()]


def _topk(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what `logits.topk(count)` does, looking only into the blocks with the highest maxima if they are few."""
    rows, vocab = logits.shape
    num_blocks = vocab // BLOCK
    if vocab % BLOCK or num_blocks < 8 * count:
        values, ids = logits.topk(count, dim=1)
        return values, ids
    blocks = logits.view(rows, num_blocks, BLOCK)
    best = blocks.amax(dim=2).topk(count, dim=1, sorted=False).indices  # (rows, count)
    found = blocks.gather(1, best.unsqueeze(2).expand(-1, -1, BLOCK)).view(rows, -1)  # (rows, count * BLOCK)
    values, places = found.topk(count, dim=1)
    return values, best.gather(1, places // BLOCK) * BLOCK + places % BLOCK


def _block_weights(logits: Tensor, highest: float, wish: Wish) -> Tensor | None:
    """Sum a row's weights by block, in the logits' own precision: fp32 takes half of fp64's time."""
    if not wish.temperature:
        return None
    sums = []
    for part in torch.split(logits, SERIAL):  # sharing one row out would only wait for another core
        weights = (part - highest).mul_(1 / wish.temperature).exp_()  # (part,)
        if rest := -weights.numel() % BLOCK:
            weights = torch.nn.functional.pad(weights, (0, rest))
        sums.append(weights.view(-1, BLOCK).sum(dim=1).double())
    return torch.cat(sums)  # (blocks,)


def _losses(bits: bytes, dtype: torch.dtype) -> Tensor:
    """Return what a mask adds to logits, 8 for each of its bytes: 0 where its bit is set, else -inf."""
    octets = torch.frombuffer(bytearray(bits), dtype=torch.uint8).int()  # (bytes,)
    return _LOSSES_BY_OCTET[dtype].index_select(0, octets).flatten()  # (bytes * 8,)
