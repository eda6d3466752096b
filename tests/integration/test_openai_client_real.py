"""Run OpenAI's own client against the real model through the proxy: chat, text, streams, several answers, logprobs.

Calls are made by Anthropic's client too, of the same service.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolUnionParam

from tests.integration.service import Service, bearer, running_service

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

MODEL = "smollm2-135m-instruct"
PROMPT = "The capital of France is"
GREEDY_TEXT = " Paris."
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Answer with one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(model_image_path: object) -> Iterator[OpenAI]:
    """Return a client of a service with the `fused` engine."""
    with running_service(
        proxy=True, mock=False, INFERENCE_API_INSECURE_DEV="0", INFERENCE_API_ENGINE="fused"
    ) as service:
        yield from _connected(service)


def _connected(service: Service) -> Iterator[OpenAI]:
    key = bearer()["Authorization"].removeprefix("Bearer ")
    with OpenAI(
        base_url=f"{service.proxy_url}/v1",
        api_key=key,
        max_retries=0,
        timeout=120,
        _strict_response_validation=True,
    ) as client:
        yield client


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_greedy_text_is_continued_and_its_logprobs_are_those_of_a_distribution(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=5)
    (choice,) = answer.choices
    assert choice.text.startswith(GREEDY_TEXT)
    told = choice.logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert "".join(told.tokens) == choice.text
    assert told.text_offset == [len("".join(told.tokens[:place])) for place in range(len(told.tokens))]
    for logprob, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob == max(top.values()) <= 0.0
        assert len(top) <= 5 and sum(math.exp(one) for one in top.values()) <= 1.0 + 1e-6


def test_a_streamed_chat_is_the_whole_one_with_the_same_logprobs(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    with client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert "Paris" in (whole.choices[0].message.content or "")
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    told = whole.choices[0].logprobs
    assert told is not None and told.content is not None
    streamed = [one for choice in choices if choice.logprobs for one in choice.logprobs.content or []]
    assert [(one.token, one.bytes) for one in streamed] == [(one.token, one.bytes) for one in told.content]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in told.content], abs=1e-3)
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_several_drawn_answers_differ_and_a_seed_repeats_all_of_them(client: OpenAI) -> None:
    def drawn() -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt=["Once upon a time", PROMPT], n=3, max_tokens=8, temperature=1.2, seed=11
        )
        return [choice.text for choice in answer.choices]

    first = drawn()
    assert len(first) == 6 and len(set(first)) > 2
    assert drawn() == first


def test_best_of_returns_what_is_likeliest_of_all_that_were_made(client: OpenAI) -> None:
    def mean(choice_logprobs: list[float] | None) -> float:
        assert choice_logprobs
        return sum(choice_logprobs) / len(choice_logprobs)

    shared: dict[str, object] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 1.5,
        "seed": 5,
        "logprobs": 0,
    }
    shared["extra_body"] = {"ignore_eos": True}  # the end counts too, and its logprob is not told
    every = client.completions.create(n=4, **shared)  # type: ignore[call-overload]
    best = client.completions.create(n=1, best_of=4, **shared)  # type: ignore[call-overload]
    means = {choice.text: mean(choice.logprobs.token_logprobs) for choice in every.choices}
    assert best.choices[0].text == max(means, key=lambda text: means[text])


def test_a_required_call_is_made_by_a_small_model_with_arguments_of_the_schema_streamed_and_whole(
    client: OpenAI,
) -> None:
    tools: list[ChatCompletionToolUnionParam] = [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
        }
    ]
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    whole = client.chat.completions.create(
        model=MODEL, messages=asked, tools=tools, tool_choice="required", temperature=0, max_tokens=100
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
    streamed = ""
    with client.chat.completions.create(
        model=MODEL, messages=asked, tools=tools, tool_choice="required", temperature=0, max_tokens=100, stream=True
    ) as stream:
        for chunk in stream:
            for piece in chunk.choices[0].delta.tool_calls or ():
                assert piece.function is not None
                streamed += piece.function.arguments or ""
    assert streamed == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    turns = [*asked, choice.message.model_dump(), result]
    answer = client.chat.completions.create(model=MODEL, messages=turns, tools=tools, max_tokens=4)  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.prompt_tokens > (whole.usage.prompt_tokens if whole.usage else 0)


def test_the_same_call_is_made_for_anthropics_client_streamed_and_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"name": "get_weather", "description": "Weather of a city", "input_schema": CITY}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "max_tokens": 100,
        "extra_body": {"temperature": 0},
    }
    base_url = str(client.base_url).removesuffix("/v1/")
    with anthropic.Anthropic(base_url=base_url, auth_token=client.api_key, max_retries=0, timeout=120) as other:
        whole = other.messages.create(**asked)
        with other.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        (call,), (again,) = whole.content, streamed.content
        assert call.type == again.type == "tool_use" and call.name == "get_weather"
        assert call.input == again.input
        assert call.input.keys() == {"city", "unit"} and call.input["unit"] in ("celsius", "fahrenheit")
        assert whole.stop_reason == streamed.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
        turns = [*asked["messages"], whole.to_param(), {"role": "user", "content": [result]}]
        answer = other.messages.create(**{**asked, "messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 8})
    assert all(block.type == "text" for block in answer.content)
