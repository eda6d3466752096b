"""Check LangChain's client of OpenAI's service: messages, streams, bound tools, forms, its own overflow error.

`get_num_tokens` is never called: it downloads a tokenizer of OpenAI's.
"""

from __future__ import annotations

from typing import Any

import openai
import pydantic
from langchain_core.exceptions import ContextOverflowError  # type: ignore[import-not-found]
from langchain_core.messages import ToolMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": checks.WEATHER_PARAMETERS},
}


class Weather(pydantic.BaseModel):
    """A form whose answer any model can end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool


def chat(**members: Any) -> Any:
    """Return a model of LangChain's that asks the service."""
    settings = {"model": MODEL, "api_key": checks.TOKEN, "max_retries": 0, "max_tokens": 8, "stream_usage": True}
    return ChatOpenAI(base_url=f"{checks.BASE_URL}/v1", **{**settings, **members})


def whole_answer() -> None:
    """Invoke a model, and read its usage."""
    answer = chat(temperature=0).invoke(checks.QUESTION)
    usage = answer.usage_metadata
    expect(answer.content and usage["input_tokens"] > 0 and 0 < usage["output_tokens"] <= 8, answer)
    expect(answer.response_metadata["finish_reason"] in ("length", "stop"), answer)


def streamed_answer() -> None:
    """Stream the same answer as the whole one; chunks add up to a message with its usage."""
    whole = chat(temperature=0).invoke(checks.QUESTION)
    chunks = list(chat(temperature=0).stream(checks.QUESTION))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    expect(joined.content == whole.content, joined)
    expect(joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"], joined.usage_metadata)


def batch() -> None:
    """Invoke a model with several prompts at once."""
    answers = chat(temperature=0).batch([checks.QUESTION, "Count to three.", checks.QUESTION])
    expect(answers[0].content == answers[2].content, answers)


def forced_call() -> None:
    """Bind a tool that must be called, and send its result back."""
    bound = chat(max_tokens=100).bind_tools([TOOL], tool_choice="any")
    answer = bound.invoke(checks.QUESTION)
    (call,) = answer.tool_calls
    expect(call["name"] == "get_weather" and not answer.invalid_tool_calls, answer)
    checks.expect_weather_arguments(call["args"])
    result = ToolMessage("sunny", tool_call_id=call["id"])
    after = chat().bind_tools([TOOL]).invoke([("user", checks.QUESTION), answer, result])
    expect(after.response_metadata["finish_reason"] in ("length", "stop", "tool_calls"), after)


def form() -> None:
    """Ask for a form in both of LangChain's ways: as a schema, and as a call."""
    for method in ("json_schema", "function_calling"):
        said = chat(max_tokens=100).with_structured_output(Weather, method=method).invoke(checks.QUESTION)
        expect(isinstance(said, Weather), (method, said))


def responses() -> None:
    """Ask over the Responses API."""
    answer = chat(use_responses_api=True, max_tokens=16, temperature=0).invoke(checks.QUESTION)
    expect(answer.text and answer.usage_metadata["output_tokens"] <= 16, answer)


def embeddings() -> None:
    """Embed texts; without the check of their length, which downloads a tokenizer."""
    embedding = OpenAIEmbeddings(
        base_url=f"{checks.BASE_URL}/v1", api_key=checks.TOKEN, model=MODEL, check_embedding_ctx_length=False
    )
    first, other = embedding.embed_documents(["Austin", "Paris"])
    expect(len(first) == len(other) and first == embedding.embed_query("Austin"), len(first))


def wrong_jwt() -> None:
    """Show a wrong JWT."""
    stranger = chat(api_key=checks.WRONG_JWT)
    expect_raised(openai.AuthenticationError, lambda: stranger.invoke("x"), checks.WRONG_JWT_TEXT)


def unknown_model() -> None:
    """Name a model that is not served."""
    expect_raised(openai.NotFoundError, lambda: chat(model=checks.UNKNOWN_MODEL).invoke("x"), checks.UNKNOWN_MODEL_TEXT)


def context_overflow() -> None:
    """Send a prompt that is too long, whole and streamed: LangChain has a class of its own for it."""
    for call in (lambda: chat().invoke(checks.TOO_LONG), lambda: list(chat().stream(checks.TOO_LONG))):
        expect_raised(ContextOverflowError, call, checks.OVERFLOW_TEXT)


def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    expect_raised(openai.BadRequestError, lambda: chat(temperature=3.5).invoke("x"), "temperature")


def cancel() -> None:
    """Leave a stream after its first chunk."""
    long = chat(max_tokens=checks.LONG_ANSWER_TOKENS, extra_body={"ignore_eos": True})
    stream = long.stream(checks.QUESTION)
    next(stream)
    checks.expect_row_freed(stream.close)


async def asynchronous() -> None:
    """Ask asynchronously, whole and streamed."""
    whole = await chat(temperature=0).ainvoke(checks.QUESTION)
    said = "".join([chunk.content async for chunk in chat(temperature=0).astream(checks.QUESTION)])
    expect(said == whole.content, said)


if __name__ == "__main__":
    checks.run_checks(
        [
            whole_answer,
            streamed_answer,
            batch,
            forced_call,
            form,
            responses,
            embeddings,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
            asynchronous,
        ]
    )
