"""Check what xtc and top_n_sigma keep, by hand-made distributions; random ones stand in test_sampler_options.py."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.philox import uniform
from inference_api.sampling_params import SamplingParams

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

SHARES = (0.4, 0.05, 0.3, 0.15, 0.1)
LOGITS = torch.tensor([[math.log(share) for share in SHARES]])


def drawn(logits: torch.Tensor = LOGITS, top_k: int = 0, top_p: float = 1.0, **options: object) -> set[int]:
    """Return the ids that many uniform numbers select."""
    spec = SampleSpec(SamplingParams(1.0, top_k, top_p, 5, **options), 0, 0)
    specs = [dataclasses.replace(spec, position=position) for position in range(400)]
    return {draw.token_id for draw in sampler.sample(logits.expand(400, -1), specs)}


@pytest.mark.parametrize("other", [{}, {"top_p": 0.999}, {"top_k": 5}, {"min_p": 0.001}, {"typical_p": 0.999}])
def test_xtc_takes_out_all_but_the_least_likely_of_the_top(other: dict[str, object]) -> None:
    assert drawn(xtc_probability=1.0, xtc_threshold=0.12, **other) == {1, 3, 4}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.35, **other) == {0, 1, 2, 3, 4}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.0, **other) == {1}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.51, **other) == {0, 1, 2, 3, 4}


def test_xtc_counts_shares_of_what_the_rules_before_it_left() -> None:
    # Of three ids of 0.4, 0.3 and 0.15 the last has a share of 0.18.
    assert drawn(top_k=3, xtc_probability=1.0, xtc_threshold=0.17) == {3}
    assert drawn(xtc_probability=1.0, xtc_threshold=0.17) == {1, 2, 3, 4}


def test_of_equally_likely_ids_xtc_leaves_the_lowest() -> None:
    for options in ({}, {"top_k": 3}):
        assert drawn(torch.zeros(1, 4), xtc_probability=1.0, xtc_threshold=0.1, **options) == {0}


def test_xtc_happens_as_often_as_it_is_asked_for_by_a_number_of_its_own() -> None:
    params = SamplingParams(1.0, 0, 1.0, 5, xtc_probability=0.3, xtc_threshold=0.2)
    specs = [SampleSpec(params, 2, position) for position in range(2000)]
    # Ids 0 and 1 are the top: without xtc 0 comes half of the time, with it never.
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]]).expand(2000, -1)
    draws = sampler.sample(logits, specs)
    num_first = sum(draw.token_id == 0 for draw in draws)
    assert num_first == pytest.approx(2000 * 0.5 * 0.7, abs=100)
    for position, draw in enumerate(draws):
        if uniform(5, 2, position, sampler.XTC_STREAM) < 0.3:
            assert draw.token_id != 0


def test_top_n_sigma_keeps_what_is_near_enough_to_the_highest_in_spread() -> None:
    logits = torch.tensor([[3.0, 1.0, -1.0, -3.0]])  # the standard deviation is the root of 5
    assert drawn(logits, top_n_sigma=0.5) == {0}
    assert drawn(logits, top_n_sigma=0.9) == {0, 1}
    assert drawn(logits * 0.2, top_n_sigma=0.9) == {0, 1}, "a temperature changes nothing"
    assert drawn(logits * 0.2, top_n_sigma=3.0) == {0, 1, 2, 3}
    assert drawn(logits * 0.2, top_n_sigma=-1.0) == {0, 1, 2, 3}


def test_top_n_sigma_measures_the_spread_of_the_possible_ids_alone() -> None:
    logits = torch.tensor([[3.0, 1.0, -1.0, -3.0, 50.0]]) * 0.2
    assert drawn(logits, top_n_sigma=0.9, banned_ids=(4,)) == {0, 1}
    assert drawn(torch.zeros(1, 4), top_n_sigma=0.1) == {0, 1, 2, 3}


def test_a_bad_sequence_is_not_completed_by_the_answer() -> None:
    params = SamplingParams(0.0, 0, 1.0, 0, bad_sequences=((7, 2), (7, 8, 1)))
    logits = torch.tensor([[0.0, 2.0, 3.0] + [-9.0] * 7])

    def next_id(*known: int, num_prompt_tokens: int = 1) -> int:
        (draw,) = sampler.sample(logits, [SampleSpec(params, 0, len(known), num_prompt_tokens, known)])
        return draw.token_id

    assert next_id(5, 6) == 2
    assert next_id(5, 7) == 1
    assert next_id(7) == 2, "the prompt may begin one"
    assert next_id(5, 7, 8) == 2
    assert next_id(5, 7, 7, num_prompt_tokens=2) == 1
    assert next_id(5, 8) == 2
