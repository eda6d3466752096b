"""Keep the logprobs that a stream's reader has not taken yet: packed, because a reader may leave all of them.

Runs in PROCESS 1, under the stream's lock. As objects the twenty likeliest ids of one position take two kilobytes,
packed some three hundred bytes. Knows no ids, no ends and no readers.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

import msgspec

from inference_api.sampling_params import TokenLogprobs

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(TokenLogprobs).decode


class WaitingLogprobs:
    """A queue of logprobs, one a position, in order."""

    def __init__(self) -> None:
        self._packed: collections.deque[bytes] = collections.deque()
        self.num_bytes = 0
        """What waits takes so much, the queue's own places left out."""

    def extend(self, logprobs: Iterable[TokenLogprobs]) -> int:
        """Take in the next positions; return how many bytes they are."""
        packed = [_encode(one) for one in logprobs]
        self._packed.extend(packed)
        num_bytes = sum(map(len, packed))
        self.num_bytes += num_bytes
        return num_bytes

    def take(self, most: int | None = None) -> tuple[TokenLogprobs, ...]:
        """Hand out the next positions, `most` of them or all, and forget them."""
        count = len(self._packed) if most is None else min(most, len(self._packed))
        taken = [self._packed.popleft() for _ in itertools.repeat(None, count)]
        self.num_bytes -= sum(map(len, taken))
        return tuple(map(_decode, taken))

    def __bool__(self) -> bool:
        return bool(self._packed)
