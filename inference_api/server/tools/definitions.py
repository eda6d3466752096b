"""Own what a caller says of the functions that the model may call, and how it is told to the model; pure.

The model reads it as a caller's text: nothing in it becomes a control id. Knows OpenAI's shape of a definition, which
the other APIs have too, and no routes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.server.bodies import StrictModel
from inference_api.server.tools.formats import HERMES
from inference_api.server.tools.schemas import check_arguments_schema, hoisted

MAX_TOOLS = 128
"""OpenAI's bound, API reference of chat completions, `tools`."""

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class FunctionDefinition(StrictModel):
    """A function: what it is called and for, and the JSON schema of its arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool: a function, the only kind there is."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(StrictModel):
    """The name of one of the functions."""

    name: FunctionName


class NamedTool(StrictModel):
    """One of the tools, by its name."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def functions_of(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> list[FunctionDefinition]:
    """Return the functions that the model may call now.

    Raises InvalidRequestError for a name that is given twice, one that no tool has, a choice without tools, and
    parameters that are no schema of an object, or of which no form of a forced call can be made.
    """
    wanted = choice.function if isinstance(choice, NamedTool) else choice
    functions = [tool.function for tool in tools or ()]
    return callable_now(functions, wanted, "function.name", "function.parameters")


def callable_now(
    functions: Sequence[FunctionDefinition],
    choice: Literal["none", "auto", "required"] | NamedFunction | None,
    name_member: str,
    schema_member: str = "parameters",
) -> list[FunctionDefinition]:
    """Return those of the functions that the choice allows.

    Each one's name stands in its tool's `name_member`, its schema in `schema_member`. Raises InvalidRequestError as
    `functions_of` does.
    """
    names = [function.name for function in functions]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidRequestError(f"tools[{place}].{name_member}: {name!r} is given twice.", "tools")
    for place, function in enumerate(functions):
        check_arguments_schema(function.parameters or {}, f"tools[{place}].{schema_member}")
    if choice == "none":
        return []
    if choice not in (None, "auto") and not functions:
        raise InvalidRequestError("tool_choice: needs tools.", "tool_choice")
    wanted = choice.name if isinstance(choice, NamedFunction) else None
    found = {place: function for place, function in enumerate(functions) if wanted in (None, function.name)}
    if isinstance(choice, NamedFunction) and not found:
        raise InvalidRequestError(
            f"tool_choice: {choice.name!r} is none of the tools: {', '.join(names)}.", "tool_choice"
        )
    if choice not in (None, "auto"):
        # Tried here, where their places are known, for faults that the form of a forced call would have.
        for place, function in found.items():
            hoisted(function.parameters or {}, "", f"tools[{place}].{schema_member}")
    return list(found.values())


def instructions(functions: Sequence[FunctionDefinition], *, is_forced: bool) -> str:
    """Return the text that tells the model of the functions and how to call them."""
    lines = ["You may call these functions, each described by a JSON schema:"]
    for function in functions:
        told = {"name": function.name, "description": function.description, "parameters": _schema(function)}
        lines.append(json.dumps({name: value for name, value in told.items() if value is not None}))
    call = '{"name": "the function\'s name", "arguments": {"an argument": "its value"}}'
    if is_forced:
        lines.append(f"Answer with one call and nothing else: {call}")
    else:
        lines.append(f"To call one, write {HERMES.begin}{call}{HERMES.end}. Otherwise answer in words.")
    return "\n".join(lines)


def written_call(name: str, arguments: str) -> str:
    """Return an earlier call as the model would have written it; `arguments` is JSON."""
    return f'{HERMES.begin}{{"name": {json.dumps(name)}, "arguments": {arguments}}}{HERMES.end}'


def written_result(text: str) -> str:
    """Return a function's result as it is shown to the model."""
    # What is inside cannot close the frame. The escape is JSON's own of a slash, as pages with JSON in a script use it:
    # where it stands in a string of JSON, the string says the same as before.
    framed = text.replace("</tool_response>", "<\\/tool_response>")
    return f"<tool_response>\n{framed}\n</tool_response>"


def forced_call(functions: Sequence[FunctionDefinition]) -> Grammar:
    """Return the form of an answer that is a call of one of the functions, and nothing else.

    Raises InvalidRequestError as `functions_of` does.
    """
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for place, function in enumerate(functions):
        # Of their own, or two functions with definitions of one name would share one.
        arguments, moved = hoisted(_schema(function), f"f{place}.", "tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
        for keyword, named in moved.items():
            definitions.setdefault(keyword, {}).update(named)
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **definitions}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "tools")


def _schema(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of the arguments, which are an object even where nothing is said of them."""
    return {"type": "object", **(function.parameters or {})}
