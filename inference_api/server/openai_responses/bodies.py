"""Own the JSON body of `POST /v1/responses`: every member, its type and its bounds, as pydantic models.

Runs in PROCESS 1; the OpenAPI document is generated from it. A member is honoured, refused by its name, or one of the
few that cannot change an answer. What needs memory of earlier calls, or reasoning, is refused: there is none here.
Pure: knows no Flask and no tokenizer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from inference_api.server.bodies import (
    DEADLINE_WORDS,
    MAX_COUNT,
    MAX_TOP_LOGPROBS,
    PRIORITY_WORDS,
    Deadline,
    FormName,
    Metadata,
    Priority,
    Schema,
    StrictModel,
)
from inference_api.server.openai.bodies import MAX_MESSAGES
from inference_api.server.tools.definitions import MAX_TOOLS, FunctionDefinition, NamedFunction

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that asks for logprobs."""

CallId = Annotated[str, Field(min_length=1, max_length=128)]
# Lists without a bound of their own are refused by their first fault: bodies.py says why.
Includes = Annotated[
    list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], Field(fail_fast=True)
]


def _refused(reason: str) -> BeforeValidator:
    """Return a validator that refuses everything but null, false and empty, and says why."""

    def check(value: Any) -> Any:
        if value:
            raise PydanticCustomError("refused", reason)
        return value

    return BeforeValidator(check)


_NO_MEMORY = _refused("is not served, because nothing is stored: send the earlier messages as input")
_NO_BACKGROUND = _refused("is not served, because nothing is stored: read the answer as a stream")
_NO_PROMPTS = _refused("is not served, because no prompts are stored: send the text as instructions or input")


class TextPart(StrictModel):
    """A part of a message: text that a caller wrote, or that an earlier response answered."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description="As answered; no effect.")
    logprobs: list[Any] | None = Field(None, description="As answered; no effect.")


TextParts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


def _joined(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class InputMessage(StrictModel):
    """One turn of a conversation; an item of an earlier response's `output` is one too."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | TextParts
    id: str | None = Field(None, description="As answered; no effect.")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description="No effect.")
    phase: Literal["commentary", "final_answer"] | None = Field(None, description="No effect.")

    @property
    def text(self) -> str:
        """The content; parts stand on lines of their own."""
        return _joined(self.content)


class CallMade(StrictModel):
    """A call that an earlier response made; the item of its `output` is one."""

    type: Literal["function_call"]
    call_id: CallId
    name: str = Field(min_length=1, max_length=64)
    arguments: str
    id: str | None = Field(None, description="As answered; no effect.")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description="No effect.")


class CallResult(StrictModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | TextParts
    id: str | None = Field(None, description="No effect.")
    status: Literal["in_progress", "completed", "incomplete"] | None = Field(None, description="No effect.")

    @property
    def text(self) -> str:
        """The output; parts stand on lines of their own."""
        return _joined(self.output)


ITEM_KINDS = ("message", "function_call", "function_call_output")


def _kind(item: Any) -> str | None:
    """Return what an item is; one without a type is a message."""
    kind = item.get("type") if isinstance(item, dict) else None
    kind = "message" if kind is None else kind
    return kind if kind in ITEM_KINDS else None


InputItem = InputMessage | CallMade | CallResult
TaggedItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[CallMade, Tag("function_call")]
    | Annotated[CallResult, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="item_kind",
        custom_error_message="type should be 'message', 'function_call' or 'function_call_output'",
    ),
]
"""An item, of which only what its type may have is told at a fault."""


class TextFormat(StrictModel):
    """The form of the answer; which members beside `type` there may be depends on it, and is checked with it."""

    type: Literal["text", "json_object", "json_schema"]
    name: FormName | None = None
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="The answer keeps to the schema, strict or not.")


class FunctionKind(StrictModel):
    """What a tool is: a function, the only kind there is."""

    type: Literal["function"]


class FunctionTool(FunctionDefinition, FunctionKind):
    """A function that the model may call."""


class ChosenFunction(NamedFunction, FunctionKind):
    """One of the tools, by its name."""


class TextOptions(StrictModel):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(None, description="The model knows one.")


class ReasoningOptions(StrictModel):
    """How the model is to reason: not at all, so that there is nothing to sum up."""

    effort: Literal["none"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="No effect.")


class ResponseStreamOptions(StrictModel):
    """What a stream holds beside its text."""

    include_obfuscation: Annotated[bool | None, _refused("is not served")] = None


class ResponsesBody(StrictModel):
    """The body of `POST /v1/responses`. A member that is null is absent."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (
        *("store", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("max_tool_calls", "metadata"),
    )
    """Members that are accepted and cannot change an answer."""

    model: str = Field(description="One of the served models' names.")
    input: str | Annotated[list[TaggedItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Ends the answer after so many tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keeps the likeliest tokens that add up to this.")
    include: Includes | None = Field(
        None, description="Reports the chosen tokens' logprobs; reasoning there is none of."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="And so many likeliest ones'.")
    stream: bool | None = Field(None, description="Sends server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Accepted; nothing is stored, and the answer says so.")
    metadata: Metadata | None = Field(None, description="Repeated in the answer.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = Field(None, description="What does not fit is refused, never cropped.")
    parallel_tool_calls: bool | None = Field(None, description="Whether it may make several calls; default true.")
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_COUNT)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = Field(
        None, description="Whether the model may call, or must, and which one."
    )
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS, description="Functions that it may call.")
    background: Annotated[bool | None, _NO_BACKGROUND] = None
    previous_response_id: Annotated[None, _NO_MEMORY] = None
    conversation: Annotated[None, _NO_MEMORY] = None
    prompt: Annotated[None, _NO_PROMPTS] = None
    priority: Priority | None = Field(None, description=PRIORITY_WORDS)
    deadline: Deadline | None = Field(None, description=DEADLINE_WORDS)
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer reports logprobs."""
        return LOGPROBS in (self.include or ())
