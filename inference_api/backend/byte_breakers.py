"""Find in ids the texts over which no repetition goes on, by the bytes that they stand for; decode thread, PROCESS 2.

llama.cpp looks for the ids of each text (`get_overlapping_token_sequences`); bytes find it however it was cut into ids.
Ids without text, such as control ids, hold none. Pure: knows no tokenizer, no sampler and no sequence.
"""

from __future__ import annotations

from collections.abc import Sequence


class ByteBreakers:
    """The breakers of one sequence; see `RepeatBreakers`. What it has followed costs a draw nothing any more."""

    def __init__(self, token_bytes: Sequence[bytes], breakers: Sequence[bytes]) -> None:
        """`token_bytes` holds the bytes of every id; there is a breaker, and none is empty."""
        self._token_bytes = token_bytes
        self._breakers = breakers
        self._max_begun_bytes = max(map(len, breakers)) - 1
        self._begun = b""
        """The last bytes that were followed: a breaker that ends later may begin in them."""
        self._num_followed = 0
        self._num_until_last = 0
        """Of the ids that were followed, those as far as the one in which the last breaker ends."""
        self._holders: dict[int, bool] = {}

    def follow(self, ids: Sequence[int]) -> None:
        """Take note of all `ids` that are known; they begin with those of the calls before, and stay."""
        new_ids = ids[self._num_followed :]
        self._num_until_last = self._until_last(new_ids)
        text = self._begun + self._text_of(new_ids)
        self._begun = text[max(0, len(text) - self._max_begun_bytes) :]
        self._num_followed = len(ids)

    def num_after(self, ids: Sequence[int]) -> int:
        """Return how many of the last `ids` come after the id in which the last breaker ends; all without one.

        They begin with those that were followed.
        """
        return len(ids) - self._until_last(ids[self._num_followed :])

    def is_in(self, token_id: int) -> bool:
        """Tell whether an id holds a whole breaker."""
        holds = self._holders.get(token_id)
        if holds is None:
            text = self._token_bytes[token_id]
            holds = self._holders[token_id] = any(breaker in text for breaker in self._breakers)
        return holds

    def _text_of(self, ids: Sequence[int]) -> bytes:
        return b"".join([self._token_bytes[token_id] for token_id in ids])

    def _until_last(self, new_ids: Sequence[int]) -> int:
        """Count the ids as far as the one in which the last breaker ends, in `new_ids` after those followed."""
        text = self._begun + self._text_of(new_ids)
        end = max(found + len(breaker) if (found := text.rfind(breaker)) >= 0 else 0 for breaker in self._breakers)
        if end <= len(self._begun):
            return self._num_until_last
        left = len(text) - end  # bytes after the breaker
        num_after = 0
        for token_id in reversed(new_ids):
            left -= len(self._token_bytes[token_id])
            if left < 0:
                break
            num_after += 1
        return self._num_followed + len(new_ids) - num_after
