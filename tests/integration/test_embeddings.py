"""Run embeddings through the whole service on the mock: OpenAI's own client, many inputs, leavers, a batch window.

The client checks answers against its own types where they are asked for as `float`: those know no base64, which it asks
for by itself.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from tests.integration.raw_http import RawStream
from tests.integration.service import ROOT, Service, bearer, in_parallel, new_request_id, running_service, wait_for

MODEL = "smollm2-135m-instruct"
"""The name that docs/clients.md uses."""

NUM_ROWS, NUM_PLACES = 4, 2
TEXTS = [f"text {place} " * (1 + place % 5) for place in range(40)]
NOTICE_SECONDS = 2.0


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A small service: forty inputs are many times its rows and places."""
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS=str(NUM_PLACES),
        INFERENCE_API_PREFILL_CHUNK_TOKENS="16",
        SERVED_MODEL_NAMES=f"{MODEL},alias",
    ) as running:
        yield running


@pytest.fixture(scope="module")
def slow() -> Iterator[Service]:
    """The same, making 40 embeddings or tokens a second."""
    with running_service(
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS="0",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="64",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="40",
    ) as running:
        yield running


@contextlib.contextmanager
def connected(service: Service, *, strict: bool) -> Iterator[OpenAI]:
    key = bearer()["Authorization"].removeprefix("Bearer ")
    with OpenAI(
        base_url=f"{service.proxy_url}/v1",
        api_key=key,
        max_retries=0,
        timeout=30,
        _strict_response_validation=strict,
    ) as client:
        yield client


@pytest.fixture
def client(service: Service) -> Iterator[OpenAI]:
    with connected(service, strict=False) as client:
        yield client


@pytest.fixture
def strict(service: Service) -> Iterator[OpenAI]:
    with connected(service, strict=True) as client:
        yield client


def embed(service: Service, texts: list[str], **members: object) -> list[str]:
    """Return the embeddings of texts in base64, asked of the server itself."""
    body = {"model": service.get("/v1/models").json()["data"][0]["id"], "input": texts, "encoding_format": "base64"}
    answer = service.post("/v1/embeddings", {**body, **members})
    assert answer.status_code == 200, answer.text
    return [one["embedding"] for one in answer.json()["data"]]


def test_the_documented_snippet_runs_as_it_is(service: Service) -> None:
    page = (ROOT / "docs" / "clients.md").read_text("utf-8")
    (snippet,) = re.findall(r"<!-- run: embeddings -->\n```python\n(.*?)```", page, re.DOTALL)
    program = snippet.replace("127.0.0.1:1223", f"127.0.0.1:{service.proxy_port}")
    environ = {**os.environ, "AUTHORIZATION": bearer()["Authorization"]}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, text=True)
    assert re.fullmatch(r"(-?[01]\.\d{3}  [A-Z].*\.\n){2}", done.stdout)


def test_the_clients_own_encoding_is_the_same_numbers_as_the_plain_one(client: OpenAI, strict: OpenAI) -> None:
    coded = client.embeddings.create(model=MODEL, input="hello")
    plain = strict.embeddings.create(model="alias", input="hello", encoding_format="float")
    assert [one.embedding for one in coded.data] == [one.embedding for one in plain.data]
    assert math.hypot(*plain.data[0].embedding) == pytest.approx(1.0, abs=1e-6)
    assert (coded.model, coded.object, coded.data[0].object) == (MODEL, "list", "embedding")
    assert (coded.usage.prompt_tokens, coded.usage.total_tokens) == (5, 5)


def test_many_times_more_inputs_than_rows_and_places_are_answered_in_order(client: OpenAI) -> None:
    together = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [one.index for one in together.data] == list(range(len(TEXTS)))
    assert together.usage.prompt_tokens == sum(map(len, TEXTS))
    alone = [client.embeddings.create(model=MODEL, input=text).data[0].embedding for text in TEXTS[:6]]
    assert [one.embedding for one in together.data[:6]] == alone
    assert len({tuple(one.embedding) for one in together.data}) == len(TEXTS)


def test_ids_are_embedded_as_the_text_that_they_are(client: OpenAI) -> None:
    by_ids = client.embeddings.create(model=MODEL, input=[list(b"hello"), list(b"you")])
    by_text = client.embeddings.create(model=MODEL, input=["hello", "you"])
    assert [one.embedding for one in by_ids.data] == [one.embedding for one in by_text.data]


def test_an_embedding_depends_on_its_own_input_alone(service: Service) -> None:
    alone = {text: embed(service, [text], normalize=False)[0] for text in TEXTS[:8]}
    orders = [TEXTS[:8], TEXTS[7::-1], TEXTS[3:8] + TEXTS[:3]]
    found = in_parallel([lambda order=order: embed(service, order, normalize=False) for order in orders])
    assert found == [[alone[text] for text in order] for order in orders]


def test_the_mean_and_the_last_differ_and_their_length_is_the_models(service: Service) -> None:
    mean, last = (embed(service, ["hello"], pooling=pooling, normalize=False)[0] for pooling in ("mean", "last"))
    assert mean != last
    size = len(base64.b64decode(mean)) // 4
    assert embed(service, ["hello"], dimensions=size)
    refused = service.post("/v1/embeddings", {"model": MODEL, "input": "hello", "dimensions": size + 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
    assert struct.unpack(f"<{size}f", base64.b64decode(mean))


def test_what_cannot_be_embedded_is_a_bad_request_with_our_text(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: is empty"):
        client.embeddings.create(model=MODEL, input=["x", ""])
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 2048 tokens") as caught:
        client.embeddings.create(model=MODEL, input=["x", "x" * 2049])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="gpt-9", input="x")
    assert client.embeddings.create(model=MODEL, input="x" * 2048).usage.prompt_tokens == 2048


def test_a_call_of_many_inputs_leaves_rows_to_others_though_there_is_no_queue(slow: Service) -> None:
    def ask() -> int:
        return slow.post("/inference/mock", {"text": "hi", "max_tokens": 3}).status_code

    found = in_parallel([lambda: len(embed(slow, TEXTS)), *[ask] * (NUM_ROWS // 2)])
    assert found == [len(TEXTS), *[200] * (NUM_ROWS // 2)]


def test_a_client_that_leaves_ends_what_runs_and_what_would_have_come(slow: Service) -> None:
    before = slow.metric("inference_api_requests_total")
    body = {"model": "mock", "input": TEXTS * 6}
    request_id = new_request_id()
    with RawStream(slow.port, "/v1/embeddings", body, {"Request-Id": request_id}):
        wait_for(lambda: slow.metric("inference_api_requests_total") > before + NUM_ROWS, 5.0, "some of them")
    wait_for(lambda: slow.num_rows_in_use() == 0, NOTICE_SECONDS, "free rows")
    num_requests = slow.metric("inference_api_requests_total")
    assert len(embed(slow, ["hi"])) == 1
    assert slow.metric("inference_api_requests_total") == num_requests + 1 < before + len(TEXTS * 6)


def test_a_window_for_batches_changes_no_embedding(service: Service) -> None:
    with running_service(INFERENCE_API_BATCH_WINDOW_SECONDS="0.05", INFERENCE_API_BATCH_MAX_REQUESTS="8") as batching:
        assert embed(batching, TEXTS, normalize=False) == embed(service, TEXTS, normalize=False)


def test_a_call_with_a_key_is_repeated_with_all_its_inputs(service: Service) -> None:
    body = {"model": MODEL, "input": TEXTS[: NUM_ROWS * 2]}
    num_requests = service.metric("inference_api_requests_total")
    first, again = (service.post("/v1/embeddings", body, headers={"Idempotency-Key": "once"}) for _ in range(2))
    assert first.status_code == again.status_code == 200
    assert first.content == again.content and again.headers["idempotent-replayed"] == "true"
    assert service.metric("inference_api_requests_total") == num_requests + NUM_ROWS * 2
