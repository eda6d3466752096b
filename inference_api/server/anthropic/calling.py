"""Turn the tools of a Messages body, and the choice among them, into what is asked of the model and read of its answer.

Runs in PROCESS 1. Anthropic's names for what `server/tools/` knows under OpenAI's. Pure; knows no Flask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from inference_api.errors import InvalidRequestError
from inference_api.server.anthropic.answers import AnswerReader
from inference_api.server.anthropic.bodies import ConversationBody, ToolChoice
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.tools.call_parser import CallParser
from inference_api.server.tools.calling import made_to_call
from inference_api.server.tools.definitions import FunctionDefinition, NamedFunction, callable_now, instructions
from inference_api.server.tools.formats import HERMES, CallFormat


@dataclasses.dataclass(frozen=True, slots=True)
class Calling:
    """Which functions may be called, whether one must be, and whether no more than one may."""

    functions: Sequence[FunctionDefinition]
    must_call: bool
    one_call: bool

    @property
    def instructions(self) -> str:
        """What the model is told of it; empty without functions."""
        return instructions(self.functions, is_forced=self.must_call) if self.functions else ""

    def applied_to(
        self, generation: GenerationRequest, formats: Sequence[CallFormat]
    ) -> tuple[GenerationRequest, AnswerReader]:
        """Return the request, and what reads its answer, of a model that writes its calls in `formats`."""
        if not self.functions:
            return generation, AnswerReader()
        asked, formats = made_to_call(
            generation, self.functions, formats, must_call=self.must_call, one_call=self.one_call
        )
        # A stop that the caller did not send is none to be told of.
        own_end = HERMES.end if HERMES.end not in generation.stop_sequences else None
        return asked, AnswerReader(CallParser(formats), own_end)


def calling_of(body: ConversationBody) -> Calling:
    """Return what the body asks for; raises InvalidRequestError for a choice that cannot be followed."""
    choice = body.tool_choice or ToolChoice.model_validate({"type": "auto"})
    tools = [
        FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema)
        for tool in body.tools or ()
    ]
    functions = callable_now(tools, _wanted(choice), "name", "input_schema")
    return Calling(functions, choice.type in ("any", "tool"), bool(choice.disable_parallel_tool_use))


def _wanted(choice: ToolChoice) -> Literal["none", "auto", "required"] | NamedFunction:
    if choice.type != "tool":
        if choice.name is not None:
            message = f"tool_choice.name: is allowed only when type is tool; it is {choice.type}."
            raise InvalidRequestError(message, "tool_choice.name")
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise InvalidRequestError("Missing required parameter: tool_choice.name.", "tool_choice.name")
    return NamedFunction(name=choice.name)
