"""Check DRY's losses: the examples of its authors, a reference that compares every place, and a cost without traps."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.repetition import repetition_losses
from inference_api.sampling_params import SamplingParams
from tests.backend.engines import scalar_sampler

A, B, C, Y = 1, 2, 3, 9


class Breakers:
    """Some ids are breakers."""

    def __init__(self, *ids: int) -> None:
        self._ids = ids

    def num_after(self, ids: Sequence[int]) -> int:
        return next((count for count, token_id in enumerate(reversed(ids)) if token_id in self._ids), len(ids))

    def is_in(self, token_id: int) -> bool:
        return token_id in self._ids


def dry(multiplier: float = 1.0, dry_base: float = 2.0, **options: object) -> SamplingParams:
    return SamplingParams(1.0, 0, 1.0, 0, dry_multiplier=multiplier, dry_base=dry_base, **options)


def test_an_id_that_would_go_on_with_a_repetition_loses_by_its_length() -> None:
    # The example in the comments of llama.cpp's llama_sampler_dry_apply: c continues three ids, y two, b one.
    known = (A, B, C, C, B, C, Y, A, B, C)
    assert repetition_losses(known, dry(), None) == {C: 2.0, Y: 1.0}
    assert repetition_losses(known, dry(dry_allowed_length=1), None) == {C: 4.0, Y: 2.0, B: 1.0}
    assert repetition_losses(known, dry(0.5, dry_allowed_length=3), None) == {C: 0.5}
    assert repetition_losses(known, dry(dry_allowed_length=4), None) == {}


def test_only_the_last_ids_are_looked_at() -> None:
    known = (A, B, C, C, B, C, Y, A, B, C)
    assert repetition_losses(known, dry(dry_penalty_last_n=6), None) == {Y: 1.0}
    assert repetition_losses(known, dry(dry_penalty_last_n=0), None) == {}
    assert repetition_losses(known[:2], dry(), None) == {}


def test_no_repetition_reaches_over_a_breaker_and_none_is_taken_from_a_breaker() -> None:
    known = (A, B, C, C, B, C, Y, A, B, C)
    assert repetition_losses(known, dry(), Breakers(A)) == {C: 1.0, Y: 1.0}
    assert repetition_losses(known, dry(), Breakers(B)) == {}
    assert repetition_losses(known, dry(), Breakers(Y)) == {C: 2.0}


def test_losses_do_not_grow_beyond_what_fp32_holds() -> None:
    known = (A,) * 400
    assert repetition_losses(known, dry(), None) == {A: 2.0**127}
    flat = SamplingParams(1.0, 0, 1.0, 0, dry_multiplier=1.0, dry_base=1.0)
    assert repetition_losses(known, flat, None) == {A: 1.0}


@pytest.mark.parametrize("num_distinct", [1, 2, 3, 8])
def test_random_ids_lose_what_the_reference_takes(num_distinct: int) -> None:
    source = random.Random(num_distinct)
    num_losses = 0
    for _ in range(300):
        known = tuple(source.randrange(num_distinct) for _ in range(source.randint(0, 40)))
        params = dry(
            dry_allowed_length=source.randint(1, 4), dry_penalty_last_n=source.choice([-1, 0, 5, 30]), dry_base=1.2
        )
        breakers = source.choice([None, Breakers(), Breakers(0), Breakers(1, 5)])
        spec = SampleSpec(params, 0, len(known), 0, known, breakers=breakers)
        losses = repetition_losses(known, params, breakers)
        assert losses == pytest.approx(scalar_sampler.repetition_losses(spec)), (known, params)
        num_losses += len(losses)
    assert num_losses > 80


@pytest.mark.parametrize("period", [1, 2, 7, 4096])
def test_the_cost_is_linear_in_the_ids_whatever_they_repeat(period: int) -> None:
    known = tuple(index % period for index in range(8192))
    params = dry(dry_allowed_length=1)
    repetition_losses(known[:64], params, None)
    began = time.process_time()
    repetition_losses(known, params, None)
    # Comparing every place with the end would take some 3 s.
    assert time.process_time() - began < 0.5
