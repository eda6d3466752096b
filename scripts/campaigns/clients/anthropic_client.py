"""Check Anthropic's Python client, which holds every answer against its own types: messages, counts, calls, errors.

This version has no `temperature` of its own any more: it goes in the extra body.
"""

from __future__ import annotations

import functools

import anthropic
from anthropic.types import MessageParam, ToolParam

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

HELLO: list[MessageParam] = [{"role": "user", "content": checks.QUESTION}]
TOOL: ToolParam = {"name": "get_weather", "description": "Tells it.", "input_schema": {**checks.WEATHER_PARAMETERS}}
GREEDY = {"temperature": 0}
client = anthropic.Anthropic(
    base_url=checks.BASE_URL, auth_token=checks.TOKEN, max_retries=0, _strict_response_validation=True
)


def whole_message() -> None:
    """Ask for a whole answer, and read its usage."""
    answer = client.messages.create(
        model=MODEL, max_tokens=8, system="Answer in one line.", messages=HELLO, extra_body=GREEDY
    )
    (block,) = answer.content
    expect(block.type == "text" and block.text, answer)
    expect(answer.stop_reason in ("max_tokens", "end_turn") and 0 < answer.usage.output_tokens <= 8, answer)
    expect(answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0, answer.usage)
    expect(answer._request_id, "no request id")


def streamed_message() -> None:
    """Stream the same answer as the whole one; the client's own helper puts it together."""
    whole = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(whole.content[0].type == "text" and said == whole.content[0].text, said)
    expect([block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content], final)
    expect(final.stop_reason == whole.stop_reason, final)
    expect(final.usage.output_tokens == whole.usage.output_tokens, final.usage)


def counted_tokens() -> None:
    """Count a prompt: it is what its answer's usage says."""
    told = client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    usage = client.messages.create(model=MODEL, max_tokens=1, messages=HELLO).usage
    expect(told == usage.input_tokens + (usage.cache_read_input_tokens or 0), (told, usage))


def forced_call() -> None:
    """Force a call, and send its result back."""
    answer = client.messages.create(
        model=MODEL, max_tokens=100, messages=HELLO, tools=[TOOL], tool_choice={"type": "any"}
    )
    (block,) = answer.content
    expect(answer.stop_reason == "tool_use" and block.type == "tool_use", answer)
    if block.type != "tool_use":
        return
    checks.expect_weather_arguments(block.input)
    result: MessageParam = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}],
    }
    said: MessageParam = {"role": "assistant", "content": answer.content}
    after = client.messages.create(model=MODEL, max_tokens=4, messages=[*HELLO, said, result], tools=[TOOL])
    expect(after.stop_reason in ("max_tokens", "end_turn", "tool_use"), after)


def streamed_call() -> None:
    """Stream a forced call of one function by its name."""
    with client.messages.stream(
        model=MODEL,
        max_tokens=100,
        messages=HELLO,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ) as stream:
        final = stream.get_final_message()
    (block,) = final.content
    expect(block.type == "tool_use" and block.name == "get_weather", final)
    checks.expect_weather_arguments(block.input if block.type == "tool_use" else None)


def wrong_jwt() -> None:
    """Show a wrong JWT, in either header."""
    for stranger in (
        anthropic.Anthropic(base_url=checks.BASE_URL, max_retries=0, auth_token=checks.WRONG_JWT),
        anthropic.Anthropic(base_url=checks.BASE_URL, max_retries=0, api_key=checks.WRONG_JWT),
    ):
        count = functools.partial(stranger.messages.count_tokens, model=MODEL, messages=HELLO)
        expect_raised(anthropic.AuthenticationError, count, checks.WRONG_JWT_TEXT)


def unknown_model() -> None:
    """Name a model that is not served."""
    expect_raised(
        anthropic.NotFoundError,
        lambda: client.messages.create(model=checks.UNKNOWN_MODEL, max_tokens=1, messages=HELLO),
        checks.UNKNOWN_MODEL,
    )


def context_overflow() -> None:
    """Send a prompt that is too long, and ask for an answer that is."""
    expect_raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(
            model=MODEL, max_tokens=1, messages=[{"role": "user", "content": checks.TOO_LONG}]
        ),
        "prompt is too long",
    )
    expect_raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(model=MODEL, max_tokens=5000, messages=HELLO, timeout=60),
        "exceed context limit",
    )


def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    expect_raised(
        anthropic.BadRequestError,
        lambda: client.messages.create(model=MODEL, max_tokens=1, messages=HELLO, extra_body={"temperature": 1.5}),
        "temperature",
    )


def cancel() -> None:
    """Leave a stream after its first text."""
    with client.messages.stream(
        model=MODEL,
        max_tokens=checks.LONG_ANSWER_TOKENS,
        messages=[{"role": "user", "content": "Tell a very long story of a river."}],
        extra_body=GREEDY,
    ) as stream:
        next(iter(stream.text_stream))
        checks.expect_row_freed(stream.close)


async def asynchronous() -> None:
    """Ask with the asynchronous client."""
    async with anthropic.AsyncAnthropic(base_url=checks.BASE_URL, auth_token=checks.TOKEN) as asking:
        async with asking.messages.stream(model=MODEL, max_tokens=4, messages=HELLO, extra_body=GREEDY) as stream:
            said = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    expect(final.content[0].type == "text" and said == final.content[0].text, final)


if __name__ == "__main__":
    checks.run_checks(
        [
            whole_message,
            streamed_message,
            counted_tokens,
            forced_call,
            streamed_call,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
            asynchronous,
        ]
    )
