"""Run OpenAI's own Python client, unchanged, against the whole service: proxy, server, backend, on the mock's digits.

The client checks each answer against its own types (`_strict_response_validation`), with one exception: its type of a
streamed text completion demands a `finish_reason` on every chunk, which no server sends, so `lenient` reads those.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.integration.service import ROOT, SLOW_START, Service, bearer, running_service, wait_for

MODEL = "smollm2-135m-instruct"
"""The name that docs/clients.md uses."""

HELLO: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]
NUM_ROWS, NUM_PLACES = 2, 1
NOTICE_SECONDS = 2.0
RECOVERY_SECONDS = 5.0

Connect = Callable[..., OpenAI]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service closed to callers without the proxy."""
    with running_service(
        proxy=True, **SLOW_START, INFERENCE_API_INSECURE_DEV="0", SERVED_MODEL_NAMES=f"{MODEL},alias"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def slow_service() -> Iterator[Service]:
    """A small service that makes 50 tokens a second, and whose proxy lets a tenant make few calls a minute."""
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS=str(NUM_PLACES),
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="50",
        PROXY_REQUESTS_PER_MINUTE="3",
        SERVED_MODEL_NAMES=MODEL,
    ) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Return a factory of clients whose key is a bearer of the proxy; nothing is sent twice."""
    with contextlib.ExitStack() as stack:

        def connect(service: Service, *, tenant: str = "alpha", strict: bool = True, key: str | None = None) -> OpenAI:
            client = OpenAI(
                base_url=f"{service.proxy_url}/v1",
                api_key=key or bearer(tenant)["Authorization"].removeprefix("Bearer "),
                max_retries=0,
                timeout=30,
                _strict_response_validation=strict,
            )
            return stack.enter_context(client)

        yield connect


@pytest.fixture
def client(service: Service, connect: Connect) -> OpenAI:
    return connect(service)


@pytest.fixture
def lenient(service: Service, connect: Connect) -> OpenAI:
    return connect(service, strict=False)


def test_the_documented_snippet_runs_as_it_is(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (snippet,) = re.findall(r"<!-- run: openai -->\n```python\n(.*?)```", page, re.DOTALL)
    program = snippet.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}")
    environ = {**os.environ, "AUTHORIZATION": bearer()["Authorization"]}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, text=True)
    chat, text = done.stdout.split("\n")
    assert len(chat) == 32 and chat.isdigit()
    assert text == "4567890123456789"


def is_idle(service: Service) -> bool:
    """Tell whether no row is taken and nothing waits."""
    rows = service.rows()
    return (rows["num_rows_in_use"], rows["num_waiting"]) == (0, 0)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    model = client.models.retrieve("alias")
    assert (model.id, model.object, model.owned_by) == ("alias", "model", "inference_api")


def test_a_chat_is_answered_whole(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, seed=1)
    assert answer.usage is not None
    num_prompt_tokens = answer.usage.prompt_tokens
    expected = "".join(str(position % 10) for position in range(num_prompt_tokens, num_prompt_tokens + 12))
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, num_prompt_tokens + 12)
    assert answer.model == MODEL and answer.id.startswith("chatcmpl-")
    assert answer._request_id


def test_an_answers_message_is_sent_back_as_the_next_turn_as_it_came(client: OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    message = first.choices[0].message
    for turn in (message, message.model_dump()):
        again = client.chat.completions.create(model=MODEL, messages=[*HELLO, turn, *HELLO], max_tokens=3)  # type: ignore[list-item]
        assert again.usage is not None and first.usage is not None
        assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_a_streamed_chat_joins_to_the_whole_one_and_ends_with_its_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20)
    with client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert text_of(chunks) == whole.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []


def test_the_clients_own_stream_of_events_puts_the_answer_together(client: OpenAI) -> None:
    # It takes an answer that was cut at its length for an error: this one ends at a stop.
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, stop="3", logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stop="3", logprobs=True, top_logprobs=2) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].logprobs is not None and whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111]])
def test_a_text_is_continued_whole_and_streamed(client: OpenAI, lenient: OpenAI, prompt: str | list[int]) -> None:
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("567890123456", "length")
    assert whole.usage is not None and (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    with lenient.completions.create(model=MODEL, prompt=prompt, max_tokens=12, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == "567890123456"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]


def test_several_answers_to_several_prompts_come_in_their_order(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["hi", "hello"], n=2, best_of=3, max_tokens=4, echo=True)
    assert [choice.text for choice in answer.choices] == ["hi2345", "hi2345", "hello5678", "hello5678"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 24)


def test_several_chat_answers_are_streamed_side_by_side(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, n=3)
    with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10, n=3, stream=True) as stream:
        chunks = list(stream)
    texts = [choice.message.content for choice in whole.choices]
    assert len(texts) == 3 and [text_of(chunks, index) for index in range(3)] == texts


def test_logprobs_join_to_the_text_and_the_mocks_choice_is_certain(client: OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, logprobs=True, top_logprobs=3)
    told = chat.choices[0].logprobs
    assert told is not None and told.content is not None
    assert "".join(one.token for one in told.content) == chat.choices[0].message.content
    assert {one.logprob for one in told.content} == {0.0}
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3 for one in told.content)
    text = client.completions.create(model=MODEL, prompt="hello", max_tokens=3, logprobs=2)
    listed = text.choices[0].logprobs
    assert listed is not None and listed.tokens == ["5", "6", "7"] and listed.text_offset == [0, 1, 2]
    assert listed.token_logprobs == [0.0] * 3 and listed.top_logprobs is not None
    assert [len(one) for one in listed.top_logprobs] == [2] * 3


def test_a_stop_ends_the_text_before_it(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=50, stop=["901", "x"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("5678", "stop")


def test_parameters_beyond_openais_go_in_the_extra_body(client: OpenAI) -> None:
    extra = {"stop_token_ids": [ord("8")], "min_tokens": 2, "ignore_eos": True, "top_k": 5, "repetition_penalty": 1.1}
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=50, extra_body=extra)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("5678", "stop")


def test_what_cannot_be_served_is_a_bad_request_with_our_text(client: OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"temperature: Input should be less than or equal to 2; it is 3\.5"
    ) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=3.5)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="Unknown parameter: nope"):
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"nope": 1})
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tokens") as caught:
        client.completions.create(model=MODEL, prompt="hello", max_tokens=3000, stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_is_an_authentication_error(service: Service, connect: Connect) -> None:
    with pytest.raises(openai.AuthenticationError, match="JWT is not three base64url parts") as caught:
        connect(service, key="no-key").models.list()
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "authentication_error")


def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'gpt-9' does not exist. Served: {MODEL}, alias") as caught:
        client.chat.completions.create(model="gpt-9", messages=HELLO, stream=True)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        client.models.retrieve("gpt-9")


def test_more_answers_than_there_is_room_for_are_refused_and_none_is_left(slow_service: Service, connect) -> None:
    client = connect(slow_service, tenant="crowd")
    with pytest.raises(openai.InternalServerError, match="Service overloaded, try again later") as caught:
        client.completions.create(model=MODEL, prompt="hello", n=NUM_ROWS + NUM_PLACES + 1, max_tokens=1000)
    assert (caught.value.status_code, caught.value.code) == (503, "server_is_overloaded")
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    wait_for(lambda: is_idle(slow_service), NOTICE_SECONDS, "end of those that were taken")
    answer = client.completions.create(model=MODEL, prompt="hello", n=NUM_ROWS + NUM_PLACES, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["56"] * (NUM_ROWS + NUM_PLACES)


def test_calls_over_the_tenants_rate_are_a_rate_limit_error(slow_service: Service, connect: Connect) -> None:
    client = connect(slow_service, tenant="hasty")
    for _ in range(3):
        client.models.list()
    with pytest.raises(openai.RateLimitError, match="Too many requests, try again later") as caught:
        client.models.list()
    assert caught.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("surface", ["chat", "text"])
def test_a_stream_cut_by_a_crash_of_the_backend_raises_with_our_text(slow_service, connect, surface: str) -> None:
    client = connect(slow_service, tenant=f"unlucky-{surface}", strict=False)
    wait_for(slow_service.is_healthy, RECOVERY_SECONDS, "health")
    if surface == "chat":
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, n=2, stream=True)
    else:
        stream = client.completions.create(model=MODEL, prompt="hello", max_tokens=1000, n=2, stream=True)
    with stream, pytest.raises(openai.APIError, match="The decode backend") as caught:  # noqa: PT012 - the loop is what raises
        for place, _ in enumerate(stream):
            if place == 5:
                os.kill(slow_service.backend_pid, signal.SIGKILL)
    assert caught.value.code == "backend_lost"
    wait_for(slow_service.is_healthy, RECOVERY_SECONDS, "a new backend")


def test_a_required_call_of_the_mock_keeps_to_its_schema(service: Service, connect: Connect) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    answer = connect(service).chat.completions.create(
        model=MODEL,
        messages=HELLO,
        tools=[{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}],
        tool_choice="required",
        max_tokens=200,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str) and isinstance(arguments["days"], list)
