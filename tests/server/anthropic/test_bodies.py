"""Check every member of a Messages body: taken within its bounds, refused by its name beyond them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.anthropic.bodies import ConversationBody, MessagesBody
from inference_api.server.bodies import parse_body

TURN = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "does f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
WHOLE = {"model": "m", "max_tokens": 4, "messages": [TURN]}


def parse(**members: Any) -> MessagesBody:
    """Parse a whole body with some members changed; `...` leaves one out."""
    body = {name: value for name, value in {**WHOLE, **members}.items() if value is not ...}
    return parse_body(MessagesBody, json.dumps(body).encode(), "application/json")


def fault(**members: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        parse(**members)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
def test_a_required_member_is_asked_for_by_name(name: str) -> None:
    assert fault(**{name: ...}) == f"Missing required parameter: {name}."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 1),
        ("temperature", 0.5),
        ("top_p", 1),
        ("top_p", 0.001),
        ("top_k", 0),
        ("top_k", 10**9),
        ("stop_sequences", []),
        ("stop_sequences", ["x" * 64] * 16),
        ("stream", True),
        ("stream", None),
        ("metadata", {"user_id": "u"}),
        ("metadata", {"user_id": None}),
        ("metadata", {}),
        ("thinking", {"type": "disabled"}),
        ("service_tier", "auto"),
        ("service_tier", "standard_only"),
        ("tools", []),
        ("tools", [TOOL]),
        ("tools", [{**TOOL, "type": "custom", "strict": True, "eager_input_streaming": True}]),
        ("tools", [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}] * 128),
        ("tool_choice", {"type": "auto"}),
        ("tool_choice", {"type": "tool", "name": "f"}),
        ("tool_choice", {"type": "none", "disable_parallel_tool_use": True}),
        ("cache_control", {"type": "ephemeral", "ttl": "1h"}),
        ("system", "be brief"),
        ("system", [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]),
    ],
)
def test_a_member_is_taken_within_its_bounds(name: str, value: object) -> None:
    parsed = getattr(parse(**{name: value}), name)
    assert (parsed is None) == (value is None)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_tokens", 0, "max_tokens: Input should be greater than or equal to 1; it is 0."),
        ("max_tokens", "4", 'max_tokens: Input should be a valid integer; it is "4".'),
        ("max_tokens", True, "max_tokens: Input should be a valid integer; it is true."),
        ("temperature", 1.01, "temperature: Input should be less than or equal to 1; it is 1.01."),
        ("temperature", -0.01, "temperature: Input should be greater than or equal to 0; it is -0.01."),
        ("top_p", 0, "top_p: Input should be greater than 0; it is 0."),
        ("top_p", 1.01, "top_p: Input should be less than or equal to 1; it is 1.01."),
        ("top_k", -1, "top_k: Input should be greater than or equal to 0; it is -1."),
        ("top_k", 1.5, "top_k: Input should be a valid integer; it is 1.5."),
        ("stop_sequences", ["x"] * 17, "stop_sequences: List should have at most 16 items"),
        ("stop_sequences", ["a", ""], 'stop_sequences[1]: String should have at least 1 character; it is "".'),
        ("stop_sequences", "x", 'stop_sequences: Input should be a valid array; it is "x".'),
        ("stream", "true", 'stream: Input should be a valid boolean; it is "true".'),
        ("metadata", {"team": "a"}, "Unknown parameter: metadata.team."),
        ("service_tier", "priority", "service_tier: Input should be 'auto' or 'standard_only'; it is \"priority\"."),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking.type: Input should be 'disabled'; it is "),
        ("thinking", {"type": "adaptive"}, "thinking.type: Input should be 'disabled'; it is \"adaptive\"."),
        ("tools", [TOOL, {"name": "f"}], "Missing required parameter: tools[1].input_schema."),
        ("tools", [{"input_schema": {}}], "Missing required parameter: tools[0].name."),
        (
            "tools",
            [{**TOOL, "type": "bash_20250124"}],
            "tools[0].type: Input should be 'custom'; it is \"bash_20250124\".",
        ),
        ("tools", [{**TOOL, "name": "a b"}], "tools[0].name: String should match pattern"),
        ("tools", [{**TOOL, "input_schema": {"type": "string"}}], "tools[0].input_schema: Its type should be 'object'"),
        ("tools", [{**TOOL, "defer_loading": True}], "Unknown parameter: tools[0].defer_loading."),
        ("tools", [TOOL] * 129, "tools: List should have at most 128 items"),
        (
            "tool_choice",
            {"type": "required"},
            "tool_choice.type: Input should be 'auto', 'any', 'tool' or 'none'; it is",
        ),
        ("tool_choice", "any", 'tool_choice: Input should be an object; it is "any".'),
        ("cache_control", {"type": "durable"}, "cache_control.type: Input should be 'ephemeral'; it is \"durable\"."),
        ("mcp_servers", [], "Unknown parameter: mcp_servers."),
        ("n", 2, "Unknown parameter: n."),
        ("messages", [], "messages: List should have at least 1 item"),
        ("messages", [TURN] * 1025, "messages: List should have at most 1024 items"),
        ("messages", [TURN, {"role": "tool", "content": "x"}], "messages[1].role: Input should be 'user', 'assistant'"),
        ("messages", [{**TURN, "name": "x"}], "Unknown parameter: messages[0].name."),
        ("messages", [{"role": "user", "content": []}], "messages[0].content: List should have at least 1 item"),
        ("system", [], "system: List should have at least 1 item"),
        ("system", [{"type": "image", "source": {}}], "system[0].type: Input should be 'text'; it is \"image\"."),
    ],
)
def test_a_member_beyond_its_bounds_is_refused_with_name_value_and_bound(name: str, value: object, told: str) -> None:
    assert fault(**{name: value}).startswith(told)


@pytest.mark.parametrize("kind", ["image", "document", "thinking", "search_result", 1, None])
def test_a_block_of_another_kind_is_refused_with_its_place(kind: object) -> None:
    blocks = [{"type": "text", "text": "look"}, {"type": kind, "id": "a", "content": "b", "source": {"data": "c"}}]
    told = fault(messages=[TURN, {"role": "user", "content": blocks}])
    assert told == f"messages[1].content[1].type: Input should be 'text'; it is {json.dumps(kind)}."


def test_a_block_of_an_answer_is_taken_back_as_the_client_keeps_it() -> None:
    text = {"type": "text", "text": "yes", "citations": None}
    call = {**CALL, "caller": None, "toolset_name": None}
    assert parse(messages=[TURN, {"role": "assistant", "content": [text, call]}, TURN]).model_fields_set
    told = fault(messages=[{"role": "user", "content": [{**text, "citations": [{}]}]}])
    assert told.startswith("messages[0].content[0].citations: Input should be null")


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("x", "messages[0].content[0]: Input should be an object"),
        ({"type": "text"}, "Missing required parameter: messages[0].content[0].text."),
        ({"type": "text", "text": 1}, "messages[0].content[0].text: Input should be a valid string; it is 1."),
        ({**CALL, "input": "{}"}, "messages[0].content[0].input: Input should be an object; it is"),
        ({**CALL, "name": "a b"}, "messages[0].content[0].name: String should match pattern"),
        ({**CALL, "id": ""}, "messages[0].content[0].id: String should have at least 1 character"),
        ({**CALL, "text": "x"}, "Unknown parameter: messages[0].content[0].text."),
        ({"type": "tool_result"}, "Missing required parameter: messages[0].content[0].tool_use_id."),
        ({**RESULT, "is_error": "no"}, "messages[0].content[0].is_error: Input should be a valid boolean; it is"),
        (
            {**RESULT, "content": [{"type": "image", "source": {}}]},
            "messages[0].content[0].content[0].type: Input should be 'text'; it is \"image\".",
        ),
    ],
)
def test_a_fault_in_a_block_is_told_by_its_place(block: object, told: str) -> None:
    assert fault(messages=[{"role": "user", "content": [block]}]).startswith(told)


@pytest.mark.parametrize("name", sorted(MessagesBody.model_fields.keys() - ConversationBody.model_fields.keys()))
def test_a_count_takes_no_member_of_the_answer(name: str) -> None:
    body = {"model": "m", "messages": [TURN], name: 1}
    with pytest.raises(InvalidRequestError, match=rf"Unknown parameter: {name}\."):
        parse_body(ConversationBody, json.dumps(body).encode(), "application/json")


def test_members_without_effect_are_members() -> None:
    assert set(MessagesBody.NO_EFFECT) <= MessagesBody.model_fields.keys()
    assert set(ConversationBody.NO_EFFECT) <= ConversationBody.model_fields.keys()
