"""Turn the input of a response, calls and results among it, into turns that the model's template renders.

Runs in PROCESS 1. How calls and results stand in a turn is tools/turns.py's. Pure; knows no Flask.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_api.server.chat_template import ChatMessage
from inference_api.server.openai_responses.bodies import CallMade, CallResult, InputItem, InputMessage, ResponsesBody
from inference_api.server.tools.history import CallHistory, check_arguments
from inference_api.server.tools.turns import calling_turn, result_turn, told_first


def turns(body: ResponsesBody, told: str = "") -> list[ChatMessage]:
    """Return the conversation: `told` of the functions, the body's instructions, its input.

    Raises InvalidRequestError for a result that answers no call, and for calls that none could have made.
    """
    system = [ChatMessage("system", body.instructions)] if body.instructions is not None else []
    if isinstance(body.input, str):
        return told_first([*system, ChatMessage("user", body.input)], told)
    _check_calls(body.input)
    return told_first([*system, *_turns(body.input)], told)


def _turns(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the turns of the items; calls stand in one turn with the assistant's message before them."""
    found: list[ChatMessage] = []
    before: InputItem | None = None
    for item in items:
        if isinstance(item, CallResult):
            found.append(result_turn(item.text))
        elif not isinstance(item, CallMade):
            found.append(ChatMessage(item.role, item.text))
        else:
            goes_on = isinstance(before, CallMade) or _is_assistants(before)
            text = found.pop().content if goes_on else ""
            found.append(calling_turn("assistant", text, [(item.name, item.arguments)]))
        before = item
    return found


def _is_assistants(item: InputItem | None) -> bool:
    return isinstance(item, InputMessage) and item.role == "assistant"


def _check_calls(items: Sequence[InputItem]) -> None:
    history = CallHistory()
    for place, item in enumerate(items):
        if isinstance(item, CallMade):
            history.called(item.call_id, f"input[{place}].call_id")
            check_arguments(item.arguments, f"input[{place}].arguments")
        elif isinstance(item, CallResult):
            history.answered(item.call_id, f"input[{place}].call_id")
