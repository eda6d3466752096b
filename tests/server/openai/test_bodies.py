"""Check every member of the OpenAI bodies: its type, both sides of each bound, and what absent and null mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import MAX_STOP_CHARS, MAX_STOPS, MAX_TOP_LOGPROBS, parse_body
from inference_api.server.generation_request import MAX_CHOICES
from inference_api.server.openai.bodies import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    ChatBody,
    CompletionBody,
    SamplingBody,
    StreamOptions,
)
from inference_api.server.openai.sampler_members import SamplerBody
from inference_api.server.validation import MAX_LISTED_IDS, MAX_STOP_IDS

HELLO = {"role": "user", "content": "hello"}
LEAST: dict[type[SamplingBody], dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": [HELLO]},
    CompletionBody: {"model": "m", "prompt": "hello"},
}
BOTH = tuple(LEAST)


def parse(model: type[SamplingBody], /, **members: Any) -> Any:
    return parse_body(model, json.dumps({**LEAST[model], **members}).encode(), "application/json")


def refused(model: type[SamplingBody], /, **members: Any) -> str | None:
    """Return the member that a 400 names."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(model, **members)
    return caught.value.param


# Member, the last good value on either side, the first bad one on either side (None: there is no such side).
BOUNDS: list[tuple[tuple[type[SamplingBody], ...], str, tuple[Any, Any], tuple[Any, Any]]] = [
    ((ChatBody,), "max_tokens", (1, 10**9), (0, None)),
    ((CompletionBody,), "max_tokens", (0, 10**9), (-1, None)),
    (BOTH, "prompt_logprobs", (0, MAX_TOP_LOGPROBS), (-1, MAX_TOP_LOGPROBS + 1)),
    (BOTH, "temperature", (0, 2), (-0.001, 2.001)),
    (BOTH, "top_p", (1e-9, 1), (0, 1.001)),
    (BOTH, "top_k", (-1, 10**9), (-2, None)),
    (BOTH, "min_p", (0, 1), (-0.001, 1.001)),
    (BOTH, "typical_p", (1e-9, 1), (0, 1.001)),
    (BOTH, "presence_penalty", (-2, 2), (-2.001, 2.001)),
    (BOTH, "frequency_penalty", (-2, 2), (-2.001, 2.001)),
    (BOTH, "repetition_penalty", (0.01, 100), (0.009, 100.1)),
    (BOTH, "logit_bias", ({"1": -100}, {"1": 100}), ({"1": -100.1}, {"1": 100.1})),
    (BOTH, "logit_bias", ({}, dict.fromkeys(map(str, range(MAX_LISTED_IDS)), 1)), (None, None)),
    (BOTH, "logit_bias", ({}, {}), (None, dict.fromkeys(map(str, range(MAX_LISTED_IDS + 1)), 1))),
    (BOTH, "allowed_token_ids", ([0], [1] * MAX_LISTED_IDS), ([], [1] * (MAX_LISTED_IDS + 1))),
    (BOTH, "stop", ("x", "x" * MAX_STOP_CHARS), ("", "x" * (MAX_STOP_CHARS + 1))),
    (BOTH, "stop", ([], ["x"] * MAX_STOPS), (None, ["x"] * (MAX_STOPS + 1))),
    (BOTH, "stop_token_ids", ([], [0] * MAX_STOP_IDS), (None, [0] * (MAX_STOP_IDS + 1))),
    (BOTH, "min_tokens", (0, 10**9), (-1, None)),
    (BOTH, "seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63)),
    (BOTH, "n", (1, MAX_CHOICES), (0, MAX_CHOICES + 1)),
    (BOTH, "priority", (-100, 100), (-101, 101)),
    (BOTH, "deadline", (0.1, 600), (0.099, None)),
    ((ChatBody,), "messages", ([HELLO], [HELLO] * MAX_MESSAGES), ([], [HELLO] * (MAX_MESSAGES + 1))),
    ((ChatBody,), "max_completion_tokens", (1, 10**9), (0, None)),
    ((ChatBody,), "top_logprobs", (0, MAX_TOP_LOGPROBS), (-1, MAX_TOP_LOGPROBS + 1)),
    ((CompletionBody,), "prompt", (["x"], ["x"] * MAX_PROMPTS), ([], ["x"] * (MAX_PROMPTS + 1))),
    ((CompletionBody,), "prompt", ([[1]], [[1]] * MAX_PROMPTS), (None, [[1]] * (MAX_PROMPTS + 1))),
    ((CompletionBody,), "prompt", ([0], [1] * 5000), (None, None)),
    ((CompletionBody,), "best_of", (1, MAX_CHOICES), (0, MAX_CHOICES + 1)),
    ((CompletionBody,), "logprobs", (0, MAX_TOP_LOGPROBS), (-1, MAX_TOP_LOGPROBS + 1)),
]


@pytest.mark.parametrize(("models", "name", "good", "bad"), BOUNDS)
def test_a_bound_is_within_and_what_is_past_it_is_refused_by_name(models, name: str, good, bad) -> None:
    for model in models:
        for value in good:
            parse(model, **{name: value})
        for value in bad:
            if value is not None:
                assert (refused(model, **{name: value}) or "").split("[")[0] == name


WRONG: dict[str, list[Any]] = {
    "model": [1, None, ["m"]],
    "max_tokens": ["1", 1.5, True, [1]],
    "temperature": ["1", True, [1], float("nan"), float("inf")],
    "top_p": ["1", True, float("nan")],
    "top_k": ["1", 1.5, True],
    "min_p": ["1", True, float("nan")],
    "typical_p": ["1", True],
    "presence_penalty": ["1", True, float("inf")],
    "frequency_penalty": ["1", True],
    "repetition_penalty": ["1", True],
    "logit_bias": ["x", [1], {"1": "x"}, {"1": None}, {"1": float("nan")}],
    "allowed_token_ids": ["x", 1, ["1"], [1.5], [True], [-1], [None]],
    "stop": [1, True, {"a": "b"}, [1], [None], [["x"]], ["x", ""]],
    "stop_token_ids": ["x", 1, ["1"], [True], [-1]],
    "min_tokens": ["1", 1.5, True],
    "ignore_eos": ["true", 1, []],
    "seed": ["1", 1.5, True],
    "n": ["1", 1.5, True],
    "priority": ["1", 1.5, True],
    "deadline": ["1", True, float("inf"), [1]],
    "prompt_logprobs": ["1", 1.5, True],
    "stream": ["true", 1, []],
    "stream_options": ["x", 1, [], {"include_usage": 1}, {"continuous_usage_stats": "x"}, {"other": True}],
    "user": [1, [], {}],
    "metadata": ["x", [], {"a": 1}, {"a": None}],
    "store": ["x", 1],
    "service_tier": [1, []],
    "safety_identifier": [1],
    "prompt_cache_key": [1],
    "prompt_cache_retention": [1],
}
WRONG_OF: dict[type[SamplingBody], dict[str, list[Any]]] = {
    ChatBody: {
        "messages": ["x", {}, None, [1], [None], [{}], [{"role": "robot", "content": "x"}], [{"content": "x"}]],
        "max_completion_tokens": ["1", 1.5, True],
        "logprobs": [1, "true"],
        "top_logprobs": ["1", 1.5, True],
        "tools": ["x", {}, [{}], [{"type": "web", "function": {"name": "f"}}], [{"type": "function", "function": {}}]],
        "tool_choice": ["must", {}, {"type": "function"}, 1],
        "parallel_tool_calls": [1, "true"],
    },
    CompletionBody: {
        "prompt": [1, None, {}, True, [None], [1, "x"], ["x", 1], [[1], "x"], [[]], [[-1]], [-1], [True], [1.0]],
        "best_of": ["1", 1.5, True],
        "echo": [1, "true"],
        "logprobs": [True, "1", 1.5],
        "suffix": ["x", 1, {}],
    },
}


@pytest.mark.parametrize("model", BOTH)
def test_each_wrong_type_is_refused_by_its_member(model: type[SamplingBody]) -> None:
    table = {**WRONG, **WRONG_OF[model]}
    assert table.keys() == model.model_fields.keys() - SamplerBody.model_fields.keys()
    for name, values in table.items():
        for value in values:
            assert (refused(model, **{name: value}) or "").startswith(name), (name, value)


@pytest.mark.parametrize("prompts", [["x"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)])
def test_too_many_prompts_are_told_as_such_and_not_as_a_wrong_type(prompts: list[Any]) -> None:
    text = f"prompt: List should have at most {MAX_PROMPTS} items, not {MAX_PROMPTS + 1}; it is a list of 33."
    with pytest.raises(InvalidRequestError, match=text):
        parse(CompletionBody, prompt=prompts)


@pytest.mark.parametrize("model", BOTH)
def test_a_member_that_is_null_is_absent_but_what_is_required(model: type[SamplingBody]) -> None:
    optional = [name for name, field in model.model_fields.items() if not field.is_required()]
    body = parse(model, **dict.fromkeys(optional))
    absent = parse(model)
    assert {name: getattr(body, name) or None for name in optional} == {
        name: getattr(absent, name) or None for name in optional
    }
    for name in LEAST[model]:
        assert (refused(model, **{name: None}) or "") == name


@pytest.mark.parametrize("model", BOTH)
def test_members_without_effect_are_those_that_cannot_change_an_answer(model: type[SamplingBody]) -> None:
    assert set(SamplingBody.NO_EFFECT) <= model.model_fields.keys()
    parse(
        model,
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        safety_identifier="s",
        prompt_cache_key="k",
        prompt_cache_retention="24h",
    )


def test_stream_options_have_their_defaults() -> None:
    body = parse(ChatBody, stream=True, stream_options={})
    assert body.stream_options == StreamOptions(include_usage=False, continuous_usage_stats=False)


def test_a_single_stop_is_a_list_of_one() -> None:
    assert parse(ChatBody, stop="x").stop == ["x"]
    assert parse(ChatBody, stop=["x", "y"]).stop == ["x", "y"]


@pytest.mark.parametrize("metadata", [{"k" * 65: "v"}, {"k": "v" * 513}, {str(n): "" for n in range(17)}])
def test_metadata_is_bounded(metadata: dict[str, str]) -> None:
    assert (refused(ChatBody, metadata=metadata) or "").startswith("metadata")
    parse(ChatBody, metadata={str(n) * 2: "v" * 512 for n in range(16)})


def test_a_message_may_have_a_name_of_bounded_length() -> None:
    body = parse(ChatBody, messages=[{**HELLO, "name": "n" * 64}])
    assert body.messages[0].name == "n" * 64
    assert "name" in (refused(ChatBody, messages=[{**HELLO, "name": "n" * 65}]) or "")


def test_parts_of_a_message_stand_on_lines_of_their_own() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = parse(ChatBody, messages=[{"role": "user", "content": parts}, HELLO])
    assert [message.text for message in body.messages] == ["one\ntwo", "hello"]


def test_an_answer_can_be_sent_back_as_the_next_turn_as_openais_client_dumps_it() -> None:
    empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    answer = {"role": "assistant", "content": "hi", **empty}
    assert parse(ChatBody, messages=[HELLO, answer, HELLO]).messages[1].text == "hi"
    assert refused(ChatBody, messages=[HELLO, {**answer, "refusal": "no"}]) == "messages[1].refusal"
    copied = {"provider_specific_fields": {"refusal": None}}
    assert parse(ChatBody, messages=[HELLO, {**answer, **copied}]).messages[1].text == "hi"
    place = "messages[1].provider_specific_fields.refusal"
    assert refused(ChatBody, messages=[HELLO, {**answer, "provider_specific_fields": {"refusal": "no"}}]) == place


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("name", ["functions", "max_token", "Temperature", "inputs", "echo_prompt", "a b"])
def test_an_unknown_member_is_refused_by_its_name(model: type[SamplingBody], name: str) -> None:
    assert refused(model, **{name: 1}) == name


def test_members_of_one_body_are_unknown_in_the_other() -> None:
    assert refused(ChatBody, prompt="x") == "prompt"
    assert refused(CompletionBody, messages=[HELLO]) == "messages"
    assert refused(CompletionBody, top_logprobs=1) == "top_logprobs"
