"""Find stop sequences in a stream: in bytes for the backend, in text for the server.

The backend's decode thread asks a `StopMatcher` a sequence when to end a row; the server asks a `TextStop` a stream
what may be sent already. Both walk the same Aho-Corasick automaton, so they agree on which stop wins: the one that
completes first, and of those that complete together the longest. Pure: knows no ids, no tokenizer, no EOS.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

_START = 0
_NO_PATTERN = -1


class _Automaton:
    """Aho-Corasick over integers (Aho and Corasick, 1975, algorithms 1 to 3); never changes once built.

    A state stands for the longest suffix of the input that is a prefix of a pattern. Building costs the patterns'
    total length; `advance` costs one or two steps a symbol, counted over the whole input.
    """

    def __init__(self, patterns: Iterable[Sequence[int]]) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._fallback: list[int] = [_START]
        self.depth: list[int] = [0]
        self.pattern: list[int] = [_NO_PATTERN]
        for index, symbols in enumerate(patterns):
            self._insert(index, symbols)
        self._link()

    def _insert(self, index: int, symbols: Sequence[int]) -> None:
        if not symbols:
            raise ValueError("a stop sequence must not be empty")
        state = _START
        for symbol in symbols:
            if symbol not in self._next[state]:
                self._next[state][symbol] = len(self._next)
                self._next.append({})
                self._fallback.append(_START)
                self.depth.append(self.depth[state] + 1)
                self.pattern.append(_NO_PATTERN)
            state = self._next[state][symbol]
        if self.pattern[state] == _NO_PATTERN:
            self.pattern[state] = index

    def _link(self) -> None:
        waiting = collections.deque(self._next[_START].values())
        while waiting:
            state = waiting.popleft()
            for symbol, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], symbol)
                # A state's own pattern is the longest that ends here; only without one does a shorter one count.
                if self.pattern[child] == _NO_PATTERN:
                    self.pattern[child] = self.pattern[self._fallback[child]]
                waiting.append(child)

    def advance(self, state: int, symbol: int) -> int:
        while symbol not in self._next[state]:
            if state == _START:
                return _START
            state = self._fallback[state]
        return self._next[state][symbol]


@dataclasses.dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop sequence that ended a stream; `start` and `end` are byte offsets in everything that was fed."""

    stop: bytes
    start: int
    end: int


class StopMatcher:
    """Watch one sequence's bytes for its stop sequences, in pieces of any size."""

    def __init__(self, stop_sequences: Sequence[bytes]) -> None:
        """Prepare the search; raises ValueError for an empty stop sequence. No stop sequences cost nothing a byte."""
        self._stops = tuple(stop_sequences)
        self._automaton = _Automaton(self._stops) if self._stops else None
        self._state = _START
        self._num_bytes = 0
        self._match: StopMatch | None = None

    @property
    def held_bytes(self) -> int:
        """Count the last bytes that a stop could still claim: the longest suffix that is a proper prefix of a stop.

        0 after a match, since nothing that follows can be claimed any more.
        """
        return self._automaton.depth[self._state] if self._automaton and not self._match else 0

    def feed(self, data: bytes, *, may_end: bool = True) -> StopMatch | None:
        """Take the next bytes and return the match, now and on every later call; what follows a match is ignored.

        A stop that is complete within bytes that may not end does not count; one may begin in them.
        """
        if self._automaton is None or self._match is not None:
            return self._match
        for position, symbol in enumerate(data, start=self._num_bytes + 1):
            self._state = self._automaton.advance(self._state, symbol)
            if may_end and self._automaton.pattern[self._state] != _NO_PATTERN:
                stop = self._stops[self._automaton.pattern[self._state]]
                self._match = StopMatch(stop=stop, start=position - len(stop), end=position)
                break
        self._num_bytes += len(data)
        return self._match


class TextStop:
    """Hold back the end of a stream that may turn out to be a stop, and cut the stream where one begins."""

    def __init__(self, stop_sequences: Sequence[str], *, keeps_stop: bool = False) -> None:
        """Prepare the search; raises ValueError for an empty stop sequence. `keeps_stop` cuts behind the stop."""
        self._keeps_stop = keeps_stop
        self._stops = tuple(stop_sequences)
        self._automaton = _Automaton([[ord(char) for char in stop] for stop in self._stops]) if self._stops else None
        self._state = _START
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """Name the stop sequence that ended the text, if one has."""
        return self._matched

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Take the next text and return what may be sent now: no part of it can belong to a stop that is not kept.

        It is "" after a match. A stop complete within text that may not end does not count; one may begin in it.
        """
        if self._automaton is None:
            return text
        if self._matched is not None:
            return ""
        pending = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.advance(self._state, ord(char))
            if may_end and self._automaton.pattern[self._state] != _NO_PATTERN:
                self._matched = self._stops[self._automaton.pattern[self._state]]
                self._held = ""
                return pending[: position if self._keeps_stop else position - len(self._matched)]
        # Invariant: held text is the longest suffix that is a prefix of a stop, never a fixed length.
        boundary = len(pending) - self._automaton.depth[self._state]
        self._held = pending[boundary:]
        return pending[:boundary]

    def flush(self) -> str:
        """Return what is still held back once the stream has ended without completing it; call it last."""
        held, self._held, self._state = self._held, "", _START
        return held
