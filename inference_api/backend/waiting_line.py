"""Own the order of those who wait for a row: one line of places for all tenants, and whose turn a place is.

Pure; used by the scheduler alone, in the decode thread. A place belongs to the tenant whose sequence took it, and goes
to that tenant's most urgent sequence, the earliest of them first: a priority moves nobody of another tenant. Those who
made room for others come before the line, in their order. Knows nothing of rows or of time.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from inference_api.backend.sequence import Sequence


class WaitingLine:
    """The sequences that wait.

    Invariant: the line's tenants stand in the order of arrival, whatever the priorities, and so do a tenant's own.
    """

    def __init__(self) -> None:
        self._returned: collections.deque[Sequence] = collections.deque()
        self._line: list[Sequence] = []
        self._arrivals = itertools.count()
        self._arrived: dict[Sequence, int] = {}
        self._num_prioritised = 0

    def __len__(self) -> int:
        return len(self._returned) + len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield them in the order in which they would get rows now."""
        yield from self._returned
        if not self._num_prioritised:
            yield from list(self._line)
            return
        turns: dict[str, list[Sequence]] = {}
        for sequence in self._line:
            turns.setdefault(sequence.tenant, []).append(sequence)
        ordered = {tenant: iter(sorted(waiting, key=self._urgency)) for tenant, waiting in turns.items()}
        yield from [next(ordered[sequence.tenant]) for sequence in self._line]

    def append(self, sequence: Sequence) -> None:
        """Give a sequence that has just come the last place."""
        self._line.append(sequence)
        self._arrived[sequence] = next(self._arrivals)
        self._num_prioritised += sequence.submit.priority != 0

    def put_back(self, sequence: Sequence) -> None:
        """Take back one that made room for others, before everybody who waits."""
        self._returned.appendleft(sequence)

    def first(self) -> Sequence:
        """Return whose turn it is. Raises IndexError if nobody waits."""
        return self._returned[0] if self._returned else self._line[self._next_index()]

    def take_first(self) -> Sequence:
        """Let the one whose turn it is go, and return it; its tenant's earlier ones move up by one place of theirs."""
        if self._returned:
            return self._returned.popleft()
        index = self._next_index()
        sequence = self._line[index]
        held = sequence
        for place in range(index + 1):
            if self._line[place].tenant == sequence.tenant:
                self._line[place], held = held, self._line[place]
        del self._line[0]
        self._forget(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence go out of its turn, with its place. Raises ValueError if it does not wait."""
        if sequence in self._arrived:
            self._line.remove(sequence)
            self._forget(sequence)
        else:
            self._returned.remove(sequence)

    def _next_index(self) -> int:
        if not self._num_prioritised:
            return 0
        tenant = self._line[0].tenant
        own = [index for index, sequence in enumerate(self._line) if sequence.tenant == tenant]
        return min(own, key=lambda index: self._urgency(self._line[index]))

    def _urgency(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.submit.priority, self._arrived[sequence]

    def _forget(self, sequence: Sequence) -> None:
        del self._arrived[sequence]
        self._num_prioritised -= sequence.submit.priority != 0
