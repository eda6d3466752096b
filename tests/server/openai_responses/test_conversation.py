"""Check which conversation an input means: its turns, the calls and results in them, and what is told first."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.chat_template import ChatMessage
from inference_api.server.openai_responses.bodies import ResponsesBody
from inference_api.server.openai_responses.conversation import turns

CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
SECOND = {
    "type": "function_call",
    "id": "fc_2",
    "status": "completed",
    "call_id": "call_2",
    "name": "g",
    "arguments": "{}",
}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "18 degrees"}
WRITTEN = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
WRITTEN_SECOND = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def parse(**members: Any) -> ResponsesBody:
    return ResponsesBody.model_validate({"model": "mock", "input": "hi", **members})


def test_a_text_is_what_the_user_says() -> None:
    assert turns(parse()) == [ChatMessage("user", "hi")]


def test_instructions_are_a_system_message_before_the_input() -> None:
    assert turns(parse(instructions="be brief")) == [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
    assert turns(parse(instructions=None)) == [ChatMessage("user", "hi")]


def test_messages_may_be_plain_or_items_and_their_content_text_or_parts() -> None:
    answered = {
        "id": "msg_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "two", "annotations": [], "logprobs": []}],
    }
    asked = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    messages = [{"role": "developer", "content": "one"}, answered, {"type": "message", **asked}]
    assert turns(parse(input=messages)) == [
        ChatMessage("developer", "one"),
        ChatMessage("assistant", "two"),
        ChatMessage("user", "a\nb"),
    ]


def test_calls_stand_in_the_turn_of_the_message_before_them_and_results_are_the_users() -> None:
    items = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, CALL, SECOND, RESULT]
    assert turns(parse(input=items)) == [
        ChatMessage("user", "q"),
        ChatMessage("assistant", f"a\n{WRITTEN}\n{WRITTEN_SECOND}"),
        ChatMessage("user", "<tool_response>\n18 degrees\n</tool_response>"),
    ]


def test_a_call_after_another_turn_is_a_turn_of_its_own() -> None:
    items = [{"role": "user", "content": "q"}, CALL, RESULT, SECOND]
    assert [turn.role for turn in turns(parse(input=items))] == ["user", "assistant", "user", "assistant"]
    assert turns(parse(input=items))[1].content == WRITTEN
    assert turns(parse(input=[CALL]))[0] == ChatMessage("assistant", WRITTEN)


def test_a_result_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": text} for text in ("a", "b")]
    found = turns(parse(input=[CALL, {**RESULT, "output": parts}]))
    assert found[-1] == ChatMessage("user", "<tool_response>\na\nb\n</tool_response>")


@pytest.mark.parametrize(("place", "items"), [(0, [RESULT]), (1, [SECOND, RESULT]), (0, [RESULT, CALL])])
def test_a_result_without_its_call_is_refused_by_its_place(place: int, items: list[dict[str, str]]) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"^input\[{place}\]\.call_id: no call before it has this id\.$"
    ) as caught:
        turns(parse(input=items))
    assert caught.value.param == f"input[{place}].call_id"


def test_what_is_told_of_functions_goes_before_the_instructions() -> None:
    assert turns(parse(instructions="be brief"), "tools")[0] == ChatMessage("system", "tools\n\nbe brief")
    assert turns(parse(), "tools") == [ChatMessage("system", "tools"), ChatMessage("user", "hi")]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([CALL, CALL], "input[1].call_id"),
        ([CALL, RESULT, RESULT], "input[2].call_id"),
        ([{**CALL, "arguments": "[1]"}], "input[0].arguments"),
        ([{**CALL, "arguments": "no JSON"}], "input[0].arguments"),
    ],
)
def test_a_history_that_cannot_have_been_is_refused_by_its_place(items: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        turns(parse(input=items))
    assert caught.value.param == param and str(caught.value).startswith(f"{param}: ")
