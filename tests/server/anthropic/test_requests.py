"""Check what is generated for a Messages body, and the two sentences for what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import PromptTooLongError
from inference_api.server.anthropic.bodies import MessagesBody
from inference_api.server.anthropic.requests import make_request
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(context_tokens=64, vocab_size=300)


def body(**members: Any) -> MessagesBody:
    whole = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], **members}
    return MessagesBody.model_validate(whole)


def test_absent_members_draw_from_all_ids_as_they_are() -> None:
    request = make_request(body(), [1, 2], LIMITS)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs) == (1.0, 0, 1.0, None)
    assert (request.token_ids, request.max_tokens, request.stop_sequences, request.num_choices) == ([1, 2], 4, (), 1)


def test_members_cross_as_they_were_sent() -> None:
    request = make_request(
        body(temperature=0, top_k=7, top_p=0.5, stop_sequences=["a", "b"], max_tokens=9), [1], LIMITS
    )
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0, 7, 0.5)
    assert (request.max_tokens, request.stop_sequences) == (9, ("a", "b"))


def test_a_top_k_over_the_vocabulary_keeps_all_of_it() -> None:
    assert make_request(body(top_k=10**9), [1], LIMITS).sampling.top_k == 300


def test_each_call_draws_a_seed_of_its_own() -> None:
    seeds = {make_request(body(), [1], LIMITS).sampling.seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "told"),
    [
        (64, 1, "prompt is too long: 64 tokens > 63 maximum"),
        (100, 1, "prompt is too long: 100 tokens > 63 maximum"),
        (
            63,
            2,
            "input length and `max_tokens` exceed context limit: 63 + 2 > 64, decrease input length or `max_tokens`"
            " and try again",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_that_clients_know(num_prompt_tokens, max_tokens, told) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        make_request(body(max_tokens=max_tokens), [1] * num_prompt_tokens, LIMITS)
    assert str(caught.value) == told


def test_what_just_fits_is_taken() -> None:
    assert make_request(body(max_tokens=1), [1] * 63, LIMITS).max_tokens == 1
    assert make_request(body(max_tokens=63), [1], LIMITS).max_tokens == 63
