"""Own which rows of the KV cache are taken, and the epoch of each row's owner.

Pure bookkeeping: every row is a fixed run of `context_tokens` slots, so a row is all that there is to allocate. The
tensors live in the engine.
"""

from __future__ import annotations

import heapq


class RowAllocator:
    """Hand out the lowest free row; count each row's owners, so that a stale output can be told from a fresh one."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free = list(range(num_rows))
        self._epochs = [0] * num_rows

    @property
    def num_free(self) -> int:
        """Rows that nobody owns."""
        return len(self._free)

    def allocate(self) -> tuple[int, int]:
        """Take the lowest free row; return it with its new epoch. Raises IndexError if none is free."""
        row = heapq.heappop(self._free)
        self._epochs[row] += 1
        return row, self._epochs[row]

    def free(self, row: int) -> None:
        """Give a row back."""
        heapq.heappush(self._free, row)
