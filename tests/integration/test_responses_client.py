"""Run OpenAI's own client against the Responses API: over real HTTP, through the proxy, its strict validation on.

Strict validation makes the client check every answer and every event against OpenAI's own types.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai import OpenAI
from openai.types.responses import FunctionToolParam, ResponseFunctionToolCall

from tests.integration.service import ROOT, START_SECONDS, Service, bearer, running_service, wait_for

LOGPROBS = "message.output_text.logprobs"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Aix", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": CITY,
    "strict": True,
}


class Weather(pydantic.BaseModel):
    city: Literal["Aix", "Paris"]
    days: Literal[1, 2]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows that makes 100 tokens a second, closed to callers without the proxy."""
    with running_service(
        proxy=True,
        INFERENCE_API_INSECURE_DEV="0",
        INFERENCE_API_ROWS="2",
        INFERENCE_API_SERVED_MODEL_NAMES="mock,smollm2-135m-instruct",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="100",
        INFERENCE_API_MOCK_FAULTS="nan:break",
    ) as running:
        yield running


def connect(service: Service, tenant: str = "alpha") -> OpenAI:
    """Return a tenant's client, which sends nothing twice."""
    key = bearer(tenant)["Authorization"].removeprefix("Bearer ")
    url = f"{service.proxy_url}/v1"
    return OpenAI(base_url=url, api_key=key, max_retries=0, _strict_response_validation=True)


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with connect(service) as client:
        yield client


def digits(num_prompt_tokens: int, num_tokens: int) -> str:
    """Return what the mock answers: digits by position."""
    return "".join(str(position % 10) for position in range(num_prompt_tokens, num_prompt_tokens + num_tokens))


def test_the_documented_snippet_runs_as_it_is(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (snippet,) = re.findall(r"<!-- run: responses -->\n```python\n(.*?)```", page, re.DOTALL)
    program = snippet.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}")
    environ = {**os.environ, "AUTHORIZATION": bearer()["Authorization"]}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, text=True)
    whole, streamed = done.stdout.split("\n")
    num_prompt_tokens = len("system\nAnswer in one line.") + 3 + len("user\nWhat is in Austin?") + 3 + 11
    assert whole == digits(num_prompt_tokens, 32)
    assert streamed == digits(len("user\nCount to three.") + 3 + 11, 32)


def test_a_response_is_created_and_known_by_its_id(client: OpenAI) -> None:
    response = client.responses.create(model="mock", input="hi", max_output_tokens=4, metadata={"k": "v"})
    assert response.usage is not None
    assert response.output_text == digits(response.usage.input_tokens, 4)
    assert (response.status, response.metadata, response.usage.output_tokens) == ("incomplete", {"k": "v"}, 4)
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    later = client.responses.retrieve(response.id)
    assert (later.id, later.status, later.output, later.usage) == (response.id, "incomplete", [], response.usage)


def test_a_conversation_goes_on_with_the_output_of_the_last_answer(client: OpenAI) -> None:
    first = client.responses.create(model="mock", instructions="be brief", input="hi", max_output_tokens=2)
    turns: list[Any] = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    second = client.responses.create(
        model="mock", instructions="be brief", input=[*turns, {"role": "user", "content": "on"}], max_output_tokens=2
    )
    assert first.usage is not None and second.usage is not None
    # `assistant\n` stood at the end of the first prompt; then two digits and two marks, and a whole turn of `on`.
    assert second.usage.input_tokens == first.usage.input_tokens + 2 + 2 + len("user\non") + 3 + len("assistant\n") + 1


def test_a_stream_holds_every_event_in_order(client: OpenAI) -> None:
    with client.responses.create(
        model="mock", input="hi", max_output_tokens=5, stream=True, include=[LOGPROBS], top_logprobs=1
    ) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if kinds[:place][-1:] != [kind]] == ORDER
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.usage is not None
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    text = "".join(event.delta for event in deltas)
    assert text == last.response.output_text == digits(last.response.usage.input_tokens, 5)
    assert "".join(entry.token for event in deltas for entry in event.logprobs) == text


def test_the_clients_own_stream_puts_the_response_together(client: OpenAI) -> None:
    with client.responses.stream(model="mock", input="hi", max_output_tokens=5) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert len(snapshots[-1]) == 5


def check_call(call: ResponseFunctionToolCall) -> None:
    arguments = json.loads(call.arguments)
    assert (call.name, call.status, arguments.keys()) == ("get_weather", "completed", {"city", "days"})
    assert arguments["city"] in ("Aix", "Paris") and arguments["days"] in (1, 2, 3)


def test_a_required_call_is_made_and_its_result_goes_back(client: OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.responses.create(model="mock", input=asked, tools=[WEATHER], tool_choice="required")
    (call,) = first.output
    assert call.type == "function_call"
    check_call(call)
    assert first.status == "completed" and first.output_text == ""
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    turns = [*asked, call.to_dict(), result]
    second = client.responses.create(model="mock", input=turns, tools=[WEATHER], max_output_tokens=3)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.output_text == digits(second.usage.input_tokens, 3)


def test_a_call_is_streamed_in_the_order_of_its_events(client: OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    with client.responses.stream(model="mock", input="hi", tools=[WEATHER], tool_choice=choice) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if kinds[:place][-1:] != [kind]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (call,) = final.output
    assert call.type == "function_call"
    check_call(call)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and "".join(deltas) == call.arguments


def test_an_answer_is_parsed_as_the_type_that_it_was_asked_in(client: OpenAI) -> None:
    response = client.responses.parse(model="mock", input="hi", text_format=Weather)
    assert response.status == "completed" and response.output_parsed is not None
    assert response.output_parsed == Weather.model_validate_json(response.output_text)
    loose = client.responses.create(
        model="mock", input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=20
    )
    assert loose.output_text.lstrip().startswith("{")


def test_another_connection_cancels_a_running_response(client: OpenAI, service: Service) -> None:
    with client.responses.create(model="mock", input="hi", max_output_tokens=2000, stream=True) as stream:
        created = next(stream)
        assert created.type == "response.created"
        response_id = created.response.id
        assert client.responses.retrieve(response_id).status == "in_progress"
        cancelled = client.responses.cancel(response_id)
        assert (cancelled.id, cancelled.status, cancelled.error) == (response_id, "cancelled", None)
        last = list(stream)[-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.error and last.response.error.message) == (
        "cancelled",
        "The request was aborted.",
    )
    assert client.responses.retrieve(response_id).status == "cancelled"
    assert client.responses.cancel(response_id).status == "cancelled"


def test_a_foreign_response_is_as_unknown_as_one_that_never_was(client: OpenAI, service: Service) -> None:
    response = client.responses.create(model="mock", input="hi", max_output_tokens=1)
    never = "resp_" + "0" * 32
    with connect(service, "beta") as stranger:
        for call in (stranger.responses.retrieve, stranger.responses.cancel):
            texts = []
            for response_id in (response.id, never):
                with pytest.raises(openai.NotFoundError) as caught:
                    call(response_id)
                texts.append(caught.value.message.replace(response_id, ""))
            assert texts[0] == texts[1]


def test_a_response_that_fails_before_its_first_text_keeps_its_status(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.responses.create(model="mock", input="break")


@pytest.mark.parametrize(
    ("members", "error", "text"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "The model 'gpt-9' does not exist"),
        ({"previous_response_id": "resp_1"}, openai.BadRequestError, "nothing is stored"),
        ({"background": True}, openai.BadRequestError, "background: is not served"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type: Input should be"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice: needs tools"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "strange"}}}},
            openai.BadRequestError,
            "text.format.schema: ",
        ),
        ({"reasoning": {"effort": "high"}}, openai.BadRequestError, "reasoning.effort"),
        ({"truncation": "auto"}, openai.BadRequestError, "truncation: Input should be 'disabled'"),
        ({"temperature": 3}, openai.BadRequestError, "less than or equal to 2; it is 3"),
        ({"max_output_tokens": 5000}, openai.BadRequestError, "maximum context length is 2048 tokens"),
    ],
)
def test_a_refusal_is_the_clients_own_exception_with_our_text(
    client: OpenAI, members: dict[str, Any], error: type[openai.APIStatusError], text: str
) -> None:
    body: dict[str, Any] = {"model": "mock", "input": "hi", **members}
    with pytest.raises(error) as caught:
        client.responses.create(**body)
    assert text in caught.value.message


def test_leaving_a_stream_frees_its_row(client: OpenAI) -> None:
    with client.responses.create(model="mock", input="hi", max_output_tokens=2000, stream=True) as stream:
        created = next(stream)
        assert created.type == "response.created"
    wait_for(lambda: client.responses.retrieve(created.response.id).status == "cancelled", 2.0, "end of the response")


def test_a_backend_that_dies_fails_the_response_that_has_begun(client: OpenAI, service: Service) -> None:
    with client.responses.create(model="mock", input="hi", max_output_tokens=2000, stream=True) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                os.kill(service.backend_pid, signal.SIGKILL)
                break
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert (last.response.status, last.response.error.code, last.response.error.type) == (
        "failed",
        "server_error",
        "backend_lost",
    )
    assert last.response.output_text
    wait_for(service.is_healthy, START_SECONDS[True], "a new backend")
