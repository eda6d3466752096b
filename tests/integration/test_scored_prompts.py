"""Run scored prompts through the whole service on the mock: echoes with logprobs, as harnesses ask for them, and TGI's.

OpenAI's client reads them without its strict mode where the first token's null is told: its types know none there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI
from openai.types import Completion

from tests.integration.service import Service, bearer, in_parallel, running_service

PROMPT = "say h\u00e9 \U0001f642 " * 9
"""Some 140 ids: its logprobs come in several steps."""


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service(
        proxy=True, INFERENCE_API_PREFILL_CHUNK_TOKENS="32", INFERENCE_API_MOCK_MODE="noise", SERVED_MODEL_NAMES="mock"
    ) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with connected(service, strict=False) as client:
        yield client


def connected(service: Service, *, strict: bool) -> OpenAI:
    return OpenAI(
        base_url=f"{service.proxy_url}/v1",
        api_key=bearer()["Authorization"].removeprefix("Bearer "),
        max_retries=0,
        timeout=30,
        _strict_response_validation=strict,
    )


def scored(client: OpenAI, **members: Any) -> Completion:
    return client.completions.create(
        **{"model": "mock", "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 0, "seed": 3, **members}
    )


def test_a_prompt_alone_is_told_with_a_logprob_for_every_token_but_the_first(client: OpenAI) -> None:
    answer = scored(client)
    (choice,) = answer.choices
    told = choice.logprobs
    assert told is not None and told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    num_tokens = len(PROMPT.encode())
    assert (choice.text, "".join(told.tokens), choice.finish_reason) == (PROMPT, PROMPT, "length")
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == num_tokens
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    assert all(logprob <= 0.0 for logprob in told.token_logprobs[1:])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_tokens, 0)


def test_offsets_are_those_of_characters_though_tokens_are_bytes(client: OpenAI) -> None:
    told = scored(client).choices[0].logprobs
    assert told is not None and told.tokens and told.text_offset
    for text, offset in zip(told.tokens, told.text_offset, strict=True):
        assert PROMPT[offset : offset + len(text)] == text
    assert told.text_offset == sorted(told.text_offset)


def test_a_batch_of_prompts_in_ids_is_scored_as_each_of_them_alone(client: OpenAI) -> None:
    prompts = [list(text.encode()) for text in ("one", "a longer one", "x")]
    together = [choice.logprobs for choice in scored(client, prompt=prompts, max_tokens=1).choices]
    alone = in_parallel([lambda ids=ids: scored(client, prompt=ids, max_tokens=1).choices[0] for ids in prompts])
    for one, other, ids in zip(together, alone, prompts, strict=True):
        assert one is not None and other.logprobs is not None and one.token_logprobs and other.logprobs.token_logprobs
        assert one.token_logprobs[: len(ids)] == other.logprobs.token_logprobs[: len(ids)]


def test_a_stream_tells_the_prompt_first_and_joins_to_the_whole(client: OpenAI) -> None:
    (whole,) = scored(client, max_tokens=12).choices
    chunks = list(scored(client, max_tokens=12, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        streamed = [one for chunk in chunks for one in getattr(chunk.choices[0].logprobs, name)]
        assert streamed == getattr(whole.logprobs, name), name


def test_vllms_prompt_logprobs_are_told_by_id_and_pass_the_clients_own_types(service: Service) -> None:
    with connected(service, strict=True) as strict:
        extra = {"prompt_logprobs": 1}
        text = strict.completions.create(model="mock", prompt="hello", max_tokens=1, extra_body=extra)
        chat = strict.chat.completions.create(
            model="mock", messages=[{"role": "user", "content": "hi"}], max_tokens=1, extra_body=extra
        )
    told: Any = text.choices[0].model_extra
    assert told is not None and told["prompt_logprobs"][0] is None
    assert [next(iter(one)) for one in told["prompt_logprobs"][1:]] == [str(byte) for byte in b"ello"]
    beside: Any = chat.model_extra
    assert chat.usage is not None and len(beside["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_the_hubs_client_is_told_the_prompts_logprobs(service: Service, client: OpenAI) -> None:
    key = bearer()["Authorization"].removeprefix("Bearer ")
    with InferenceClient(base_url=service.proxy_url, api_key=key, timeout=30) as hub:
        answer = hub.text_generation("hello", max_new_tokens=1, details=True, decoder_input_details=True)
    huggingface_hub.close_session()
    told = scored(client, prompt="hello").choices[0].logprobs
    assert told is not None
    assert [token.logprob for token in answer.details.prefill] == told.token_logprobs
    assert "".join(token.text for token in answer.details.prefill) == "hello"
