"""Turn the messages of a chat body, calls and results among them, into turns that the model's template renders.

Runs in PROCESS 1. How calls and results stand in a turn is tools/turns.py's. Pure; knows no Flask.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_api.errors import InvalidRequestError
from inference_api.server.chat_template import ChatMessage
from inference_api.server.openai.bodies import Message
from inference_api.server.tools.history import CallHistory, check_arguments
from inference_api.server.tools.turns import calling_turn, result_turn, told_first


def turns(messages: Sequence[Message], instructions: str = "") -> list[ChatMessage]:
    """Return the turns; `instructions` go before what the system says, in a message of their own if it says nothing.

    Raises InvalidRequestError for a call where none may stand, whose id an earlier one has, or whose arguments are no
    JSON object; and for a result that answers no call, or one that has a result.
    """
    _check_calls(messages)
    return told_first([_turn(message) for message in messages], instructions)


def _turn(message: Message) -> ChatMessage:
    if message.role == "tool":
        return result_turn(message.text)
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return calling_turn(message.role, message.text, calls)


def _check_calls(messages: Sequence[Message]) -> None:
    history = CallHistory()
    for place, message in enumerate(messages):
        name = f"messages[{place}]"
        if message.role == "tool":
            if message.tool_call_id is None:
                raise InvalidRequestError(f"Missing required parameter: {name}.tool_call_id.", f"{name}.tool_call_id")
            history.answered(message.tool_call_id, f"{name}.tool_call_id")
        elif message.tool_call_id is not None:
            raise InvalidRequestError(
                f"{name}.tool_call_id: is allowed only when role is tool; it is {message.role}.", f"{name}.tool_call_id"
            )
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequestError(
                f"{name}.tool_calls: is allowed only when role is assistant; it is {message.role}.",
                f"{name}.tool_calls",
            )
        if message.content is None and not message.tool_calls:
            raise InvalidRequestError(f"Missing required parameter: {name}.content.", f"{name}.content")
        for index, call in enumerate(message.tool_calls or ()):
            history.called(call.id, f"{name}.tool_calls[{index}].id")
            check_arguments(call.function.arguments, f"{name}.tool_calls[{index}].function.arguments")
