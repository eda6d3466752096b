"""Say which text each id of an answer stands for, as soon as that text may be sent: what logprobs are reported with.

Runs in PROCESS 1, in the request's own thread, for one generation whose request asked for logprobs. Ids come with the
text that each of them made final; text is released later, and maybe less of it, because a stop sequence is held back
and cut off. Knows no decoding and no stop sequence.
"""

from __future__ import annotations

import collections
import dataclasses

from inference_api.sampling_params import TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class TokenText:
    """One id, the text it brought (empty inside a character), and its logprobs; texts joined are the answer."""

    token_id: int
    text: str
    logprobs: TokenLogprobs


class TokenTrail:
    """Hold ids until their text is released, in order."""

    def __init__(self) -> None:
        self._held: collections.deque[TokenText] = collections.deque()
        self._num_released = 0
        """Characters of the first held id that have been released already."""

    def add(self, token: TokenText) -> None:
        """Take the next id."""
        self._held.append(token)

    def extend(self, text: str) -> None:
        """Give the last id the text of a dangling tail, once it is the last one for good."""
        if text and self._held:
            self._held[-1] = dataclasses.replace(self._held[-1], text=self._held[-1].text + text)

    def release(self, num_chars: int) -> list[TokenText]:
        """Return the ids whose whole text lies within the `num_chars` characters that may be sent now, and before.

        An id without text waits for the next one that has some: together they may be one character.
        """
        self._num_released += num_chars
        num_ready = num_ready_chars = num_seen_chars = 0
        for count, token in enumerate(self._held, start=1):
            num_seen_chars += len(token.text)
            if num_seen_chars > self._num_released:
                break
            if token.text:
                num_ready, num_ready_chars = count, num_seen_chars
        self._num_released -= num_ready_chars
        return [self._held.popleft() for _ in range(num_ready)]

    def finish(self) -> list[TokenText]:
        """Return what is left once the answer has ended: the id of which a stop has cut off the end, cut off."""
        cut = []
        while self._held and self._num_released > 0:
            token = self._held.popleft()
            cut.append(dataclasses.replace(token, text=token.text[: self._num_released]))
            self._num_released -= len(token.text)
        return cut

    def unsent(self) -> list[TokenText]:
        """Return the ids that `finish` left: a stop sequence's and the model's own end. Nothing of them is sent."""
        ids = [dataclasses.replace(token, text="") for token in self._held]
        self._held.clear()
        return ids
