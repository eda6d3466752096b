"""Check litellm as a library: OpenAI's chats, texts and responses, and Anthropic's messages, with its own errors."""

from __future__ import annotations

import functools
import json
from typing import Any

import litellm  # type: ignore[import-not-found]
import pydantic

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

HELLO = [{"role": "user", "content": checks.QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": checks.WEATHER_PARAMETERS},
}
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{checks.BASE_URL}/v1"}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": checks.BASE_URL}
PROVIDERS = (OPENAI, ANTHROPIC)


class Weather(pydantic.BaseModel):
    """A form whose answer any model can end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool


def ask(provider: dict[str, str], **members: Any) -> Any:
    """Return a completion; nothing is sent twice."""
    settings = {"messages": HELLO, "max_tokens": 8, "api_key": checks.TOKEN, "max_retries": 0}
    return litellm.completion(**{**settings, **provider, **members})


def whole_answer() -> None:
    """Ask for a whole answer of each provider's form, and read its usage."""
    for provider in PROVIDERS:
        answer = ask(provider, temperature=0)
        expect(answer.choices[0].message.content and answer.usage.prompt_tokens > 0, answer)
        expect(0 < answer.usage.completion_tokens <= 8, answer.usage)
        expect(answer.choices[0].finish_reason in ("length", "stop"), answer)


def streamed_answer() -> None:
    """Stream the same answer as the whole one, with its usage."""
    for provider in PROVIDERS:
        whole = ask(provider, temperature=0)
        chunks = list(ask(provider, temperature=0, stream=True, stream_options={"include_usage": True}))
        joined = litellm.stream_chunk_builder(chunks, messages=HELLO)
        expect(joined.choices[0].message.content == whole.choices[0].message.content, joined)
        expect(joined.usage.completion_tokens == whole.usage.completion_tokens, joined.usage)


def text() -> None:
    """Continue a text."""
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=OPENAI["api_base"],
        api_key=checks.TOKEN,
        prompt="The capital of France is",
        max_tokens=8,
        temperature=0,
    )
    expect(answer.choices[0].text, answer)


def responses() -> None:
    """Ask for a response."""
    answer = litellm.responses(
        **OPENAI, api_key=checks.TOKEN, input=checks.QUESTION, max_output_tokens=16, temperature=0
    )
    expect(answer.output[0].content[0].text and answer.usage.output_tokens <= 16, answer)


def forced_call() -> None:
    """Force a call, and send its result back."""
    for provider in PROVIDERS:
        answer = ask(provider, tools=[TOOL], tool_choice="required", max_tokens=100)
        said = answer.choices[0].message
        (call,) = said.tool_calls
        expect(call.function.name == "get_weather" and answer.choices[0].finish_reason == "tool_calls", answer)
        checks.expect_weather_arguments(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        after = ask(provider, messages=[*HELLO, said, result], tools=[TOOL])
        expect(after.choices[0].finish_reason in ("length", "stop", "tool_calls"), after)


def form() -> None:
    """Ask for a form."""
    answer = ask(OPENAI, response_format=Weather, max_tokens=60)
    expect(isinstance(json.loads(answer.choices[0].message.content)["sunny"], bool), answer)


def embeddings() -> None:
    """Embed two texts."""
    answer = litellm.embedding(**OPENAI, api_key=checks.TOKEN, input=["Austin", "Paris"])
    first, other = (item["embedding"] for item in answer.data)
    expect(len(first) == len(other) and first != other, len(first))


def wrong_jwt() -> None:
    """Show a wrong JWT."""
    for provider in PROVIDERS:
        call = functools.partial(ask, provider, api_key=checks.WRONG_JWT)
        expect_raised(litellm.AuthenticationError, call, checks.WRONG_JWT_TEXT)


def unknown_model() -> None:
    """Name a model that is not served."""
    expect_raised(
        litellm.NotFoundError,
        lambda: ask(OPENAI, model=f"openai/{checks.UNKNOWN_MODEL}"),
        checks.UNKNOWN_MODEL_TEXT,
    )


def context_overflow() -> None:
    """Send a prompt that is too long: there is a class of its own for it."""
    for provider in PROVIDERS:
        long = [{"role": "user", "content": checks.TOO_LONG}]
        text = checks.OVERFLOW_TEXT if provider is OPENAI else "prompt is too long"
        expect_raised(litellm.ContextWindowExceededError, functools.partial(ask, provider, messages=long), text)


def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    for provider in PROVIDERS:
        expect_raised(litellm.BadRequestError, functools.partial(ask, provider, temperature=3.5), "temperature")


def cancel() -> None:
    """Leave a stream after its first chunk."""
    stream = ask(OPENAI, stream=True, max_tokens=checks.LONG_ANSWER_TOKENS, extra_body={"ignore_eos": True})
    next(stream)
    checks.expect_row_freed(stream.completion_stream.close)


async def asynchronous() -> None:
    """Ask asynchronously."""
    answer = await litellm.acompletion(**OPENAI, api_key=checks.TOKEN, messages=HELLO, max_tokens=4, temperature=0)
    expect(answer.choices[0].message.content, answer)


if __name__ == "__main__":
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    checks.run_checks(
        [
            whole_answer,
            streamed_answer,
            text,
            responses,
            forced_call,
            form,
            embeddings,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
            asynchronous,
        ]
    )
