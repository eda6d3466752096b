"""Write what was said, called and answered before as turns that the model's template renders; PROCESS 1, pure.

Templates differ in whether they know of tools at all, so calls and results are text in them, in the one format that
every conversation with tools uses. Knows no API's words for any of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference_api.server.chat_template import ChatMessage
from inference_api.server.tools.definitions import written_call, written_result


def calling_turn(role: str, text: str, calls: Iterable[tuple[str, str]]) -> ChatMessage:
    """Return a turn that says a text, if there is one, and makes calls, each a name and its arguments as JSON."""
    written = [written_call(name, arguments) for name, arguments in calls]
    return ChatMessage(role, "\n".join([*([text] if text else []), *written]))


def result_turn(text: str) -> ChatMessage:
    """Return a turn with a function's result."""
    # As a user's turn: not every template knows another, and those that do show it so.
    return ChatMessage("user", written_result(text))


def told_first(turns: Sequence[ChatMessage], instructions: str) -> list[ChatMessage]:
    """Return the turns with `instructions` before what the system says, in a turn of their own if it says nothing."""
    if not instructions:
        return list(turns)
    if turns[0].role == "system":
        return [ChatMessage("system", f"{instructions}\n\n{turns[0].content}"), *turns[1:]]
    return [ChatMessage("system", instructions), *turns]
