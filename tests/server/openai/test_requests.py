"""Check what an OpenAI body means once the model is known: its sampling, its ends, its length, and what cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError, PromptTooLongError
from inference_api.sampling_params import SamplingParams
from inference_api.server.bodies import parse_body
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.openai.bodies import CompletionBody
from inference_api.server.openai.requests import make_request
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(context_tokens=10, vocab_size=20, stop_ids=frozenset({18, 19}))
PROMPT = [1, 2, 3]


def make(max_tokens: int | None = 5, **members: Any) -> GenerationRequest:
    body = {"model": "m", "prompt": "x", "seed": 7, **members}
    parsed = parse_body(CompletionBody, json.dumps(body).encode(), "application/json")
    return make_request(parsed, PROMPT, LIMITS, max_tokens=max_tokens)


def refused(**members: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequestError) as caught:
        make(**members)
    return str(caught.value), caught.value.param


def test_what_is_absent_is_off_and_nothing_of_it_crosses() -> None:
    assert make() == GenerationRequest(PROMPT, SamplingParams(1.0, 0, 1.0, 7), 5)


def test_the_priority_and_the_deadline_cross() -> None:
    request = make(priority=-3, deadline=2)
    assert (request.priority, request.deadline_seconds) == (-3, 2.0)


def test_everything_that_was_sent_crosses() -> None:
    request = make(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        typical_p=0.75,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "06": 2.5},
        allowed_token_ids=[5, 6, 5],
        stop=["a", "b"],
        stop_token_ids=[4, 4, 5],
        min_tokens=2,
        ignore_eos=True,
    )
    assert request == GenerationRequest(
        PROMPT,
        SamplingParams(
            0.0,
            3,
            0.5,
            7,
            min_p=0.25,
            typical_p=0.75,
            repetition_penalty=1.5,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            logit_bias={5: -100.0, 6: 2.5},
            allowed_ids=(5, 6),
        ),
        5,
        stop_sequences=("a", "b"),
        stop_ids=(4, 5),
        min_tokens=2,
        ignore_eos=True,
    )


@pytest.mark.parametrize(("top_k", "crosses"), [(-1, 0), (0, 0), (1, 1), (20, 20), (10**9, 20)])
def test_top_k_of_nothing_or_more_than_all_is_all(top_k: int, crosses: int) -> None:
    assert make(top_k=top_k).sampling.top_k == crosses


def test_a_seed_is_drawn_where_none_was_sent_and_a_negative_one_is_a_positive_one() -> None:
    assert len({make(seed=None).sampling.seed for _ in range(4)}) == 4
    assert make(seed=-1).sampling.seed == 2**63 - 1


def test_logprobs_and_choices_are_the_routes_to_say() -> None:
    body = parse_body(CompletionBody, b'{"model": "m", "prompt": "x", "n": 9, "logprobs": 9}', "application/json")
    request = make_request(body, PROMPT, LIMITS, max_tokens=1, num_choices=2, logprobs=0)
    assert (request.num_choices, request.sampling.logprobs) == (2, 0)


def test_without_max_tokens_the_answer_may_fill_the_context() -> None:
    assert make(max_tokens=None).max_tokens == 7


def test_what_does_not_fit_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLongError, match=r"maximum context length is 10 tokens.*3 in the prompt, 8 for"):
        make(max_tokens=8)


@pytest.mark.parametrize(
    ("members", "text", "param"),
    [
        (
            {"allowed_token_ids": [1, 20]},
            "allowed_token_ids[1]: 20 is outside the vocabulary, whose last id is 19.",
            "allowed_token_ids",
        ),
        (
            {"stop_token_ids": [20]},
            "stop_token_ids[0]: 20 is outside the vocabulary, whose last id is 19.",
            "stop_token_ids",
        ),
        ({"logit_bias": {"20": 1}}, "logit_bias[20]: 20 is outside the vocabulary, whose last id is 19.", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id.", "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias: '-1' is not a token id.", "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias: '1.0' is not a token id.", "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias: '\u0661' is not a token id.", "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, f"logit_bias: '{'9' * 64}' is not a token id.", "logit_bias"),
        (
            {"logit_bias": {"7": 1, "07": 2}},
            "logit_bias[7]: is given more than once; send it once.",
            "logit_bias",
        ),
        ({"min_tokens": 6}, "min_tokens: 6 is over max_tokens, which is 5.", "min_tokens"),
        (
            {"min_tokens": 1, "allowed_token_ids": [18, 19]},
            "min_tokens: 1 is over 0, but all 2 ids that may be drawn end the answer.",
            "min_tokens",
        ),
        (
            {"min_tokens": 1, "allowed_token_ids": [4], "stop_token_ids": [4], "ignore_eos": True},
            "min_tokens: 1 is over 0, but all 1 ids that may be drawn end the answer.",
            "min_tokens",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_member_value_and_bound(members, text: str, param: str) -> None:
    assert refused(**members) == (text, param)


def test_what_leaves_something_to_draw_is_taken() -> None:
    assert make(min_tokens=0, allowed_token_ids=[18, 19]).sampling.allowed_ids == (18, 19)
    assert make(min_tokens=1, allowed_token_ids=[18, 19], ignore_eos=True).min_tokens == 1
    assert make(min_tokens=5, allowed_token_ids=[4, 18]).min_tokens == 5
