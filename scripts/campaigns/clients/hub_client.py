"""Check the hub's Python client: text-generation-inference's routes, and the chat that it writes as OpenAI does."""

from __future__ import annotations

import json
from typing import Any

from huggingface_hub import InferenceClient
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, TextGenerationError
from huggingface_hub.errors import ValidationError as TextValidationError

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

PROMPT = "The capital of France is"
HELLO = [{"role": "user", "content": checks.QUESTION}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tells it.", "parameters": checks.WEATHER_PARAMETERS},
}
# Its types want objects where it takes what JSON is made of, as its documents show.
client: Any = InferenceClient(base_url=checks.BASE_URL, api_key=checks.TOKEN)


def whole_text() -> None:
    """Continue a text, with its details."""
    answer = client.text_generation(PROMPT, max_new_tokens=8, details=True)
    expect(answer.details and answer.details.generated_tokens <= 8, answer)
    expect(answer.details and "".join(one.text for one in answer.details.tokens) == answer.generated_text, answer)
    expect(answer.details and answer.details.finish_reason in ("length", "eos_token"), answer)


def streamed_text() -> None:
    """Stream the same text as the whole one."""
    whole = client.text_generation(PROMPT, max_new_tokens=8)
    events = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))
    expect("".join(event.token.text for event in events) == whole == events[-1].generated_text, events[-1])
    expect(events[-1].details and events[-1].details.generated_tokens == len(events), events[-1])


def form_of_text() -> None:
    """Ask for a text in a form."""
    said = client.text_generation(PROMPT, max_new_tokens=60, grammar={"type": "json", "value": checks.SUNNY})
    expect(isinstance(json.loads(said)["sunny"], bool), said)


def whole_chat() -> None:
    """Ask for a whole answer, and read its usage."""
    answer = client.chat_completion(HELLO, model=MODEL, max_tokens=8, temperature=0)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens <= 8, answer)


def streamed_chat() -> None:
    """Stream the same answer as the whole one, with the usage last."""
    whole = client.chat_completion(HELLO, model=MODEL, max_tokens=8, temperature=0)
    chunks = list(
        client.chat_completion(
            HELLO,
            model=MODEL,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    expect(said == whole.choices[0].message.content, said)
    expect(chunks[-1].usage and chunks[-1].usage.total_tokens == whole.usage.total_tokens, chunks[-1])


def forced_call() -> None:
    """Force a call."""
    answer = client.chat_completion(HELLO, model=MODEL, tools=[TOOL], tool_choice="required", max_tokens=100)
    (call,) = answer.choices[0].message.tool_calls or []
    expect(call.function.name == "get_weather", call)
    checks.expect_weather_arguments(call.function.arguments)


def form_of_chat() -> None:
    """Ask for a chat's answer in a form."""
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": checks.SUNNY, "strict": True}}
    answer = client.chat_completion(HELLO, model=MODEL, response_format=form, max_tokens=60)
    expect(isinstance(json.loads(answer.choices[0].message.content or "")["sunny"], bool), answer)


def wrong_jwt() -> None:
    """Show a wrong JWT: this client has no class for it, neither for a text's nor for a chat's."""
    stranger = InferenceClient(base_url=checks.BASE_URL, api_key=checks.WRONG_JWT)
    expect_raised(TextGenerationError, lambda: stranger.text_generation(PROMPT), checks.WRONG_JWT_TEXT)
    error = expect_raised(HfHubHTTPError, lambda: stranger.chat_completion(HELLO, model=MODEL), checks.WRONG_JWT_TEXT)
    expect(error.response.status_code == 401, error.response.status_code)


def unknown_model() -> None:
    """Name a model that is not served, in a chat: the other routes name none."""
    error = expect_raised(
        HfHubHTTPError, lambda: client.chat_completion(HELLO, model=checks.UNKNOWN_MODEL), checks.UNKNOWN_MODEL
    )
    expect(error.response.status_code == 404, error.response.status_code)


def context_overflow() -> None:
    """Send a prompt that is too long, and ask for an answer that is."""
    expect_raised(TextValidationError, lambda: client.text_generation(checks.TOO_LONG), checks.OVERFLOW_TEXT)
    expect_raised(
        TextValidationError, lambda: client.text_generation(PROMPT, max_new_tokens=5000), checks.OVERFLOW_TEXT
    )


def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    expect_raised(TextValidationError, lambda: client.text_generation(PROMPT, top_p=1.5), "top_p")
    expect_raised(BadRequestError, lambda: client.chat_completion(HELLO, model=MODEL, top_p=1.5), "top_p")


def cancel() -> None:
    """Leave a stream after its first event."""
    stream = client.text_generation(PROMPT, max_new_tokens=checks.LONG_ANSWER_TOKENS, stream=True)
    next(iter(stream))
    checks.expect_row_freed(stream.close)


if __name__ == "__main__":
    checks.run_checks(
        [
            whole_text,
            streamed_text,
            form_of_text,
            whole_chat,
            streamed_chat,
            forced_call,
            form_of_chat,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
        ]
    )
