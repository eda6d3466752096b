"""Check Pydantic AI's agents over chats and over responses: texts, streams, calls, forms both ways, its own errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pydantic
from openai import AsyncOpenAI
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput  # type: ignore[import-not-found]
from pydantic_ai.direct import model_request  # type: ignore[import-not-found]
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel  # type: ignore[import-not-found]
from pydantic_ai.exceptions import (  # type: ignore[import-not-found]
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelNotFoundError,
    ModelRequestRejectedError,
)
from pydantic_ai.messages import ModelRequest, ToolReturnPart  # type: ignore[import-not-found]
from pydantic_ai.models import ModelRequestParameters  # type: ignore[import-not-found]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # type: ignore[import-not-found]
from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]
from pydantic_ai.tools import ToolDefinition  # type: ignore[import-not-found]

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised_later


class Weather(pydantic.BaseModel):
    """A form whose answer any model can end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool
    days: int = pydantic.Field(ge=1, le=9)


def provider(jwt: str = checks.TOKEN) -> Any:
    """Return the service as a provider; nothing is sent twice."""
    return OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{checks.BASE_URL}/v1", api_key=jwt, max_retries=0))


def agent(
    kind: Callable[..., Any] = OpenAIChatModel, model: str = MODEL, jwt: str = checks.TOKEN, **members: Any
) -> Any:
    """Return an agent over the service."""
    settings = {"max_tokens": 8, **members.pop("settings", {})}
    return Agent(kind(model, provider=provider(jwt)), model_settings=settings, retries=0, **members)


async def whole_answer() -> None:
    """Run an agent over chats and over responses, and read the usage."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asking = agent(kind, settings={"max_tokens": 16, "temperature": 0}, instructions="Answer in one line.")
        ran = await asking.run(checks.QUESTION)
        usage = ran.usage
        expect(ran.output and usage.input_tokens > 0 and 0 < usage.output_tokens <= 16, (kind, ran))


async def streamed_answer() -> None:
    """Stream the same answer as the whole one, over chats and over responses."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asking = agent(kind, settings={"max_tokens": 16, "temperature": 0})
        whole = await asking.run(checks.QUESTION)
        async with asking.run_stream(checks.QUESTION) as stream:
            said = "".join([text async for text in stream.stream_text(delta=True, debounce_by=None)])
        expect(said == whole.output, (kind, said, whole.output))


async def form_as_call() -> None:
    """Ask for a form by a forced call, over chats and over responses."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        ran = await agent(kind, output_type=ToolOutput(Weather), settings={"max_tokens": 100}).run(checks.QUESTION)
        expect(isinstance(ran.output, Weather), (kind, ran))


async def form_as_schema() -> None:
    """Ask for a form by a schema, over chats and over responses."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        ran = await agent(kind, output_type=NativeOutput(Weather), settings={"max_tokens": 100}).run(checks.QUESTION)
        expect(isinstance(ran.output, Weather), (kind, ran))


async def forced_call() -> None:
    """Force a call, and send its result back, over chats and over responses."""
    tool = ToolDefinition(name="get_weather", parameters_json_schema=checks.WEATHER_PARAMETERS)
    tools = ModelRequestParameters(function_tools=[tool])
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=provider())
        asked = ModelRequest.user_text_prompt(checks.QUESTION)
        answer = await model_request(
            model,
            [asked],
            model_settings={"max_tokens": 100, "tool_choice": "required"},
            model_request_parameters=tools,
        )
        (call,) = answer.tool_calls
        expect(call.tool_name == "get_weather", call)
        checks.expect_weather_arguments(call.args)
        result = ModelRequest(parts=[ToolReturnPart("get_weather", "sunny", tool_call_id=call.tool_call_id)])
        after = await model_request(model, [asked, answer, result], model_settings={"max_tokens": 16, "temperature": 0})
        expect(after.text, (kind, after))


async def embeddings() -> None:
    """Embed two texts."""
    answer = await Embedder(OpenAIEmbeddingModel(MODEL, provider=provider())).embed_documents(["Austin", "Paris"])
    first, other = answer.embeddings
    expect(len(first) == len(other) and first != other, len(first))


async def wrong_jwt() -> None:
    """Show a wrong JWT."""
    stranger = agent(jwt=checks.WRONG_JWT)
    await expect_raised_later(ModelAuthenticationError, stranger.run("x"), checks.WRONG_JWT_TEXT)


async def unknown_model() -> None:
    """Name a model that is not served."""
    stranger = agent(model=checks.UNKNOWN_MODEL)
    await expect_raised_later(ModelNotFoundError, stranger.run("x"), checks.UNKNOWN_MODEL_TEXT)


async def context_overflow() -> None:
    """Send a prompt that is too long, over chats and over responses: there is a class of its own for it."""
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asking = agent(kind, settings={"max_tokens": 16})
        await expect_raised_later(ModelContextWindowExceededError, asking.run(checks.TOO_LONG), checks.OVERFLOW_TEXT)


async def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    asking = agent(settings={"temperature": 3.5})
    await expect_raised_later(ModelRequestRejectedError, asking.run("x"), "temperature")


async def cancel() -> None:
    """Leave a stream after its first text."""
    asking = agent(settings={"max_tokens": checks.LONG_ANSWER_TOKENS, "extra_body": {"ignore_eos": True}})
    async with asking.run_stream(checks.QUESTION) as stream:
        async for _ in stream.stream_text(delta=True, debounce_by=None):
            expect(checks.num_rows_in_use() == 1, "no row in use while the stream is open")
            break
        await stream.cancel()
    await checks.expect_rows_free_later()


if __name__ == "__main__":
    checks.run_checks(
        [
            whole_answer,
            streamed_answer,
            form_as_call,
            form_as_schema,
            forced_call,
            embeddings,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
        ]
    )
