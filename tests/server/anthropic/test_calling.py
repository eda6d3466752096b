"""How a body asks for calls of its tools, and how the calls are told, over the routes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.messages import FinishReason, GrammarKind
from tests.server.anthropic.named_events import read_events
from tests.server.fakes import FakeClient, finished

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "f", "description": "does f", "input_schema": CITY}, {"name": "g", "input_schema": {}}]
BODY = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
CALL = b'<tool_call>{"name": "f", "arguments": {"city": "Aix"}}</tool_call>'


@pytest.fixture
def post(make_app: Callable[..., Flask], context, fake_client: FakeClient) -> Callable[..., Any]:
    app = make_app({"limits": dataclasses.replace(context.limits, context_tokens=2048)})
    fake_client.end = finished(FinishReason.STOP)
    return lambda path="/v1/messages", **body: app.test_client().post(
        path, json={**BODY, **({"max_tokens": 8} if path == "/v1/messages" else {}), **body}
    )


def prompt(client: FakeClient) -> bytes:
    return bytes(token_id for token_id in client.last.token_ids if token_id < 256)


def test_a_call_is_a_block_after_the_text(post, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"Yes.", CALL]
    body = post().get_json()
    text, call = body["content"]
    assert (text, body["stop_reason"]) == ({"type": "text", "text": "Yes."}, "tool_use")
    assert call.pop("id").startswith("toolu_")
    assert call == {"type": "tool_use", "name": "f", "input": {"city": "Aix"}}
    names = [name for name, _ in read_events(post(stream=True).data)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert list(dict.fromkeys(names)) == ["message_start", *block, "message_delta", "message_stop"]
    assert (names.count("content_block_start"), names.count("content_block_stop")) == (2, 2)


@pytest.mark.parametrize(
    ("choice", "names"), [({"type": "any"}, ["f", "g"]), ({"type": "tool", "name": "f"}, ["f"])], ids=["any", "tool"]
)
def test_a_call_that_must_be_made_is_forced_by_its_form(post, fake_client: FakeClient, choice, names) -> None:
    fake_client.pieces = [b'{"name": "f", "arguments": {"city": "Aix"}}']
    body = post(tool_choice={**choice, "disable_parallel_tool_use": True}).get_json()
    (call,) = body["content"]
    assert (call["type"], call["input"], body["stop_reason"]) == ("tool_use", {"city": "Aix"}, "tool_use")
    grammar = fake_client.last.grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    assert [one["properties"]["name"]["const"] for one in schema.get("anyOf", [schema])] == names
    assert fake_client.last.stop_sequences == []


@pytest.mark.parametrize(
    "schema", [{"$defs": 5}, {"properties": {"a": {"$ref": "#"}}}], ids=["definitions", "reference"]
)
def test_a_schema_of_which_no_form_can_be_made_is_refused_by_its_place(post, schema: dict[str, Any]) -> None:
    answer = post(tools=[TOOLS[0], {"name": "g", "input_schema": schema}], tool_choice={"type": "any"})
    assert answer.status_code == 400
    assert answer.get_json()["error"]["message"].startswith("tools[1].input_schema")


def test_what_the_body_says_of_tools_reaches_the_prompt_or_does_not(post, fake_client: FakeClient) -> None:
    post(system="Be brief.")
    assert b'{"name": "f", "description": "does f", "parameters": {"type": "object"' in prompt(fake_client)
    assert prompt(fake_client).index(b"tool_call") < prompt(fake_client).index(b"Be brief.")
    for without in ({"tool_choice": {"type": "none"}}, {"tools": []}, {"tools": None}):
        fake_client.pieces = [CALL]
        body = post(**without).get_json()
        assert b"tool" not in prompt(fake_client) and fake_client.last.grammar is None
        assert (body["content"], body["stop_reason"]) == ([{"type": "text", "text": CALL.decode()}], "end_turn")


def test_a_single_call_ends_the_answer_where_several_are_not_wanted(post, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [CALL + CALL], finished(FinishReason.STOP)
    assert len(post().get_json()["content"]) == 2
    fake_client.end = finished(FinishReason.STOP, stop=b"</tool_call>")
    body = post(tool_choice={"type": "auto", "disable_parallel_tool_use": True}).get_json()
    assert fake_client.last.stop_sequences == [b"</tool_call>"]
    assert [block["input"] for block in body["content"]] == [{"city": "Aix"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)


def test_a_stop_of_the_callers_own_is_told_even_if_it_ends_a_call(post, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [CALL], finished(FinishReason.STOP, stop=b"</tool_call>")
    body = post(
        stop_sequences=["</tool_call>"], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    ).get_json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "</tool_call>")


def test_a_count_counts_the_tools_calls_and_results(post, fake_client: FakeClient) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Aix"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}
    turns = [*BODY["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    found = []
    for members in ({}, {"messages": turns}, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "none"}}):
        counted = post("/v1/messages/count_tokens", **members).get_json()["input_tokens"]
        assert counted == post(**members).get_json()["usage"]["input_tokens"] == fake_client.last.num_prompt_tokens
        found.append(counted)
    assert found[1] > found[0] != found[2] > found[3]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name: 'f' is given twice."),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice: needs tools."),
        ({"tool_choice": {"type": "tool", "name": "h"}}, "tool_choice: 'h' is none of the tools: f, g."),
        ({"tool_choice": {"type": "tool"}}, "Missing required parameter: tool_choice.name."),
        (
            {"tool_choice": {"type": "any", "name": "f"}},
            "tool_choice.name: is allowed only when type is tool; it is any.",
        ),
    ],
)
def test_a_choice_that_cannot_be_followed_is_refused_by_name(post, fake_client: FakeClient, path, body, told) -> None:
    response = post(path, **body)
    assert (response.status_code, response.get_json()["error"]["message"]) == (400, told)
    assert fake_client.submits == []
