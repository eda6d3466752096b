"""Turn the messages of a Messages body, calls and results among them, into turns that the model's template renders.

Runs in PROCESS 1. Says which messages a block may stand in; how calls are shown to a model is the tools' own matter.
Pure; knows no Flask.
"""

from __future__ import annotations

import json

from inference_api.errors import InvalidRequestError
from inference_api.server.anthropic.bodies import (
    Block,
    ConversationBody,
    TextContent,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from inference_api.server.chat_template import ChatMessage
from inference_api.server.tools.definitions import written_call, written_result
from inference_api.server.tools.history import CallHistory
from inference_api.server.tools.turns import told_first


def turns(body: ConversationBody, instructions: str = "") -> list[ChatMessage]:
    """Return the turns, `instructions` and the system text first; neighbours of one role are one, as Anthropic's are.

    Raises InvalidRequestError if the last one is the assistant's, which a template closes, so that nothing could go on;
    for a call whose id an earlier one has; for a result that answers no call, or one that has a result; and for a block
    where it may not stand.
    """
    last = len(body.messages) - 1
    if body.messages[last].role == "assistant":
        raise InvalidRequestError(
            f"messages[{last}].role: the last message is the assistant's, whose text the answer would go on with"
            " (prefill); this is not served here. The conversation must end with a user message.",
            f"messages[{last}].role",
        )
    _check_calls(body.messages)
    found = [] if body.system is None else [ChatMessage("system", _text_of(body.system))]
    for turn in body.messages:
        text = turn.content if isinstance(turn.content, str) else "\n".join(_shown(block) for block in turn.content)
        if found and found[-1].role == turn.role:
            found[-1] = ChatMessage(turn.role, f"{found[-1].content}\n{text}")
        else:
            found.append(ChatMessage(turn.role, text))
    return told_first(found, instructions)


def _text_of(content: TextContent) -> str:
    """Return a content's text; blocks stand on lines of their own."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _shown(block: Block) -> str:
    match block:
        case ToolUseBlock():
            # As a model writes it: its own letters, not escapes of them.
            return written_call(block.name, json.dumps(block.input, ensure_ascii=False))
        case ToolResultBlock():
            text = _text_of(block.content or "")
            return written_result(f"Error: {text}" if block.is_error else text)
        case _:
            return block.text


def _check_calls(messages: list[Turn]) -> None:
    history = CallHistory()
    for place, turn in enumerate(messages):
        for index, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            name = f"messages[{place}].content[{index}]"
            if isinstance(block, ToolUseBlock):
                _check_role(turn, "assistant", block.type, name)
                history.called(block.id, f"{name}.id")
            elif isinstance(block, ToolResultBlock):
                _check_role(turn, "user", block.type, name)
                history.answered(block.tool_use_id, f"{name}.tool_use_id", "tool_use block")


def _check_role(turn: Turn, role: str, kind: str, name: str) -> None:
    if turn.role != role:
        message = f"{name}: {kind} is allowed only when role is {role}; it is {turn.role}."
        raise InvalidRequestError(message, name)
