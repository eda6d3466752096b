"""Own which rows of the KV cache are taken, the number of each row's owner, and whose ids each row holds.

Pure bookkeeping of the decode thread: every row is a fixed run of `context_tokens` slots, so a row is all that there is
to allocate; the tensors live in the engine. A row that is given back remembers its ids, so that a later prompt of the
same tenant begins with what it shares with them. Knows no queue, no budget and no end of a sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Protocol

from inference_api.backend.engines.base import PrefixCopy

MIN_REUSED_TOKENS = 16
"""Fewer positions are computed as fast as they are copied."""

_COMPARED_TOKENS = 64
"""Ids that are compared at once: large enough that the comparison runs in C, small enough that a miss ends it early."""


class Holder(Protocol):
    """What a row holds: the KV of the first `num_computed_tokens` of `token_ids`, which are one tenant's."""

    @property
    def tenant(self) -> str:
        """The only one who may begin with these ids."""
        ...

    @property
    def token_ids(self) -> Several[int]:
        """Ids that never change, but more may follow."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """So many of them are in the KV cache."""
        ...


class RowOwner(Holder, Protocol):
    """A sequence: it holds its row's contents from its first chunk on."""

    row: int
    epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Memory:
    """What a row held when its owner left."""

    tenant: str
    token_ids: Several[int]
    num_computed_tokens: int


class RowPool:
    """Hand out rows, and find what a prompt shares with what rows hold.

    Invariant: a prefix is found only among ids of the same tenant, and its source neither begins a sequence in the plan
    that copies from it nor has an owner whose first chunk is still to come. `open_plan` begins each plan.
    """

    def __init__(self, num_rows: int, *, remembers: bool = False) -> None:
        self.num_rows = num_rows
        self.remembers = remembers
        self._free = set(range(num_rows))
        self._holders: list[Holder | None] = [None] * num_rows
        self._used_at = [0] * num_rows
        self._uses = itertools.count(1)
        self._num_owners = 0
        self._begun: set[int] = set()
        self._sources: set[int] = set()
        self._unclean: list[int] = []

    @property
    def num_free(self) -> int:
        """Rows that nobody owns."""
        return len(self._free)

    def allocate(self, owner: RowOwner) -> tuple[int, int]:
        """Take a free row for `owner`; return it with the owner's number. Raises ValueError if none is free.

        The number tells an earlier owner's output from the present one's. An owner that comes back keeps its own.
        """
        row = self._best_free_row(owner)
        self._free.remove(row)
        if owner.epoch:
            return row, owner.epoch
        self._num_owners += 1
        return row, self._num_owners

    def spoil(self, row: int) -> None:
        """Let nothing that a row holds be used again: its computation failed."""
        self._holders[row] = None
        self._unclean.append(row)

    def free(self, row: int) -> None:
        """Give a row back; it remembers what it holds."""
        holder = self._holders[row]
        if not self.remembers:
            self._holders[row] = None
            self._unclean.append(row)
        elif holder is not None:
            self._holders[row] = _Memory(holder.tenant, holder.token_ids, holder.num_computed_tokens)
        self._used_at[row] = next(self._uses)
        self._free.add(row)

    def forget_least(self) -> int:
        """Return the free row whose memory is worth least, and forget that. Raises ValueError if no row is free."""
        row = min(self._free, key=self._worth)
        if self._holders[row] is not None:
            self._holders[row] = None
            self._unclean.append(row)
        return row

    def take_unclean(self) -> list[int]:
        """Return the rows that since the last call came to hold what nobody may begin with any more.

        Each is free, or its present owner begins in the plan that is open: the engine may zero them before that runs.
        """
        unclean, self._unclean = self._unclean, []
        return unclean

    def open_plan(self) -> None:
        """Take note that a plan begins: what the last one computed may be copied."""
        self._begun.clear()
        self._sources.clear()

    def begin(self, owner: RowOwner, *, may_reuse: bool = True) -> PrefixCopy | None:
        """Let `owner` compute a chunk in its row; return the prefix that it begins with, if it gains from one.

        An owner between two chunks may begin again too, with a prefix that another row has computed meanwhile. One that
        may not reuse any computes every id itself.
        """
        prefix = self._longest_prefix(owner) if may_reuse and self._may_search(owner) else None
        if prefix is not None:
            self._used_at[prefix.source_row] = next(self._uses)
            if prefix.source_row != owner.row:
                self._sources.add(prefix.source_row)
        held = self._holders[owner.row]
        if held is not None and held.tenant != owner.tenant:
            self._unclean.append(owner.row)
        if prefix is not None or held is not owner:
            self._begun.add(owner.row)
            self._holders[owner.row] = owner
        return prefix

    def _may_search(self, owner: RowOwner) -> bool:
        """Tell whether `owner` can gain from a prefix, and may write one: nobody copies from its row in this plan."""
        num_missing = len(owner.token_ids) - 1 - owner.num_computed_tokens
        return self.remembers and num_missing >= MIN_REUSED_TOKENS and owner.row not in self._sources

    def _longest_prefix(self, owner: RowOwner) -> PrefixCopy | None:
        """Find the row with the most of what `owner` has yet to compute; its own comes first among equals."""
        own = self._holders[owner.row]
        rows = [row for row in range(self.num_rows) if row not in self._begun and self._may_copy(row)]
        if own is not owner:
            rows.insert(0, owner.row)
        return self._longest(owner, rows, owner.num_computed_tokens + MIN_REUSED_TOKENS)

    def _may_copy(self, row: int) -> bool:
        """Tell whether what `row` holds stays there while others copy it: nobody owns it, or its owner wrote it."""
        return row in self._free or not isinstance(self._holders[row], _Memory)

    def _longest(self, owner: RowOwner, rows: Iterable[int], at_least: int) -> PrefixCopy | None:
        best = None
        for row in rows:
            holder = self._holders[row]
            if holder is None or holder is owner or holder.tenant != owner.tenant:
                continue
            num_tokens = _shared_length(holder, owner, at_least)
            if num_tokens >= at_least:
                best = PrefixCopy(row, num_tokens)
                at_least = num_tokens + 1
        return best

    def _best_free_row(self, owner: RowOwner) -> int:
        """Choose the row that `owner` may go on in, if that keeps more than it overwrites; else the least worth."""
        if self.remembers:
            rows = sorted(self._free)
            while (prefix := self._longest(owner, rows, MIN_REUSED_TOKENS)) is not None:
                holder = self._holders[prefix.source_row]
                if holder is not None and holder.num_computed_tokens <= 2 * prefix.num_tokens:
                    return prefix.source_row
                rows.remove(prefix.source_row)
        return min(self._free, key=self._worth)

    def _worth(self, row: int) -> tuple[int, int]:
        """Order free rows: the empty ones first, the lowest of them before, then those that were not used for long."""
        return (self._used_at[row], row) if self._holders[row] is not None else (0, row)


def _shared_length(holder: Holder, owner: Holder, at_least: int) -> int:
    """Count the ids that both begin with, all but the owner's last, which must be computed; 0 if below `at_least`."""
    limit = min(holder.num_computed_tokens, len(owner.token_ids) - 1)
    # Most rows that share a beginning part ways before the best one so far: one id tells.
    if limit < at_least or holder.token_ids[at_least - 1] != owner.token_ids[at_least - 1]:
        return 0
    for start in range(0, limit, _COMPARED_TOKENS):
        end = min(start + _COMPARED_TOKENS, limit)
        left, right = holder.token_ids[start:end], owner.token_ids[start:end]
        if left != right:
            return start + next(index for index, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
    return limit
