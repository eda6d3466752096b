"""Check what a request of any surface becomes on the wire, how long it may get, and what it may draw."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from inference_api.config import Settings
from inference_api.errors import InvalidRequestError, PromptTooLongError
from inference_api.messages import Pooling
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import (
    MAX_LOGPROBS,
    SEED_BITS,
    GenerationRequest,
    check_logprobs,
    draw_seed,
    fit_max_tokens,
)
from inference_api.server.ids_left import IdsLeft
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(context_tokens=10, vocab_size=20, stop_ids=frozenset({18, 19}))
SAMPLING = SamplingParams(0.5, 3, 0.25, 11)
REQUEST = GenerationRequest((1, 2, 3), SAMPLING, 5, num_choices=3)


def test_each_choice_is_a_session_of_its_own_with_its_number() -> None:
    submits = REQUEST.submits("req_1", "alpha", Settings())
    assert [submit.choice for submit in submits] == [0, 1, 2]
    assert len({submit.session_id for submit in submits}) == 3
    assert {(submit.request_id, submit.tenant, submit.max_tokens) for submit in submits} == {("req_1", "alpha", 5)}
    assert all(submit.token_ids == [1, 2, 3] and submit.num_prompt_tokens == 3 for submit in submits)
    assert all(submit.sampling == SAMPLING for submit in submits)


def test_a_deadline_bounds_every_wait_and_the_whole_and_a_priority_crosses() -> None:
    settings = dataclasses.replace(Settings(), queue_seconds=1.0, first_token_seconds=5.0, total_seconds=9.0)
    request = dataclasses.replace(REQUEST, deadline_seconds=2.5, priority=-7, num_choices=1)
    (submit,) = request.submits("req_1", "alpha", settings)
    assert (submit.queue_seconds, submit.first_token_seconds, submit.total_seconds) == (1.0, 2.5, 2.5)
    assert submit.priority == -7
    (longest,) = dataclasses.replace(request, deadline_seconds=9.0).submits("req_1", "alpha", settings)
    assert longest.total_seconds == 9.0


def test_a_deadline_over_the_services_own_is_refused_with_the_bound() -> None:
    settings = dataclasses.replace(Settings(), total_seconds=9.0)
    with pytest.raises(InvalidRequestError, match=r"^deadline: 9\.5 seconds are over the limit of 9 sec") as caught:
        dataclasses.replace(REQUEST, deadline_seconds=9.5).submits("req_1", "alpha", settings)
    assert caught.value.param == "deadline"


def test_all_that_was_asked_for_crosses() -> None:
    settings = dataclasses.replace(Settings(), queue_seconds=1.0, first_token_seconds=2.0, total_seconds=3.0)
    request = dataclasses.replace(
        REQUEST, stop_sequences=("\u00e9", "#"), stop_ids=(4, 5), min_tokens=2, ignore_eos=True, num_choices=1
    )
    (submit,) = request.submits("req_1", "alpha", settings)
    assert submit.stop_sequences == ["\u00e9".encode(), b"#"]
    assert (submit.stop_ids, submit.min_tokens, submit.ignore_eos) == ((4, 5), 2, True)
    assert (submit.queue_seconds, submit.first_token_seconds, submit.total_seconds) == (1.0, 2.0, 3.0)


def test_what_is_asked_of_the_prompt_itself_crosses() -> None:
    (plain,) = dataclasses.replace(REQUEST, num_choices=1).submits("req_1", "alpha", Settings())
    assert (plain.prompt_logprobs, plain.pooling, plain.batches) == (None, None, False)
    request = dataclasses.replace(REQUEST, max_tokens=0, pooling=Pooling.LAST, batches=True, num_choices=1)
    (submit,) = request.scoring_prompt(3).submits("req_1", "alpha", Settings())
    assert (submit.max_tokens, submit.prompt_logprobs, submit.pooling, submit.batches) == (0, 3, Pooling.LAST, True)
    assert REQUEST.scoring_prompt(None) is REQUEST


@pytest.mark.parametrize(("num_top", "num_prompts"), [(0, 32 * 128), (3, 32 * 32), (15, 256)])
def test_a_call_is_told_a_bounded_number_of_its_prompts_logprobs(num_top: int, num_prompts: int) -> None:
    scored = dataclasses.replace(REQUEST, token_ids=[1] * 16, num_choices=4).scoring_prompt(num_top)
    check_logprobs([scored] * num_prompts)
    check_logprobs([REQUEST] * num_prompts * 100)
    over = 64 * (num_prompts + 1) * (num_top + 1)
    with pytest.raises(InvalidRequestError, match=f"^logprobs: .* comes to {over}, at most {MAX_LOGPROBS} are told"):
        check_logprobs([scored] * (num_prompts + 1))


def test_a_call_is_told_a_bounded_number_of_its_answers_logprobs() -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, logprobs=15)
    told = dataclasses.replace(REQUEST, token_ids=[1] * 500, sampling=sampling, max_tokens=2**10, num_choices=16)
    check_logprobs([told])
    with pytest.raises(InvalidRequestError, match=f"comes to {MAX_LOGPROBS + 2**14}, at most"):
        check_logprobs([dataclasses.replace(told, max_tokens=2**10 + 64)])


@pytest.mark.parametrize(
    ("asked", "default", "num_prompt_tokens", "fitting"),
    [
        (0, None, 10, 0),
        (0, 3, 4, 0),
        (6, None, 4, 6),
        (1, None, 9, 1),
        (None, None, 4, 6),
        (None, None, 9, 1),
        (None, 3, 4, 3),
        (None, 7, 4, 6),
        (6, 3, 4, 6),
    ],
)
def test_what_fits_is_taken_and_a_default_is_clamped(asked, default, num_prompt_tokens, fitting) -> None:
    assert fit_max_tokens(asked, default, num_prompt_tokens, LIMITS) == fitting


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "told"),
    [(7, 4, (11, 4, 7)), (None, 10, (11, 10, 1)), (1, 12, (13, 12, 1)), (0, 11, (11, 11, 0))],
)
def test_what_does_not_fit_is_told_in_the_sentence_that_clients_know(asked, num_prompt_tokens, told) -> None:
    total, prompt, completion = told
    text = (
        f"This model's maximum context length is 10 tokens. However, you requested {total} tokens"
        f" ({prompt} in the prompt, {completion} for the completion). Please reduce the length of the messages."
    )
    with pytest.raises(PromptTooLongError) as caught:
        fit_max_tokens(asked, None, num_prompt_tokens, LIMITS)
    assert str(caught.value) == text


@pytest.mark.parametrize(("seed", "drawn"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)])
def test_a_seed_is_taken_modulo_what_keys_the_draws(seed: int, drawn: int) -> None:
    assert draw_seed(seed) == drawn


def test_a_seed_is_drawn_where_none_was_sent() -> None:
    seeds = {draw_seed(None) for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**SEED_BITS for seed in seeds)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, IdsLeft(20, 20, 20)),
        ({"min_tokens": 1}, IdsLeft(20, 20, 18)),
        ({"min_tokens": 1, "ignore_eos": True}, IdsLeft(20, 20, 20)),
        ({"min_tokens": 1, "stop_ids": (0, 19)}, IdsLeft(20, 20, 17)),
        ({"stop_ids": (0, 1)}, IdsLeft(20, 20, 20)),
    ],
)
def test_ends_may_not_be_drawn_before_min_tokens(changes: dict[str, object], left: IdsLeft) -> None:
    assert dataclasses.replace(REQUEST, **changes).ids_left(LIMITS.vocab_size, LIMITS.stop_ids) == left


def test_allowed_and_banned_ids_count_too() -> None:
    sampling = SamplingParams(1.0, 0, 1.0, 1, allowed_ids=(1, 2, 18), banned_ids=(2, 3))
    request = dataclasses.replace(REQUEST, sampling=sampling, min_tokens=1)
    assert request.ids_left(LIMITS.vocab_size, LIMITS.stop_ids) == IdsLeft(3, 2, 1)
