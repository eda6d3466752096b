"""Own the JSON bodies of the Anthropic routes: every member, its type and its bounds, as pydantic models.

Runs in PROCESS 1; the OpenAPI document is generated from them. A member is honoured, refused by its name, or one of the
few that cannot change an answer. Bounds are those of the Messages API, version 2023-06-01, as anthropic-python 2.12
documents them. Pure: knows no Flask and no tokenizer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from inference_api.server.bodies import EXAMPLE_CONVERSATION, MAX_COUNT, MAX_STOPS, StopText, StrictModel
from inference_api.server.tools.definitions import MAX_TOOLS, FunctionName

MAX_TURNS = 1024
MAX_BLOCKS = 1024


class CacheControl(StrictModel):
    """Where a cached prefix should end. Prefixes are reused by themselves here: accepted, and changes no answer."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """A block of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    # What Anthropic's client adds to an answer's block that is sent back in a turn: null, for there are none here.
    citations: None = None


TextContent = str | Annotated[list[TextBlock], Field(min_length=1, max_length=MAX_BLOCKS)]


class ToolUseBlock(StrictModel):
    """A call that an earlier answer made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=128)
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    # What Anthropic's client adds to an answer's block, as above.
    caller: None = None
    toolset_name: None = None


class ToolResultBlock(StrictModel):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=128)
    content: TextContent | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


def _kind_of(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in ("tool_use", "tool_result") else "text"


# The tags are no names of members, so that a fault's place is that of the members alone.
Block = Annotated[
    Annotated[TextBlock, Tag("block:text")]
    | Annotated[ToolUseBlock, Tag("block:tool_use")]
    | Annotated[ToolResultBlock, Tag("block:tool_result")],
    Discriminator(lambda block: f"block:{_kind_of(block)}"),
]


class Turn(StrictModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(min_length=1, max_length=MAX_BLOCKS)]


class Metadata(StrictModel):
    """Who the caller's own user is."""

    user_id: str | None = Field(None, max_length=512)


class Thinking(StrictModel):
    """Whether the model thinks before it answers; it cannot."""

    type: Literal["disabled"]


class ToolDefinition(StrictModel):
    """A tool of the caller's own: what it is called and for, and the JSON schema of its input."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(None, description="An input is always streamed as it is written.")

    @field_validator("input_schema")
    @classmethod
    def _is_of_an_object(cls, schema: dict[str, Any]) -> dict[str, Any]:
        if schema.get("type", "object") != "object":
            raise PydanticCustomError("input_schema", "Its type should be 'object'")
        return schema


class ToolChoice(StrictModel):
    """Whether the model may call a tool, or must, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="Of the tool that must be called; type is tool.")
    disable_parallel_tool_use: bool | None = Field(None, description="Ends an answer after its first call.")


class ConversationBody(StrictModel):
    """What an answer and a count are asked with: the body of `POST /v1/messages/count_tokens`. Null is absent."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = ("thinking", "cache_control")
    """Members that are accepted with the values that cannot change an answer."""

    model: str = Field(description="One of the served models' names.")
    messages: list[Turn] = Field(
        min_length=1,
        max_length=MAX_TURNS,
        description="The last one is not the assistant's.",
        examples=EXAMPLE_CONVERSATION,
    )
    system: TextContent | None = Field(None, description="Goes before the first message.")
    thinking: Thinking | None = Field(None, description='Only {"type": "disabled"}.')
    tools: list[ToolDefinition] | None = Field(None, max_length=MAX_TOOLS, description="What the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, or must, and which one.")
    cache_control: CacheControl | None = None


class MessagesBody(ConversationBody):
    """The body of `POST /v1/messages`."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (*ConversationBody.NO_EFFECT, "metadata", "service_tier")

    max_tokens: int = Field(
        ge=1, le=MAX_COUNT, description="Ends the answer after so many tokens; must fit the context."
    )
    temperature: float | None = Field(None, ge=0, le=1, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keeps the likeliest tokens that add up to this.")
    top_k: int | None = Field(None, ge=0, le=MAX_COUNT, description="Keeps so many of the likeliest tokens; 0: all.")
    stop_sequences: list[StopText] | None = Field(
        None, max_length=MAX_STOPS, description="Texts before which the answer ends."
    )
    stream: bool | None = Field(None, description="Sends server-sent events.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
