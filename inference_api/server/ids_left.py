"""Count the ids that a request's rules leave to be drawn: a request that leaves none is refused before it crosses.

Runs in PROCESS 1. Pure; knows no surface: each one says in its own words which of its members left nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True, slots=True)
class IdsLeft:
    """How many ids are allowed, how many of those are not banned, and how many of those do not end the answer."""

    num_allowed: int
    num_drawable: int
    num_going_on: int


def count_ids_left(
    vocab_size: int,
    *,
    allowed: Collection[int] | None = None,
    banned: Collection[int] | None = None,
    ends: Collection[int] | None = None,
) -> IdsLeft:
    """Count the ids that rules leave of a vocabulary; `ends` are those that a `min_tokens` bars at first.

    All ids lie in the vocabulary; `allowed` None: all of it. Where a count is 0, nothing can be drawn.
    """
    barred, ending = set(banned or ()), set(ends or ())
    num_allowed = vocab_size
    if allowed is not None:
        kept = set(allowed)
        num_allowed, barred, ending = len(kept), barred & kept, ending & kept
    return IdsLeft(num_allowed, num_allowed - len(barred), num_allowed - len(barred | ending))
