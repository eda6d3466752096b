"""Check what a response does with tools and forms: what is told and submitted, what comes back, and goes back again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.messages import FinishReason, GrammarKind
from inference_api.server.context import ServerContext
from tests.server.fakes import FakeClient, finished
from tests.server.openai_responses.test_routes import START, fault, post, turn

TOOL = {"type": "function", "name": "f", "description": "Does.", "parameters": {"type": "object"}, "strict": True}
CALL = b'Yes. <tool_call>{"name": "f", "arguments": {"a": "<"}}</tool_call>'


@pytest.fixture
def roomy(make_app: Callable[..., Flask], context: ServerContext, fake_client: FakeClient) -> Flask:
    """Return an application with room for what the model is told of tools, whose answers come to their own end."""
    fake_client.end = finished(FinishReason.STOP)
    return make_app({"limits": dataclasses.replace(context.limits, context_tokens=2048)})


def test_a_response_holds_its_text_and_its_calls_and_repeats_the_tools(roomy: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [CALL]
    body = post(roomy, tools=[TOOL]).get_json()
    message, call = body["output"]
    assert message["content"][0]["text"] == "Yes. "
    assert (call["type"], call["name"], call["arguments"], call["status"]) == (
        "function_call",
        "f",
        '{"a": "<"}',
        "completed",
    )
    assert (body["status"], body["tools"], body["tool_choice"]) == ("completed", [TOOL], "auto")
    prompt = bytes(one for one in fake_client.last.token_ids if one < 256)
    assert b'{"name": "f", "description": "Does.", "parameters": {"type": "object"}}' in prompt


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_required_call_is_forced_by_its_form(roomy: Flask, fake_client: FakeClient, choice: Any) -> None:
    fake_client.pieces = [b'{"name": "f", "arguments": {}}']
    body = post(roomy, tools=[TOOL], tool_choice=choice).get_json()
    assert [item["type"] for item in body["output"]] == ["function_call"]
    assert body["tool_choice"] == choice
    grammar = fake_client.last.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA


def test_no_tools_are_told_where_none_may_be_called(roomy: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [CALL]
    body = post(roomy, tools=[TOOL], tool_choice="none").get_json()
    assert [item["type"] for item in body["output"]] == ["message"]
    assert b"tool" not in bytes(one for one in fake_client.last.token_ids if one < 256)


@pytest.mark.parametrize(("members", "stops"), [({}, []), ({"parallel_tool_calls": False}, [b"</tool_call>"])])
def test_an_answer_ends_after_its_first_call_where_several_are_not_wanted(roomy, fake_client, members, stops) -> None:
    post(roomy, tools=[TOOL], **members)
    assert fake_client.last.stop_sequences == stops


def test_a_call_and_its_result_go_back_as_they_came(roomy: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [CALL]
    output = post(roomy, tools=[TOOL]).get_json()["output"]
    result = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "18"}
    post(roomy, input=[{"role": "user", "content": "hi"}, *output, result])
    written = CALL.decode().replace("Yes. ", "Yes. \n")
    assert fake_client.last.token_ids == [
        *turn("user", "hi"),
        *turn("assistant", written),
        *turn("user", "<tool_response>\n18\n</tool_response>"),
        START,
        *b"assistant\n",
    ]


def test_a_format_is_the_form_of_the_answer_and_is_repeated(roomy: Flask, fake_client: FakeClient) -> None:
    form = {"type": "json_schema", "name": "n", "description": None, "schema": {"const": None}, "strict": True}
    assert post(roomy, text={"format": form}).get_json()["text"] == {"format": form}
    grammar = fake_client.last.grammar
    assert grammar is not None and (grammar.text, grammar.field) == ('{"const": null}', "text.format.schema")
    assert post(roomy, text={"format": {"type": "json_object"}}).get_json()["text"] == {
        "format": {"type": "json_object"}
    }


def test_a_forced_call_and_a_form_cannot_both_be(roomy: Flask, fake_client: FakeClient) -> None:
    form = {"format": {"type": "json_object"}}
    status, error = fault(post(roomy, tools=[TOOL], tool_choice="required", text=form))
    assert (status, error["param"]) == (400, "text.format")
    assert fake_client.submits == []
