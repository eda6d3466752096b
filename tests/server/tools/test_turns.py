"""Check how calls, results and what is told of functions are written as turns."""

from __future__ import annotations

import pytest

from inference_api.server.chat_template import ChatMessage
from inference_api.server.tools.turns import calling_turn, result_turn, told_first

USER = ChatMessage("user", "hi")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("a", [], "a"),
        ("", [("f", "{}")], '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("a", [("f", "{}")], 'a\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)
def test_a_turn_says_its_text_then_its_calls(text: str, calls: list[tuple[str, str]], content: str) -> None:
    assert calling_turn("assistant", text, calls) == ChatMessage("assistant", content)


def test_a_result_is_a_users_turn() -> None:
    assert result_turn("x") == ChatMessage("user", "<tool_response>\nx\n</tool_response>")


def test_what_is_told_first_joins_the_system_turn_or_is_one() -> None:
    assert told_first([USER], "") == [USER]
    assert told_first([USER], "told") == [ChatMessage("system", "told"), USER]
    assert told_first([ChatMessage("system", "be"), USER], "told") == [ChatMessage("system", "told\n\nbe"), USER]
