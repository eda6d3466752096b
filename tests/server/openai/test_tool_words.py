"""How chat answers with calls are told, whole and streamed, and how a body asks for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.messages import FinishReason, GrammarKind
from tests.server.fakes import FakeClient, finished

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": 5}
CALL = b'Yes. <tool_call>{"name": "f", "arguments": {"a": "<"}}</tool_call>'
STOPPED = finished(FinishReason.STOP)


@pytest.fixture
def post(make_app: Callable[..., Flask], context, fake_client: FakeClient) -> Callable[..., Any]:
    limits = type(context.limits)(**{**_slots(context.limits), "context_tokens": 2048})
    app = make_app({"limits": limits})
    fake_client.end = STOPPED
    return lambda **body: app.test_client().post("/v1/chat/completions", json={**BODY, **body})


def _slots(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def chunks(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


def test_a_whole_answer_has_its_content_and_its_calls(post, fake_client: FakeClient) -> None:
    fake_client.pieces = [CALL]
    (choice,) = post().get_json()["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == ("Yes. ", "tool_calls")
    assert call["id"].startswith("call_") and call["type"] == "function"
    assert call["function"] == {"name": "f", "arguments": '{"a": "<"}'}


def test_an_answer_without_a_call_is_an_answer(post, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"No <b>."]
    (choice,) = post().get_json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "No <b>.", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 5, 100])
def test_streamed_arguments_join_to_those_of_the_whole_answer(post, fake_client: FakeClient, size: int) -> None:
    fake_client.pieces = [CALL[first : first + size] for first in range(0, len(CALL), size)]
    found = chunks(post(stream=True).data)
    deltas = [choice["delta"] for choice in found]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes. "
    assert (calls[0]["type"], calls[0]["function"]) == ("function", {"name": "f", "arguments": ""})
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": "<"}'
    assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + ["tool_calls"]


def test_a_call_that_was_cut_off_ended_for_its_length(post, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [CALL[:45]], finished(FinishReason.LENGTH)
    (choice,) = post().get_json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"]


def test_a_required_call_is_forced_by_its_form(post, fake_client: FakeClient) -> None:
    fake_client.pieces = [b'{"name": "f", "arguments": {}}']
    (choice,) = post(tool_choice="required").get_json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    grammar = fake_client.last.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA


def test_what_the_body_says_of_tools_reaches_the_prompt_or_does_not(post, fake_client: FakeClient) -> None:
    prompts = {}
    for choice in ("auto", "none"):
        post(tool_choice=choice)
        prompts[choice] = bytes(one for one in fake_client.last.token_ids if one < 256)
        assert fake_client.last.grammar is None
    assert b'{"name": "f", "parameters": {"type": "object"}}' in prompts["auto"]
    assert b"tool" not in prompts["none"]


def test_a_single_call_ends_the_answer_where_several_are_not_wanted(post, fake_client: FakeClient) -> None:
    post(parallel_tool_calls=False)
    assert fake_client.last.stop_sequences == [b"</tool_call>"]
    post()
    assert fake_client.last.stop_sequences == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_cannot_go_with_tools_is_refused_by_name(post, fake_client: FakeClient, body, param: str) -> None:
    response = post(**body)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, param)
    assert fake_client.submits == []
