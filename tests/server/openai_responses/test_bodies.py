"""Check what a body of the Responses API may hold, and what is refused and how."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import parse_body
from inference_api.server.openai_responses.bodies import ResponsesBody


def parse(**members: Any) -> ResponsesBody:
    body = {"model": "mock", "input": "hi", **members}
    return parse_body(ResponsesBody, json.dumps(body).encode(), "application/json")


@pytest.mark.parametrize(
    ("members", "param", "text"),
    [
        ({"input": None}, "input", "Input should be a valid string; it is null."),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"role": "user", "content": "x"}] * 1025}, "input", "at most 1024 items"),
        (
            {"input": [{"role": "tool", "content": "x"}]},
            "input[0].role",
            "'system', 'developer', 'user' or 'assistant'",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content", "Missing required parameter"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments", "Missing required"),
        ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", "Missing required"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "Missing required"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing required"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", 'it is "a b".'),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "Missing required"),
        ({"tools": [{"type": "function", "name": "f"}] * 129}, "tools", "at most 128 items"),
        ({"text": {"format": {"type": "json_schema", "name": "a b"}}}, "text.format.name", 'it is "a b".'),
        (
            {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
            "text.format.json_schema",
            "Unknown parameter",
        ),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content", "at least 1 item"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "should be 'input_text' or 'output_text'; it is \"input_image\".",
        ),
        (
            {"input": [{"type": "reasoning", "summary": []}]},
            "input[0]",
            "type should be 'message', 'function_call' or 'function_call_output'",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1; it is 0."),
        ({"max_output_tokens": True}, "max_output_tokens", "valid integer; it is true."),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0; it is -0.1."),
        ({"temperature": 2.1}, "temperature", "less than or equal to 2; it is 2.1."),
        ({"top_p": 0}, "top_p", "greater than 0; it is 0"),
        ({"top_p": 1.1}, "top_p", "less than or equal to 1; it is 1.1."),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20; it is 21."),
        ({"include": ["file_search_call.results"]}, "include[0]", 'it is "file_search_call.results".'),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata", "at most 16 items"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k", "at most 512 characters"),
        ({"metadata": {"k": 1}}, "metadata.k", "valid string; it is 1."),
        ({"surprise": 1}, "surprise", "Unknown parameter: surprise."),
        ({"stop": "x"}, "stop", "Unknown parameter: stop."),
    ],
)
def test_a_fault_names_the_member_its_value_and_the_bound(members: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**members)
    assert caught.value.param == param
    assert param in str(caught.value) and text in str(caught.value)


def test_a_key_of_metadata_has_a_bound_too() -> None:
    assert parse(metadata={"k" * 64: ""}).metadata == {"k" * 64: ""}
    with pytest.raises(InvalidRequestError, match=r"^metadata\.kkk.* at most 64 characters"):
        parse(metadata={"k" * 65: ""})


@pytest.mark.parametrize(
    ("members", "param", "text"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored: send the earlier messages"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored: send the earlier messages"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "nothing is stored: send the earlier messages"),
        ({"background": True}, "background", "nothing is stored: read the answer as a stream; it is true."),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompts are stored"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "should be 'function'; it is \"web_search\"."),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "should be 'function'; it is \"web_search\"."),
        ({"tool_choice": "any"}, "tool_choice", "should be 'none', 'auto' or 'required'; it is \"any\"."),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "should be 'none'; it is \"low\"."),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'; it is \"xml\"."),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "should be 'medium'; it is \"low\"."),
        ({"truncation": "auto"}, "truncation", "should be 'disabled'; it is \"auto\"."),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "is not served"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(members: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**members)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ") and text in str(caught.value)


@pytest.mark.parametrize(
    "members",
    [
        {name: None for name in ResponsesBody.model_fields if name not in ("model", "input")},
        {"store": True, "user": "u", "service_tier": "flex", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h", "metadata": {"k" * 64: "v" * 512}, "max_tool_calls": 3},
        {"parallel_tool_calls": False, "tool_choice": "auto", "tools": [], "background": False},
        {"tool_choice": "none", "truncation": "disabled", "reasoning": {"effort": "none", "summary": "auto"}},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "include": ["reasoning.encrypted_content"]},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"max_output_tokens": 1, "temperature": 0, "top_p": 1, "top_logprobs": 0, "metadata": {}},
    ],
)
def test_what_cannot_change_an_answer_is_accepted(members: dict[str, Any]) -> None:
    assert parse(**members).model_dump().keys() == ResponsesBody.model_fields.keys()


def test_every_member_without_effect_is_a_member() -> None:
    assert set(ResponsesBody.NO_EFFECT) <= ResponsesBody.model_fields.keys()


def test_logprobs_are_wanted_only_where_they_are_included() -> None:
    assert parse(include=["message.output_text.logprobs"]).wants_logprobs
    assert not parse(include=["reasoning.encrypted_content"]).wants_logprobs
    assert not parse(include=None).wants_logprobs
