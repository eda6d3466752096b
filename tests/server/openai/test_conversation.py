"""How messages, calls and results become turns that the model reads."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.chat_template import ChatMessage
from inference_api.server.openai.bodies import Message
from inference_api.server.openai.conversation import turns

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = {"role": "user", "content": "hello"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "42"}


def arguing(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": arguments}}


def messages(*given: dict[str, Any]) -> list[Message]:
    return [Message.model_validate(one) for one in given]


def test_calls_and_results_are_shown_as_they_are_written() -> None:
    assert turns(messages(USER, CALLING, RESULT)) == [
        ChatMessage("user", "hello"),
        ChatMessage("assistant", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        ChatMessage("user", "<tool_response>\n42\n</tool_response>"),
    ]
    said = turns(messages(USER, {**CALLING, "content": "Let me see."}))[1].content
    assert said.startswith("Let me see.\n<tool_call>")


def test_instructions_go_before_what_the_system_says() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert turns(messages(system, USER), "Tools.")[0] == ChatMessage("system", "Tools.\n\nBe brief.")
    assert turns(messages(USER), "Tools.")[0] == ChatMessage("system", "Tools.")
    assert turns(messages(USER)) == [ChatMessage("user", "hello")]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([USER, {"role": "tool", "content": "42"}], "messages[1].tool_call_id"),
        ([USER, RESULT], "messages[1].tool_call_id"),
        ([USER, CALLING, {**RESULT, "tool_call_id": "call_2"}], "messages[2].tool_call_id"),
        ([USER, CALLING, RESULT, RESULT], "messages[3].tool_call_id"),
        ([USER, {**CALLING, "tool_calls": [CALL, CALL]}], "messages[1].tool_calls[1].id"),
        ([USER, CALLING, RESULT, CALLING], "messages[3].tool_calls[0].id"),
        *(
            ([USER, {**CALLING, "tool_calls": [arguing(text)]}], "messages[1].tool_calls[0].function.arguments")
            for text in ("", "no", "[]", "5", '{"a": ', '{"a":' * 5000)
        ),
        ([{**USER, "tool_call_id": "call_1"}], "messages[0].tool_call_id"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_path(given: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        turns(messages(*given))
    assert caught.value.param == param and param in str(caught.value)
