"""Guess the next ids of a sequence out of its own text: what followed the last time that its last ids occurred.

Pure and incremental, in the decode thread: an index of short runs of ids grows with the text, so that a guess costs
microseconds however long that is. A guess never changes an answer; the engine keeps of it what the draws agree with. A
text whose guesses mostly fail stops guessing for a while. Knows no rows, no engine and no other sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

RUN_LENGTHS = (3, 2)
"""Lengths of the runs that are looked up, the longest first: a longer one is right more often."""

START_CREDIT = 8
MAX_CREDIT = 16
"""What guesses may lose in a row: a refused id costs one, an accepted one brings `ACCEPTED_CREDIT`."""

ACCEPTED_CREDIT = 2

PAUSE_TOKENS = 32
"""So many ids long a text does not guess once its credit is spent; with half the credit it tries again."""


class PromptLookup:
    """Guess for one sequence. `token_ids` is its own growing list of known ids."""

    def __init__(self, token_ids: Several[int]) -> None:
        self._token_ids = token_ids
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._credit = START_CREDIT
        self._paused_until = 0

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` ids that may follow; none if no run has occurred before or guesses pause."""
        token_ids = self._token_ids
        if max_tokens < 1 or len(token_ids) < self._paused_until:
            return ()
        self._index()
        for length in RUN_LENGTHS:
            follower = self._followers.get(tuple(token_ids[-length:]))
            if follower is not None:
                # A repetition that reaches the end of the text goes on with itself.
                period = len(token_ids) - follower
                return tuple(token_ids[follower + index % period] for index in range(max_tokens))
        return ()

    def settle(self, num_proposed: int, num_accepted: int) -> None:
        """Take note of how a guess did."""
        gain = ACCEPTED_CREDIT * num_accepted - (num_proposed - num_accepted)
        self._credit = min(MAX_CREDIT, self._credit + gain)
        if self._credit <= 0:
            self._credit = START_CREDIT // 2
            self._paused_until = len(self._token_ids) + PAUSE_TOKENS

    def _index(self) -> None:
        """Index the runs that end before the last id: those have a follower; a later occurrence wins."""
        token_ids = self._token_ids
        for follower in range(max(1, self._num_indexed), len(token_ids)):
            for length in RUN_LENGTHS:
                if follower >= length:
                    self._followers[tuple(token_ids[follower - length : follower])] = follower
        self._num_indexed = len(token_ids)
