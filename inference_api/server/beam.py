"""Search for the likeliest continuations of one prompt, several at a time: beam search, from one round to the next.

Pure, for PROCESS 1: a round takes the likeliest next ids of each live beam, whoever asked the backend for them. The
rules are those of transformers, generation/utils.py, `GenerationMixin._beam_search`, so that the two find the same;
where they leave a tie open, the earlier beam and the lower id win. Knows no text, no requests and no time.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Collection, Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class BeamOptions:
    """How wide and how long a search is, and what it prefers.

    `early_stopping` True ends it once `width` continuations have ended; False where the best live beam, as long as it
    is, scores no better than they; "never" where it could not at any length, if longer ones are preferred.
    """

    width: int
    max_tokens: int
    end_ids: frozenset[int]
    length_penalty: float = 1.0
    """Scores are the sum of logprobs divided by the length to this power."""
    early_stopping: bool | Literal["never"] = False

    @property
    def num_top(self) -> int:
        """How many of the likeliest next ids of a beam a round needs: `width` of them at least do not end."""
        return self.width + len(self.end_ids)


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """A continuation, and the sum of its ids' logprobs; its score once it is final."""

    token_ids: tuple[int, ...] = ()
    value: float = 0.0


class BeamSearch:
    """The search over one prompt. Call `take` until it is done."""

    def __init__(self, options: BeamOptions) -> None:
        self._options = options
        self._num_tokens = 0
        self._is_done = False
        self.live: list[Beam] = [Beam()]
        """Those that go on, the likeliest first."""
        self.final: list[Beam] = []
        """Those that have ended, the best score first; at most as many as the search is wide."""

    @property
    def is_done(self) -> bool:
        """Whether nothing that is still live can come among the final ones."""
        return self._is_done

    def take(self, likeliest: Sequence[Collection[tuple[int, float]]]) -> None:
        """Go on by one id: `likeliest` are the next ids of each live beam with their logprobs, `num_top` or all."""
        options = self._options
        self._num_tokens += 1
        is_last = self._num_tokens == options.max_tokens
        candidates = (
            (-(beam.value + logprob), place, token_id)
            for place, (beam, nexts) in enumerate(zip(self.live, likeliest, strict=True))
            for token_id, logprob in nexts
        )
        live: list[Beam] = []
        ended: list[Beam] = []
        best = heapq.nsmallest(options.width * (1 + max(1, len(options.end_ids))), candidates)
        for rank, (loss, place, token_id) in enumerate(best):
            token_ids = (*self.live[place].token_ids, token_id)
            if is_last or token_id in options.end_ids:
                if rank < options.width:
                    ended.append(Beam(token_ids, self._score(-loss, self._num_tokens)))
            else:
                live.append(Beam(token_ids, -loss))
        self.live = live[: options.width]
        self.final = sorted([*self.final, *ended], key=lambda beam: -beam.value)[: options.width]
        self._is_done = not self.live or not self._can_improve()

    def _can_improve(self) -> bool:
        options = self._options
        if len(self.final) < options.width:
            return True
        if options.early_stopping is True:
            return False
        looks_ahead = options.early_stopping == "never" and options.length_penalty > 0
        num_tokens = options.max_tokens if looks_ahead else self._num_tokens
        return self._score(self.live[0].value, num_tokens) > self.final[-1].value

    def _score(self, logprob: float, num_tokens: int) -> float:
        return float(logprob / num_tokens**self._options.length_penalty)
