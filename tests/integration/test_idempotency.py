"""Check on the whole service, behind the proxy and with several workers, that a call with a key is made once.

The mock answers noise, which depends on every id before and on the seed: equal bytes are the same generation.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, in_parallel, running_service, wait_for

MODEL = "mock"
NUM_TOKENS = 60
START_SECONDS = 5.0
NOTICE_SECONDS = 1.5
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": NUM_TOKENS}
TEXT = {"text": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True}
RAW = "/inference/mock"
CALLS: list[tuple[str, dict[str, Any]]] = [
    (RAW, TEXT),
    ("/chat/mock", TEXT),
    ("/v1/chat/completions", {**HELLO, "ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {**HELLO, "ignore_eos": True, "n": 2, "logprobs": True}),
    ("/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 20, "prompt_logprobs": 1}),
    (
        "/v1/completions",
        {
            "model": MODEL,
            "prompt": "a",
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 20}),
    ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 20, "stream": True}),
    ("/v1/messages", {**HELLO, "max_tokens": 20}),
    ("/v1/messages", {**HELLO, "max_tokens": 20, "stream": True}),
    ("/generate", {"inputs": "hello", "parameters": {"max_new_tokens": 20, "do_sample": True, "details": True}}),
    ("/generate_stream", {"inputs": "hello", "parameters": {"max_new_tokens": 20, "do_sample": True}}),
    ("/v1/embeddings", {"model": MODEL, "input": ["a", "b", "c"]}),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of three workers, four rows and no queue, that makes 200 tokens a second."""
    with running_service(
        proxy=True,
        INFERENCE_API_WORKERS="3",
        INFERENCE_API_ROWS="4",
        INFERENCE_API_QUEUE_REQUESTS="0",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_MODE="noise",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="200",
        SERVED_MODEL_NAMES=MODEL,
    ) as running:
        wait_for(lambda: len(running.worker_pids) == 3, START_SECONDS, "three workers")
        yield running


def named(key: str, tenant: str = "alpha") -> dict[str, str]:
    """Return the headers of a call with a key."""
    return {**bearer(tenant), "Idempotency-Key": key}


def call(service: Service, path: str, body: object, key: str, tenant: str = "alpha") -> requests.Response:
    """Make a call behind the proxy and read it whole."""
    return requests.post(service.proxy_url + path, json=body, headers=named(key, tenant), timeout=60)


def stream(service: Service, body: object, key: str) -> RawStream:
    """Begin a call of the raw route behind the proxy."""
    assert service.proxy_port is not None
    return RawStream(service.proxy_port, RAW, body, named(key))


def num_rows_in_use(service: Service) -> int:
    """Return the number of rows in use."""
    return int(requests.get(service.proxy_url + "/rows", headers=bearer(), timeout=30).json()["num_rows_in_use"])


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_repetition_gets_the_same_bytes_and_computes_nothing(
    service: Service, path: str, body: dict[str, Any]
) -> None:
    key = f"same-{CALLS.index((path, body))}"
    first = call(service, path, body, key)
    assert first.status_code == 200, first.text
    made = service.metric("inference_api_scheduled_tokens_total")
    repeated = [call(service, path, body, key) for _ in range(3)]
    assert service.metric("inference_api_scheduled_tokens_total") == made
    assert [answer.content for answer in repeated] == [first.content] * 3
    assert "Idempotent-Replayed" not in first.headers
    for answer in repeated:
        assert answer.headers["Idempotent-Replayed"] == "true"
        for name in ("Request-Id", "X-Inference-Seed", "X-Inference-Decode-Ms", "Content-Type"):
            assert answer.headers.get(name) == first.headers.get(name)


def test_repetitions_at_the_same_time_read_one_generation_and_take_one_row(service: Service) -> None:
    with stream(service, TEXT, "together") as first:
        assert first.read_chunk()
        bodies = in_parallel([lambda: call(service, RAW, TEXT, "together") for _ in range(6)])
        first.read_all()
        assert first.whole
    assert {answer.status_code for answer in bodies} == {200}
    assert {answer.content for answer in bodies} == {first.body}
    assert service.metric("inference_api_refused_total") == 0


def test_calls_that_come_together_are_one_call(service: Service) -> None:
    made = service.metric("inference_api_requests_total")
    answers = in_parallel([lambda: call(service, RAW, TEXT, "race") for _ in range(8)])
    assert len({answer.content for answer in answers}) == 1
    assert {answer.status_code for answer in answers} == {200}
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert service.metric("inference_api_requests_total") - made == 1


def test_a_repetition_after_its_client_left_goes_on_and_gets_what_an_undisturbed_call_gets(service: Service) -> None:
    left = stream(service, TEXT, "left")
    for _ in range(10):
        assert left.read_chunk()
    left.close()
    wait_for(lambda: num_rows_in_use(service) == 0, NOTICE_SECONDS, "a free row")
    made = service.metric("inference_api_completion_tokens_total")
    again = call(service, RAW, TEXT, "left")
    assert again.headers["Idempotent-Replayed"] == "true"
    num_made = service.metric("inference_api_completion_tokens_total") - made
    assert 0 < num_made <= NUM_TOKENS - 10
    seeded = {**TEXT, "seed": int(again.headers["X-Inference-Seed"])}
    undisturbed = requests.post(service.proxy_url + RAW, json=seeded, headers=bearer(), timeout=60)
    assert again.content == undisturbed.content
    assert again.content.startswith(left.body)
    view = requests.get(
        f"{service.proxy_url}/v1/requests/{again.headers['Request-Id']}", headers=bearer(), timeout=30
    ).json()
    assert (view["num_completion_tokens"], view["finish_reason"]) == (NUM_TOKENS, "length")


def test_one_that_leaves_does_not_disturb_another_that_reads_the_same(service: Service) -> None:
    with contextlib.ExitStack() as streams:
        first, second = [streams.enter_context(stream(service, TEXT, "one-leaves")) for _ in range(2)]
        assert first.read_chunk() and second.read_chunk()
        first.reset()
        second.read_all()
        assert second.whole
        assert call(service, RAW, TEXT, "one-leaves").content == second.body


def test_the_owners_delete_ends_it_for_all_who_read(service: Service) -> None:
    with stream(service, TEXT, "deleted") as first, stream(service, TEXT, "deleted") as second:
        assert first.read_chunk() and second.read_chunk()
        url = f"{service.proxy_url}/v1/requests/{first.headers['request-id']}"
        assert requests.delete(url, headers=bearer("beta"), timeout=30).status_code == 404
        assert requests.delete(url, headers=bearer(), timeout=30).status_code == 202
        for reader in (first, second):
            reader.read_all()
            assert not reader.whole
    wait_for(lambda: num_rows_in_use(service) == 0, NOTICE_SECONDS, "a free row")


def test_another_body_or_route_under_the_key_is_a_409_and_the_first_goes_on(service: Service) -> None:
    with stream(service, TEXT, "reused") as first:
        assert first.read_chunk()
        for path, body in ((RAW, {**TEXT, "max_tokens": 3}), ("/predictions/mock", TEXT)):
            answer = call(service, path, body, "reused")
            assert (answer.status_code, answer.headers["X-Error-Code"]) == (409, "idempotency_key_reused")
        first.read_all()
        assert first.whole


def test_another_tenant_has_its_own_keys(service: Service) -> None:
    first = call(service, RAW, TEXT, "shared")
    other = call(service, RAW, {**TEXT, "max_tokens": 5}, "shared", tenant="beta")
    assert (first.status_code, other.status_code) == (200, 200)
    assert "Idempotent-Replayed" not in other.headers
    assert other.headers["Request-Id"] != first.headers["Request-Id"]


def test_after_its_time_a_key_names_a_new_call() -> None:
    with running_service(INFERENCE_API_IDEMPOTENCY_SECONDS="0.5") as brief:
        headers = {"Idempotency-Key": "key"}
        assert brief.post(RAW, TEXT, headers=headers).status_code == 200
        other = {**TEXT, "max_tokens": 1}
        wait_for(lambda: brief.post(RAW, other, headers=headers).status_code == 200, 5.0, "the end of the record")


def test_a_call_that_found_no_place_is_no_record_and_a_repetition_needs_none(service: Service) -> None:
    long = {**TEXT, "max_tokens": 2000}
    with contextlib.ExitStack() as streams:
        for number in range(4):
            holder = streams.enter_context(stream(service, long, f"holder-{number}"))
            assert holder.read_chunk()
        assert call(service, RAW, TEXT, "no-place").status_code == 503
        with stream(service, long, "holder-0") as follower:
            assert follower.status == 200
            assert follower.read_chunk()
    wait_for(lambda: num_rows_in_use(service) == 0, NOTICE_SECONDS, "free rows")
    assert call(service, RAW, {**TEXT, "max_tokens": 5}, "no-place").status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
def test_a_header_that_is_no_key_is_a_400_by_its_name(service: Service, key: str) -> None:
    answer = call(service, "/v1/completions", {"model": MODEL, "prompt": "a"}, key)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_openais_client_gets_the_same_objects(service: Service) -> None:
    client = openai.OpenAI(
        base_url=service.proxy_url + "/v1", api_key=bearer()["Authorization"].removeprefix("Bearer "), max_retries=0
    )
    headers = {"Idempotency-Key": "openai"}
    with client:
        answers = [
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=20, extra_headers=headers
            )
            for _ in range(2)
        ]
        assert answers[0] == answers[1]
        with pytest.raises(openai.ConflictError):
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "ho"}], max_tokens=20, extra_headers=headers
            )


def test_a_backend_that_is_killed_has_forgotten_and_a_repetition_runs_anew(service: Service) -> None:
    first = call(service, "/v1/chat/completions", {**HELLO, "ignore_eos": True}, "killed").json()
    os.kill(service.backend_pid, signal.SIGKILL)
    wait_for(lambda: not service.is_healthy(), START_SECONDS, "the end of the backend")
    wait_for(service.is_healthy, START_SECONDS * 3, "the next backend")
    again = call(service, "/v1/chat/completions", {**HELLO, "ignore_eos": True}, "killed")
    assert "Idempotent-Replayed" not in again.headers
    assert again.json()["id"] == first["id"]
    assert again.json()["choices"] == first["choices"]
