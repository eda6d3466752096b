"""Price the ids that would lengthen a repetition of what a sequence holds already: DRY; decode thread of PROCESS 2.

"Don't repeat yourself" is p-e-w's rule (text-generation-webui, pull request 5677), here as in llama.cpp,
src/llama-sampling.cpp, `llama_sampler_dry_apply`. Where the known ids end as they did somewhere before, what came next
there loses the more, the longer the two agree. Pure integers and floats of one row; knows no logits and no texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inference_api.backend.engines.base import RepeatBreakers
from inference_api.sampling_params import SamplingParams

# llama.cpp, src/llama-sampling.cpp, FLOAT_MAX_LOG: e to this power is the highest number that fp32 holds.
_MAX_LOG = 88.7228391

# The same: a base so close to 1 needs no bound of its exponent.
_FLAT_BASE = 1.000001


def repetition_losses(
    known_ids: Sequence[int], params: SamplingParams, breakers: RepeatBreakers | None
) -> dict[int, float]:
    """Return what each id loses that would lengthen a repetition of `dry_allowed_length` ids or more.

    No repetition reaches back over a breaker, and an id that holds a whole breaker loses nothing.
    """
    allowed, last_n = params.dry_allowed_length, params.dry_penalty_last_n
    newest_first = known_ids[::-1] if last_n < 0 else known_ids[::-1][:last_n]
    if len(newest_first) <= allowed:
        return {}
    limit = len(newest_first) if breakers is None else min(len(newest_first), breakers.num_after(known_ids))
    if limit < allowed:
        return {}
    return {
        token_id: _loss(min(length, limit) - allowed, params)
        for token_id, length in _repeats_of_the_end(newest_first, allowed).items()
        if breakers is None or not breakers.is_in(token_id)
    }


def _loss(excess: int, params: SamplingParams) -> float:
    if params.dry_base > _FLAT_BASE:
        excess = min(excess, int(_MAX_LOG / math.log(params.dry_base)))
    return params.dry_multiplier * params.dry_base**excess


def _repeats_of_the_end(newest_first: Sequence[int], least: int) -> dict[int, int]:
    """Return the ids before which at least `least` ids are those at the beginning, and how many at most.

    The Z algorithm (Gusfield, "Algorithms on strings, trees and sequences", 1997, section 1.4): linear in the number of
    ids whatever they are, and places that do not begin like the first are skipped without a step of Python's.
    """
    num_ids = len(newest_first)
    longest: dict[int, int] = {}
    lengths = [0] * num_ids
    left = right = 0  # the ids from `left` to `right` are those at the beginning
    place = 1
    while place < num_ids:
        if place >= right:
            try:
                place = newest_first.index(newest_first[0], place)
            except ValueError:
                break
            end = place + 1
        else:
            end = min(place + lengths[place - left], right)
        if end >= right:
            while end < num_ids and newest_first[end - place] == newest_first[end]:
                end += 1
            left, right = place, end
        lengths[place] = length = end - place
        if length >= least and length > longest.get(newest_first[place - 1], 0):
            longest[newest_first[place - 1]] = length
        place += 1
    return longest
