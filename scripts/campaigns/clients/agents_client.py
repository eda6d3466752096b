"""Check OpenAI's Agents SDK over chats and over responses, with a tool that it runs itself. It traces nothing.

A response that was cut at its length is an error for it, whoever sent it; so over responses the answers are forms and
calls, which come to their end.
"""

from __future__ import annotations

from typing import Any

import openai
import pydantic
from agents import (  # type: ignore[import-not-found]
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    set_tracing_disabled,
)

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised_later

KINDS = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


class Weather(pydantic.BaseModel):
    """A form whose answer any model can end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool


def agent(kind: Any = OpenAIChatCompletionsModel, model: str = MODEL, jwt: str = checks.TOKEN, **members: Any) -> Any:
    """Return an agent over the service; nothing is sent twice."""
    client = openai.AsyncOpenAI(base_url=f"{checks.BASE_URL}/v1", api_key=jwt, max_retries=0)
    settings = ModelSettings(**{"max_tokens": 16, **members.pop("settings", {})})
    return Agent(name="teller", model=kind(model, client), model_settings=settings, **members)


async def whole_answer() -> None:
    """Run an agent, and read the usage."""
    ran = await Runner.run(agent(instructions="Answer in one line.", settings={"temperature": 0.0}), checks.QUESTION)
    usage = ran.context_wrapper.usage
    expect(ran.final_output and usage.input_tokens > 0 and 0 < usage.output_tokens <= 16, usage)


async def streamed_answer() -> None:
    """Stream the same answer as the whole one, with its usage."""
    for asking in (
        agent(settings={"temperature": 0.0, "include_usage": True}),
        agent(OpenAIResponsesModel, settings={"temperature": 0.0, "max_tokens": 60}, output_type=Weather),
    ):
        whole = await Runner.run(asking, checks.QUESTION)
        ran = Runner.run_streamed(asking, checks.QUESTION)
        said = ""
        async for event in ran.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                said += event.data.delta
        expect(said and whole.final_output == ran.final_output, (said, whole.final_output))
        expect(ran.context_wrapper.usage.total_tokens == whole.context_wrapper.usage.total_tokens, said)


async def tool() -> None:
    """Let an agent call a tool, which it must the first time; over chats its result goes back for an answer."""
    for kind in KINDS:
        told: list[str] = []

        async def get_weather(_: Any, arguments: str, heard: list[str] = told) -> str:
            heard.append(arguments)
            return "sunny"

        ran = await Runner.run(
            agent(
                kind,
                tools=[FunctionTool("get_weather", "Tells it.", checks.WEATHER_PARAMETERS, get_weather)],
                # After the first call the SDK asks without `tool_choice`, so that it ends.
                settings={"tool_choice": "required", "max_tokens": 100, "temperature": 0.0},
                tool_use_behavior="run_llm_again" if kind is OpenAIChatCompletionsModel else "stop_on_first_tool",
            ),
            checks.QUESTION,
        )
        expect(told and ran.final_output, (kind, told))
        checks.expect_weather_arguments(told[0])


async def form() -> None:
    """Ask for a form."""
    for kind in KINDS:
        ran = await Runner.run(agent(kind, output_type=Weather, settings={"max_tokens": 60}), checks.QUESTION)
        expect(isinstance(ran.final_output, Weather), (kind, ran.final_output))


async def wrong_jwt() -> None:
    """Show a wrong JWT."""
    run = Runner.run(agent(jwt=checks.WRONG_JWT), "x")
    await expect_raised_later(openai.AuthenticationError, run, checks.WRONG_JWT_TEXT)


async def unknown_model() -> None:
    """Name a model that is not served."""
    run = Runner.run(agent(model=checks.UNKNOWN_MODEL), "x")
    await expect_raised_later(openai.NotFoundError, run, checks.UNKNOWN_MODEL_TEXT)


async def context_overflow() -> None:
    """Send a prompt that is too long."""
    for kind in KINDS:
        run = Runner.run(agent(kind), checks.TOO_LONG)
        await expect_raised_later(openai.BadRequestError, run, checks.OVERFLOW_TEXT)


async def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    run = Runner.run(agent(settings={"temperature": 3.5}), "x")
    await expect_raised_later(openai.BadRequestError, run, "temperature")


async def cancel() -> None:
    """Cancel a streamed run after its first text."""
    settings = {"max_tokens": checks.LONG_ANSWER_TOKENS, "extra_body": {"ignore_eos": True}}
    ran = Runner.run_streamed(agent(settings=settings), checks.QUESTION)
    async for event in ran.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            expect(checks.num_rows_in_use() == 1, "no row in use while the stream is open")
            ran.cancel()
            break
    await checks.expect_rows_free_later()


if __name__ == "__main__":
    set_tracing_disabled(True)
    checks.run_checks(
        [
            whole_answer,
            streamed_answer,
            tool,
            form,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
        ]
    )
