"""Run Anthropic's own client over real HTTP, through proxy, server and backend, against the mock.

The client checks every answer against its own types (`_strict_response_validation`), and never sends a call again.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam, Usage

from tests.integration.raw_http import RawStream
from tests.integration.service import ROOT, SLOW_START, Service, bearer, running_service, wait_for

MODEL = "smollm2-135m-instruct"
"""The name that docs/clients.md uses."""

HI: MessageParam = {"role": "user", "content": "hi"}
NUM_HI_TOKENS = 21
"""The mock's template around two bytes; its answers are digits, the first one the prompt's length modulo 10."""

TOOLS: list[ToolParam] = [
    {
        "name": "get_weather",
        "description": "Weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    }
]

SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 0.5}
"""Members of the API that this version of the client has no parameters for."""

BREAKS_AFTER_3: MessageParam = {"role": "user", "content": "10 letters"}
FAULTS = "nan:BROKEN,nan:assistant\n901"
REQUESTS_PER_MINUTE = 40


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows, a queue of one, and 200 tokens a second, whose proxy counts each tenant's calls."""
    with running_service(
        proxy=True,
        INFERENCE_API_QUEUE_REQUESTS="1",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="200",
        INFERENCE_API_MOCK_FAULTS=FAULTS,
        SERVED_MODEL_NAMES=MODEL,
        PROXY_REQUESTS_PER_MINUTE=str(REQUESTS_PER_MINUTE),
        **SLOW_START,
    ) as running:
        yield running


def key(tenant: str = "alpha", scope: str = "inference") -> str:
    return bearer(tenant, scope)["Authorization"].removeprefix("Bearer ")


def client_of(service: Service, auth_token: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=service.proxy_url, auth_token=auth_token, max_retries=0, timeout=30, _strict_response_validation=True
    )


@pytest.fixture
def client(service: Service) -> Iterator[anthropic.Anthropic]:
    with client_of(service, key()) as client:
        yield client
    wait_for(lambda: service.num_rows_in_use() == 0, 3.0, "free rows")


def digits(num_prompt_tokens: int, num_tokens: int) -> str:
    return "".join(str(position % 10) for position in range(num_prompt_tokens, num_prompt_tokens + num_tokens))


def num_input_tokens(usage: Usage) -> int:
    """Add the kinds of input up, as the API's reference does."""
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def test_the_documented_snippet_runs_as_it_is(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (snippet,) = re.findall(r"<!-- run: anthropic -->\n```python\n(.*?)```", page, re.DOTALL)
    program = snippet.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}")
    environ = {**os.environ, "AUTHORIZATION": bearer("reader")["Authorization"]}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, text=True)
    whole, streamed = done.stdout.split("\n")
    num_asked = len("user\nWhat is in Austin?") + 3 + 11
    assert whole == digits(len("system\nAnswer in one line.") + 3 + num_asked, 16)
    assert streamed == digits(num_asked, 16)


def test_a_message_is_answered_with_its_usage(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=5, messages=[HI])
    (block,) = message.content
    assert block.type == "text" and block.text == "12345"
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert (num_input_tokens(message.usage), message.usage.output_tokens) == (NUM_HI_TOKENS, 5)
    assert isinstance(message.usage.cache_read_input_tokens, int)
    assert message._request_id is not None and message.id == message._request_id.replace("req_", "msg_")


def test_a_stream_adds_up_to_the_same_message(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=5, messages=[HI]) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
        assert stream.request_id is not None and message.id == stream.request_id.replace("req_", "msg_")
    assert "".join(texts) == "12345" and len(texts) > 1
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert (num_input_tokens(message.usage), message.usage.output_tokens) == (NUM_HI_TOKENS, 5)


def test_the_raw_events_come_in_their_order(client: anthropic.Anthropic) -> None:
    with client.messages.create(model=MODEL, max_tokens=3, messages=[HI], stream=True) as events:
        kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named_and_not_sent(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=9, messages=[HI], stop_sequences=["x", "45"])
    assert [block.to_dict()["text"] for block in message.content] == ["123"]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "45")
    with client.messages.stream(model=MODEL, max_tokens=9, messages=[HI], stop_sequences=["x", "45"]) as stream:
        streamed = stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "45")
    assert [block.to_dict()["text"] for block in streamed.content] == ["123"]


def test_a_count_is_what_the_answer_is_charged_for(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=MODEL, max_tokens=3, messages=[HI])
    turns: list[MessageParam] = [HI, answer.to_param(), {"role": "user", "content": [{"type": "text", "text": "é?"}]}]
    num_counted = client.messages.count_tokens(model=MODEL, messages=turns, system="be brief").input_tokens
    first = client.messages.create(model=MODEL, max_tokens=1, messages=turns, system="be brief")
    assert num_counted == num_input_tokens(first.usage) > NUM_HI_TOKENS
    with client.messages.stream(model=MODEL, max_tokens=1, messages=turns, system="be brief") as stream:
        again = stream.get_final_message()
    assert num_counted == num_input_tokens(again.usage)
    assert again.usage.cache_read_input_tokens and again.usage.input_tokens > 0


def test_sampling_and_members_without_effect_are_accepted(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=MODEL,
        max_tokens=1,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[HI],
        metadata={"user_id": "somebody"},
        thinking={"type": "disabled"},
        service_tier="auto",
        tools=[],
        extra_body=SAMPLING,
    )
    assert message.usage.output_tokens == 1


def test_a_call_of_a_tool_that_must_be_made_is_streamed_and_whole_and_its_result_goes_back(
    client: anthropic.Anthropic,
) -> None:
    asked = {"model": MODEL, "max_tokens": 200, "messages": [HI], "tools": TOOLS, "tool_choice": {"type": "any"}}
    whole = client.messages.create(**asked)  # type: ignore[call-overload]
    (call,) = whole.content
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert call.input.keys() == {"city", "unit"} and call.input["unit"] in ("celsius", "fahrenheit")
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type.startswith("content_block") or event.type == "input_json"]
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use" and (again.name, again.input) == (call.name, call.input)
    assert streamed.stop_reason == "tool_use" and again.id != call.id
    assert (kinds[0], kinds[-1]) == ("content_block_start", "content_block_stop") and "input_json" in kinds
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}]}
    members: dict[str, Any] = {"model": MODEL, "messages": [HI, whole.to_param(), result], "tools": TOOLS}
    answer = client.messages.create(max_tokens=4, **members)
    assert [block.type for block in answer.content] == ["text"]
    num_counted = client.messages.count_tokens(**members).input_tokens
    assert num_counted == num_input_tokens(answer.usage) > num_input_tokens(whole.usage)


def test_a_client_that_leaves_its_stream_frees_the_row(service: Service, client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=1500, messages=[HI]) as stream:
        assert next(stream.text_stream)
        assert service.num_rows_in_use() == 1
    wait_for(lambda: service.num_rows_in_use() == 0, 2.0, "a free row")


def test_a_jwt_may_be_sent_as_an_api_key_but_not_as_both(client: anthropic.Anthropic) -> None:
    by_key = {"X-Api-Key": key(), "Authorization": anthropic.omit}
    message = client.messages.create(model=MODEL, max_tokens=2, messages=[HI], extra_headers=by_key)
    assert message.usage.output_tokens == 2
    with pytest.raises(anthropic.BadRequestError, match="Send either Authorization or X-Api-Key, not both"):
        client.messages.create(model=MODEL, max_tokens=2, messages=[HI], extra_headers={"X-Api-Key": key()})
    with pytest.raises(anthropic.AuthenticationError, match="JWT"):
        client.messages.create(
            model=MODEL, max_tokens=2, messages=[HI], extra_headers={**by_key, "X-Api-Key": "sk-ant-api03"}
        )


Call = Callable[[anthropic.Anthropic], object]


@pytest.mark.parametrize(
    ("call", "error", "kind", "told"),
    [
        (
            lambda client: client.messages.create(
                model=MODEL, max_tokens=1, messages=[HI], extra_body={"temperature": 1.5}
            ),
            anthropic.BadRequestError,
            "invalid_request_error",
            "temperature: Input should be less than or equal to 1; it is 1.5.",
        ),
        (
            lambda client: client.messages.create(model=MODEL, max_tokens=2048, messages=[HI]),
            anthropic.BadRequestError,
            "invalid_request_error",
            "input length and `max_tokens` exceed context limit: 21 + 2048 > 2048, decrease input length or"
            " `max_tokens` and try again",
        ),
        (
            lambda client: client.messages.create(model="claude", max_tokens=1, messages=[HI]),
            anthropic.NotFoundError,
            "not_found_error",
            "The model 'claude' does not exist. Served: smollm2-135m-instruct.",
        ),
        (
            lambda client: client.messages.create(
                model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "BROKEN"}]
            ),
            anthropic.InternalServerError,
            "api_error",
            "",
        ),
        (
            lambda client: client.messages.count_tokens(model="claude", messages=[HI]),
            anthropic.NotFoundError,
            "not_found_error",
            "The model 'claude' does not exist. Served: smollm2-135m-instruct.",
        ),
    ],
    ids=["value", "room", "model", "engine", "count"],
)
def test_an_error_of_the_server_raises_its_exception_with_our_words(
    client: anthropic.Anthropic, call: Call, error: type[anthropic.APIStatusError], kind: str, told: str
) -> None:
    with pytest.raises(error) as caught:
        call(client)
    assert caught.value.type == kind
    assert caught.value.api_message and told in caught.value.api_message
    assert isinstance(caught.value.body, dict) and caught.value.body["request_id"] == caught.value.request_id


@pytest.mark.parametrize(
    ("auth_token", "content", "error", "told"),
    [
        ("no-jwt", "hi", anthropic.AuthenticationError, "JWT is not three base64url parts."),
        (key(scope="metrics"), "hi", anthropic.PermissionDeniedError, "JWT scope must include 'inference'."),
        (key(), "x" * 300_000, anthropic.ContentTooLargeError, "Request body is larger than"),
    ],
    ids=["key", "scope", "size"],
)
def test_an_error_of_the_proxy_raises_its_exception_with_our_words(
    service: Service, auth_token: str, content: str, error: type[anthropic.APIStatusError], told: str
) -> None:
    with client_of(service, auth_token) as client, pytest.raises(error) as caught:
        client.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": content}])
    assert told in str(caught.value)
    assert caught.value.request_id is not None


def test_an_answer_that_breaks_off_raises_with_our_words_after_its_text(client: anthropic.Anthropic) -> None:
    texts = []
    with (
        client.messages.stream(model=MODEL, max_tokens=9, messages=[BREAKS_AFTER_3]) as stream,
        pytest.raises(anthropic.APIStatusError) as caught,
    ):
        texts.extend(stream.text_stream)
    assert caught.value.type == "api_error" and caught.value.api_message
    assert "".join(texts) == "901"


def test_a_full_queue_raises_the_overloaded_error(service: Service, client: anthropic.Anthropic) -> None:
    long = {"model": MODEL, "max_tokens": 1500, "messages": [HI], "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawStream(service.proxy_port or 0, "/v1/messages", long, bearer()))
        wait_for(lambda: service.rows()["num_waiting"] == 1, 3.0, "full rows and a full queue")
        with pytest.raises(anthropic.OverloadedError) as caught:
            client.messages.create(model=MODEL, max_tokens=1, messages=[HI])
    assert (caught.value.status_code, caught.value.type) == (529, "overloaded_error")
    assert caught.value.api_message == "Service overloaded, try again later."
    assert caught.value.response.headers["X-Should-Retry"] == "true"
    assert int(caught.value.response.headers["Retry-After"]) >= 1


def test_a_tenant_over_its_window_raises_the_rate_limit_error(service: Service) -> None:
    with client_of(service, key("busy")) as client:
        for _ in range(REQUESTS_PER_MINUTE):
            client.messages.count_tokens(model=MODEL, messages=[HI])
        with pytest.raises(anthropic.RateLimitError, match="Too many requests, try again later") as caught:
            client.messages.count_tokens(model=MODEL, messages=[HI])
    assert int(caught.value.response.headers["Retry-After"]) >= 1
