"""Own the JSON bodies of the OpenAI routes: every member, its type and its bounds, as pydantic models.

Runs in PROCESS 1; the OpenAPI document is generated from them. A member is honoured, refused by its name, or one of the
few that cannot change an answer. Pure: knows no Flask and no tokenizer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from inference_api.server.bodies import (
    DEADLINE_WORDS,
    EXAMPLE_CONVERSATION,
    MAX_COUNT,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    PRIORITY_WORDS,
    Deadline,
    Metadata,
    Priority,
    StopText,
    StrictModel,
    TokenId,
    TokenIds,
    refuse_too_many,
)
from inference_api.server.generation_request import MAX_CHOICES
from inference_api.server.openai.sampler_members import SamplerBody
from inference_api.server.tools.definitions import MAX_TOOLS, Tool, ToolChoice
from inference_api.server.validation import MAX_LISTED_IDS, MAX_STOP_IDS

MAX_MESSAGES = 1024
MAX_PARTS = 1024
MAX_NAME_CHARS = 64
MAX_PROMPTS = 32


class StreamOptions(StrictModel):
    """What a stream reports beside its text."""

    include_usage: bool = Field(default=False, description="One more chunk, before the end, with the usage.")
    continuous_usage_stats: bool = Field(default=False, description="The usage so far on every chunk.")


class SamplingBody(SamplerBody):
    """What chat and text completions share. A member that is null is absent."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    )
    """Members that are accepted and cannot change an answer."""

    model: str = Field(description="One of the served models' names.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Ends an answer after so many tokens.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Keeps the likeliest tokens that add up to this.")
    top_k: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="Keeps so many of the likeliest tokens; 0 and -1: all."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Keeps tokens this share as likely as the likeliest.")
    typical_p: float | None = Field(None, gt=0, le=1, description="Keeps the least surprising tokens.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="Taken from tokens that the answer holds.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="Taken as often as the answer holds one.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Of tokens of prompt and answer.")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MAX_LISTED_IDS, description="Added to the logits of token ids."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MAX_LISTED_IDS, description="The only tokens that may be drawn."
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = Field(
        None, description="Texts before which an answer ends."
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_IDS, description="Tokens that end it.")
    min_tokens: int | None = Field(None, ge=0, le=MAX_COUNT, description="So many tokens come before an end.")
    ignore_eos: bool | None = Field(None, description="Goes on over the model's own end.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Makes the draws repeatable.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Reports the prompt's tokens' logprobs, and so many likeliest ones'.",
    )
    stream: bool | None = Field(None, description="Sends server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="What a stream reports beside its text.")
    priority: Priority | None = Field(None, description=PRIORITY_WORDS)
    deadline: Deadline | None = Field(None, description=DEADLINE_WORDS)
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @field_validator("stop")
    @classmethod
    def _as_list(cls, stop: str | list[str] | None) -> list[str]:
        return [stop] if isinstance(stop, str) else list(stop or ())


class TextPart(StrictModel):
    """A part of a message: text, the only kind that the model reads."""

    type: Literal["text"]
    text: str


class FunctionCalled(StrictModel):
    """Which function was called, and its arguments as JSON."""

    name: str = Field(min_length=1, max_length=64)
    arguments: str


class CallMade(StrictModel):
    """A call that an earlier answer made."""

    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"]
    function: FunctionCalled


class Message(StrictModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[list[CallMade], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """Who speaks, or which function answers: taken, and not told to the model, which the turn's place tells enough."""
    # What OpenAI's client adds to an answer's message that is sent back as a turn: null, for there is none of it here.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: dict[str, None] | None = None
    """litellm's copy of them, which it sends back with the message."""

    @property
    def text(self) -> str:
        """The content, empty if it is null; parts stand on lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())


class ChatBody(SamplingBody):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(
        min_length=1,
        max_length=MAX_MESSAGES,
        description="The conversation to answer.",
        examples=EXAMPLE_CONVERSATION,
    )
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Wins over max_tokens.")
    logprobs: bool | None = Field(None, description="Reports the chosen tokens' logprobs.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="And so many likeliest ones'.")
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, or must, and which one.")
    parallel_tool_calls: bool | None = Field(None, description="Whether it may make several calls; default true.")


class CompletionBody(SamplingBody):
    """The body of `POST /v1/completions`."""

    max_tokens: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Ends an answer after so many tokens; 0 to be told of the prompt alone."
    )
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    ) = Field(description="What is continued: texts, or their token ids.", examples=["Once upon a time"])
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Makes so many, returns the n likeliest.")
    echo: bool | None = Field(None, description="Puts the prompt before each answer.")
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="The chosen tokens', and so many more; the prompt's, too, if echoed.",
    )
    suffix: None = Field(None, description="Refused unless null: the model writes no middles.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _refuse_too_many(cls, given: object) -> object:
        return refuse_too_many(given, MAX_PROMPTS)
