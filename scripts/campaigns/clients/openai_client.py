"""Check OpenAI's Python client, which holds every answer against its own types: chat, text, responses, errors.

Its type of a streamed text completion demands a `finish_reason` on every chunk, which no server sends; that one stream
is read without the strict mode, and so are embeddings in base64.
"""

from __future__ import annotations

import openai
import pydantic
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": checks.QUESTION}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": checks.WEATHER_PARAMETERS},
}
RESPONSES_TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells it.",
    "parameters": checks.WEATHER_PARAMETERS,
    "strict": True,
}
KEY, URL = checks.TOKEN, f"{checks.BASE_URL}/v1"
client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, _strict_response_validation=True)


class Weather(pydantic.BaseModel):
    """A form whose answer any model can end."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool
    days: int = pydantic.Field(ge=1, le=9)


def models() -> None:
    """List the models, and find one."""
    expect(MODEL in [model.id for model in client.models.list()], "a list without the model")
    expect(client.models.retrieve(MODEL).id == MODEL, "another model")


def whole_chat() -> None:
    """Ask for a whole answer, and read its usage."""
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=1)
    expect(answer.choices[0].message.content, answer)
    expect(answer.choices[0].finish_reason in ("length", "stop"), answer)
    usage = answer.usage
    expect(usage and usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 8, usage)
    expect(usage and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
    expect(answer._request_id, "no request id")


def streamed_chat() -> None:
    """Stream the same answer as the whole one, with the usage last."""
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, seed=1, temperature=0)
    with client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=8,
        seed=1,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    expect(text == whole.choices[0].message.content, text)
    usage = chunks[-1].usage
    expect(usage and whole.usage and usage.total_tokens == whole.usage.total_tokens, usage)


def helper_stream() -> None:
    """Let the client's own helper put a stream together: it ends only at a finish_reason."""
    with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Weather) as stream:
        final = stream.get_final_completion()
    expect(isinstance(final.choices[0].message.parsed, Weather), final)
    expect(final.choices[0].finish_reason == "stop", final)


def several_answers() -> None:
    """Ask for several answers with their logprobs."""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=4, n=2, seed=1, logprobs=True, top_logprobs=2
    )
    expect([choice.index for choice in answer.choices] == [0, 1], answer)
    for choice in answer.choices:
        told = choice.logprobs.content if choice.logprobs else None
        expect(told and "".join(one.token for one in told) == choice.message.content, choice)


def text() -> None:
    """Continue a text, whole and streamed."""
    whole = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    with openai.OpenAI(base_url=URL, api_key=KEY).completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    ) as stream:
        streamed = "".join(choice.text for chunk in stream for choice in chunk.choices)
    expect(streamed == whole.choices[0].text, streamed)
    expect(whole.choices[0].finish_reason in ("length", "stop"), whole)


def forced_call() -> None:
    """Force a call, and send its result back."""
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=100
    )
    (choice,) = answer.choices
    expect(choice.finish_reason == "tool_calls" and choice.message.tool_calls, answer)
    (call,) = choice.message.tool_calls or []
    expect(call.type == "function", call)
    if call.type == "function":
        expect(call.function.name == "get_weather", call)
        checks.expect_weather_arguments(call.function.arguments)
    result: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    said: ChatCompletionMessageParam = choice.message.model_dump()  # type: ignore[assignment]
    after = client.chat.completions.create(model=MODEL, messages=[*HELLO, said, result], max_tokens=4)
    expect(after.choices[0].finish_reason in ("length", "stop"), after)


def streamed_call() -> None:
    """Stream a forced call: the helper puts its arguments together."""
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "get_weather"}}
    ) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    expect(calls and len(calls) == 1 and calls[0].function.name == "get_weather", final)
    checks.expect_weather_arguments(calls[0].function.arguments if calls else "")


def form() -> None:
    """Ask for a form, which the client parses."""
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Weather)
    expect(isinstance(answer.choices[0].message.parsed, Weather), answer)


def responses() -> None:
    """Ask for a response, whole and streamed."""
    whole = client.responses.create(
        model=MODEL, instructions="Answer in one line.", input="Count.", max_output_tokens=16, temperature=0
    )
    expect(whole.output_text and whole.usage and whole.usage.output_tokens <= 16, whole)
    with client.responses.create(
        model=MODEL,
        instructions="Answer in one line.",
        input="Count.",
        max_output_tokens=16,
        temperature=0,
        stream=True,
    ) as stream:
        events = list(stream)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(said == whole.output_text, said)
    expect(events[-1].type in ("response.completed", "response.incomplete"), events[-1])
    expect([event.sequence_number for event in events] == list(range(len(events))), "numbers out of order")


def responses_forms_and_calls() -> None:
    """Ask for a response in a form, and for one that is a call whose result goes back."""
    parsed = client.responses.parse(model=MODEL, input="Austin?", text_format=Weather)
    expect(isinstance(parsed.output_parsed, Weather), parsed)
    called = client.responses.create(model=MODEL, input="Austin?", tools=[RESPONSES_TOOL], tool_choice="required")
    (call,) = [item for item in called.output if item.type == "function_call"]
    checks.expect_weather_arguments(call.arguments)
    after = client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "Austin?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        max_output_tokens=4,
    )
    expect(after.status in ("completed", "incomplete"), after)


def embeddings() -> None:
    """Embed texts: the same vector for the same text, as numbers and in base64, which the client's default is."""
    answer = client.embeddings.create(model=MODEL, input=["Austin", "Paris", "Austin"], encoding_format="float")
    first, other, again = (item.embedding for item in answer.data)
    expect(len(first) == len(other) and first == again and first != other, [item.index for item in answer.data])
    expect(answer.usage.prompt_tokens > 0, answer.usage)
    # Its strict mode looks at an embedding before it decodes it.
    with openai.OpenAI(base_url=URL, api_key=KEY) as lenient:
        (decoded,) = lenient.embeddings.create(model=MODEL, input="Austin").data
    expect(max(abs(one - two) for one, two in zip(decoded.embedding, first, strict=True)) < 1e-6, "another vector")


def wrong_jwt() -> None:
    """Show a wrong JWT."""
    stranger = openai.OpenAI(base_url=URL, api_key=checks.WRONG_JWT, max_retries=0)
    error = expect_raised(openai.AuthenticationError, lambda: stranger.models.list(), checks.WRONG_JWT_TEXT)
    expect(error.code == "invalid_api_key", error.code)


def unknown_model() -> None:
    """Name a model that is not served."""
    error = expect_raised(
        openai.NotFoundError,
        lambda: client.chat.completions.create(model=checks.UNKNOWN_MODEL, messages=HELLO),
        checks.UNKNOWN_MODEL_TEXT,
    )
    expect(error.code == "model_not_found", error.code)


def context_overflow() -> None:
    """Send a prompt that is too long, and ask for an answer that is."""
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": checks.TOO_LONG}]
    calls = (
        lambda: client.chat.completions.create(model=MODEL, messages=long),
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100_000),
        lambda: client.responses.create(model=MODEL, input=checks.TOO_LONG),
    )
    for call in calls:
        error = expect_raised(openai.BadRequestError, call, checks.OVERFLOW_TEXT)
        expect(error.code == "context_length_exceeded", error.code)


def bad_parameter() -> None:
    """Send a value that is out of bounds, and a member that nobody knows."""
    error = expect_raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3.5),
        "temperature",
    )
    expect(error.param == "temperature", error.param)
    expect_raised(
        openai.BadRequestError,
        lambda: client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"nope": 1}),
        "Unknown parameter: nope",
    )


def cancel() -> None:
    """Leave a stream after its first chunk."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=checks.LONG_ANSWER_TOKENS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    checks.expect_row_freed(stream.close)


async def asynchronous() -> None:
    """Ask with the asynchronous client, whole and streamed."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, _strict_response_validation=True) as asking:
        whole = await asking.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4, temperature=0)
        stream = await asking.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=4, temperature=0, stream=True
        )
        said = "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])
    expect(said == whole.choices[0].message.content, said)


if __name__ == "__main__":
    checks.run_checks(
        [
            models,
            whole_chat,
            streamed_chat,
            helper_stream,
            several_answers,
            text,
            forced_call,
            streamed_call,
            form,
            responses,
            responses_forms_and_calls,
            embeddings,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
            asynchronous,
        ]
    )
