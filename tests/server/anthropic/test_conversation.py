"""How messages of blocks, calls and results among them, become turns that the model reads."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.anthropic.bodies import ConversationBody
from inference_api.server.anthropic.conversation import turns
from inference_api.server.chat_template import ChatMessage

TURN = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "\u00e9"}}
CALLING = {"role": "assistant", "content": [CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}


def body(messages: list[dict[str, Any]], **members: Any) -> ConversationBody:
    return ConversationBody.model_validate({"model": "m", "messages": messages, **members})


def test_a_system_text_goes_first_and_may_stand_between_turns() -> None:
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [TURN, {"role": "system", "content": "c"}, TURN]
    assert turns(body(given, system=system)) == [
        ChatMessage("system", "a\nb"),
        ChatMessage("user", "hi"),
        ChatMessage("system", "c"),
        ChatMessage("user", "hi"),
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    given = [
        {"role": "system", "content": "b"},
        TURN,
        {"role": "user", "content": [{"type": "text", "text": "you"}]},
        {"role": "assistant", "content": ""},
        TURN,
    ]
    assert turns(body(given, system="a")) == [
        ChatMessage("system", "a\nb"),
        ChatMessage("user", "hi\nyou"),
        ChatMessage("assistant", ""),
        ChatMessage("user", "hi"),
    ]


def test_a_beginning_of_the_answer_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        turns(body([TURN, {"role": "assistant", "content": "The best answer is ("}]))
    assert caught.value.param == "messages[1].role"
    assert str(caught.value).startswith("messages[1].role: the last message is the assistant's")
    assert "prefill" in str(caught.value)


def test_calls_and_results_are_shown_as_they_are_written() -> None:
    text = {"type": "text", "text": "Let me see."}
    blocks = [
        RESULT,
        {**RESULT, "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "no"}], "is_error": True},
        {**text, "text": "So?"},
    ]
    calls = [CALL, {**CALL, "id": "toolu_2", "input": {}}]
    given = [TURN, {"role": "assistant", "content": [text, *calls]}, {"role": "user", "content": blocks}]
    assert turns(body(given)) == [
        ChatMessage("user", "hi"),
        ChatMessage(
            "assistant",
            'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": "\u00e9"}}</tool_call>'
            '\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
        ChatMessage(
            "user",
            "<tool_response>\n42\n</tool_response>\n<tool_response>\nError: no\n</tool_response>\nSo?",
        ),
    ]


def test_a_result_may_say_nothing() -> None:
    silent = {"type": "tool_result", "tool_use_id": "toolu_1"}
    given = [TURN, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [silent]}]
    assert turns(body(given))[-1] == ChatMessage("user", "<tool_response>\n\n</tool_response>")


def test_instructions_go_before_what_the_system_says() -> None:
    assert turns(body([TURN], system="Be brief."), "Tools.")[0] == ChatMessage("system", "Tools.\n\nBe brief.")
    assert turns(body([TURN]), "Tools.") == [ChatMessage("system", "Tools."), ChatMessage("user", "hi")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([{"role": "user", "content": [RESULT]}], "messages[0].content[0].tool_use_id: no tool_use block before it"),
        (
            [CALLING, {"role": "user", "content": [RESULT, {**RESULT, "tool_use_id": "toolu_2"}]}],
            "messages[1].content[1].tool_use_id: no tool_use block before it has this id.",
        ),
        (
            [CALLING, {"role": "user", "content": [RESULT, RESULT]}],
            "messages[1].content[1].tool_use_id: a result before it answers the tool_use block with this id.",
        ),
        (
            [CALLING, {"role": "user", "content": [RESULT]}, CALLING, TURN],
            "messages[2].content[0].id: a call before it has this id.",
        ),
        (
            [{"role": "user", "content": [CALL]}],
            "messages[0].content[0]: tool_use is allowed only when role is assistant; it is user.",
        ),
        (
            [CALLING, {"role": "assistant", "content": [RESULT]}, TURN],
            "messages[1].content[0]: tool_result is allowed only when role is user; it is assistant.",
        ),
        (
            [CALLING, {"role": "system", "content": [RESULT]}, TURN],
            "messages[1].content[0]: tool_result is allowed only when role is user; it is system.",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_path(given: list[dict[str, Any]], told: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        turns(body(given))
    assert str(caught.value).startswith(told)
    assert caught.value.param is not None and str(caught.value).startswith(caught.value.param)
