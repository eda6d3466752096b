"""Check the embeddings route over HTTP with a client that answers from a script: two numbers for each prompt."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import TestResponse

from inference_api.errors import DrainingError, GenerationError, InvalidRequestError, OverloadedError
from inference_api.messages import Finished, Pooling
from inference_api.server.embeddings import MAX_INPUTS, normalised
from inference_api.server.paced_choices import PacedChoices
from tests.server.fakes import READY, FakeClient, embedding_of, finished

SIZE = 2


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.ready = msgspec.structs.replace(READY, embedding_size=SIZE)
    fake_client.pieces = []
    return make_app(body_bytes=65_536)


def post(app: Flask, **members: Any) -> TestResponse:
    return app.test_client().post("/v1/embeddings", json={"model": "mock", "input": "hello", **members})


def whole(app: Flask, **members: Any) -> Any:
    response = post(app, **members)
    assert response.status_code == 200, response.get_data(as_text=True)
    return response.get_json()


def refusal(app: Flask, **members: Any) -> tuple[int, str, str | None]:
    response = post(app, **members)
    error = response.get_json()["error"]
    return response.status_code, error["message"], error["param"]


def expected(prompt: bytes) -> list[float]:
    """Return what the script answers to a prompt, with the length 1, in single precision."""
    numbers = struct.unpack("<2f", embedding_of(list(prompt)))
    length = math.hypot(*numbers)
    return list(struct.unpack("<2f", struct.pack("<2f", *(number / length for number in numbers))))


def test_a_text_is_embedded_with_the_length_1(app: Flask, fake_client: FakeClient) -> None:
    response = post(app)
    assert response.get_json() == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": expected(b"hello")}],
        "model": "mock",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    submit = fake_client.last
    assert (bytes(submit.token_ids), submit.max_tokens, submit.pooling, submit.batches) == (b"hello", 0, "mean", True)
    assert response.headers["X-Inference-Prompt-Tokens"] == "5"
    assert "X-Inference-Seed" not in response.headers, "nothing is drawn"


def test_embeddings_are_encoded_without_holding_up_the_worker(app: Flask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_api.server.responses.json", None)
    assert post(app, input=["a", "b"]).status_code == 200


def test_base64_holds_the_same_numbers_as_little_endian_fp32(app: Flask) -> None:
    (one,) = whole(app, encoding_format="base64")["data"]
    assert list(struct.unpack("<2f", base64.b64decode(one["embedding"]))) == expected(b"hello")
    assert whole(app, encoding_format="float")["data"] == whole(app)["data"]


def test_an_embedding_may_be_had_as_it_was_pooled(app: Flask, fake_client: FakeClient) -> None:
    (one,) = whole(app, normalize=False, pooling="last")["data"]
    assert one["embedding"] == list(struct.unpack("<2f", embedding_of(b"hello")))
    assert fake_client.last.pooling is Pooling.LAST


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("hi", [b"hi"]),
        (["hi", "you", "hi"], [b"hi", b"you", b"hi"]),
        ([104, 105], [b"hi"]),
        ([[104, 105], [121]], [b"hi", b"y"]),
        (["x" * 64], [b"x" * 64]),
    ],
)
def test_every_form_of_input_is_answered_in_its_order_and_counted(app: Flask, given: Any, prompts: list[bytes]) -> None:
    body = whole(app, input=given)
    assert [one["index"] for one in body["data"]] == list(range(len(prompts)))
    assert [one["embedding"] for one in body["data"]] == [expected(prompt) for prompt in prompts]
    assert body["usage"]["total_tokens"] == sum(map(len, prompts))


def test_more_inputs_than_rows_are_all_answered(app: Flask, fake_client: FakeClient) -> None:
    texts = [chr(33 + place % 90) * (1 + place % 7) for place in range(MAX_INPUTS)]
    data = whole(app, input=texts)["data"]
    assert [one["embedding"] for one in data] == [expected(text.encode()) for text in texts]
    assert len({submit.session_id for submit in fake_client.submits}) == MAX_INPUTS
    assert len({submit.request_id for submit in fake_client.submits}) == 1


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 1), (2, 1), (5, 2), (32, 16)])
def test_one_call_has_half_of_the_rows_at_a_time(app, fake_client, monkeypatch, num_rows: int, expected: int) -> None:
    allowed: list[int] = []

    class Noted(PacedChoices):
        def __init__(self, generations: Any, max_open: int) -> None:
            allowed.append(max_open)
            super().__init__(generations, max_open)

    monkeypatch.setattr("inference_api.server.context.PacedChoices", Noted)
    fake_client.ready = msgspec.structs.replace(fake_client.ready, num_rows=num_rows)
    whole(app, input=["x"] * 4)
    assert allowed == [expected]


@pytest.mark.parametrize(
    ("members", "text", "param"),
    [
        ({"input": ""}, "input: is empty; at least one token is needed.", "input"),
        ({"input": ["x", ""]}, "input[1]: is empty; at least one token is needed.", "input[1]"),
        ({"input": [300]}, "input[0]: 300 is outside the vocabulary, whose last id is 258.", "input"),
        (
            {"input": ["x"] * (MAX_INPUTS + 1)},
            f"input: List should have at most {MAX_INPUTS} items, not {MAX_INPUTS + 1}; it is a list of 257.",
            "input",
        ),
        (
            {"dimensions": 5},
            "dimensions: is 5, but an embedding of this model has 2 numbers; leave it out.",
            "dimensions",
        ),
        ({"pooling": "max"}, """pooling: Input should be 'mean' or 'last'; it is "max".""", "pooling"),
        ({"truncate": True}, "Unknown parameter: truncate.", "truncate"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_its_name(app: Flask, fake_client, members, text, param) -> None:
    assert refusal(app, **members) == (400, text, param)
    assert fake_client.submits == []


@pytest.mark.parametrize("empty", [[], [[]], {}, 5, [1.5], ["x", 1]])
def test_an_input_of_another_form_is_refused(app: Flask, empty: Any) -> None:
    status, text, _ = refusal(app, input=empty)
    assert status == 400 and text.startswith("input")


def test_an_input_over_the_context_is_told_in_the_sentence_that_clients_know(app: Flask) -> None:
    response = post(app, input=["x", "x" * 65])
    error = response.get_json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 64 tokens. However, you requested 65 tokens (65 in the prompt, 0 for"
    )


def test_a_model_that_is_not_served_is_a_404_and_an_alias_is_served(app: Flask) -> None:
    assert refusal(app, model="other")[0] == 404
    assert whole(app, model="alias", dimensions=SIZE, user="me")["model"] == "alias"


def test_an_engine_without_embeddings_is_a_400(app: Flask, fake_client: FakeClient) -> None:
    fake_client.ready = READY
    assert refusal(app) == (400, "model: the engine mock makes no embeddings.", "model")
    fake_client.ready = msgspec.structs.replace(READY, embedding_size=SIZE)
    fake_client.refusal = InvalidRequestError("model: makes no embeddings on this engine.", "model")
    assert refusal(app)[0] == 400


def test_before_the_backend_is_ready_it_says_when_to_come_back(app: Flask, fake_client: FakeClient) -> None:
    fake_client.ready = None
    response = post(app)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")


@pytest.mark.parametrize(
    ("refused", "status"), [(OverloadedError("full", 2.5), 503), (DrainingError("stopping", 1.0), 503)]
)
def test_a_refusal_keeps_its_status(app: Flask, fake_client: FakeClient, refused: Exception, status: int) -> None:
    fake_client.refusal = refused
    response = post(app, input=["x", "y"])
    assert response.status_code == status and "Retry-After" in response.headers


def test_one_input_that_fails_fails_the_call_and_the_others_are_aborted(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="deadline_exceeded")
    response = post(app, input=["x", "y", "z"])
    assert response.status_code == 504
    assert response.get_json()["error"]["code"] == "deadline_exceeded"
    assert len(fake_client.aborts) > 0


@pytest.mark.parametrize("embedding", [None, struct.pack("<2f", 0.0, 0.0), struct.pack("<2f", math.nan, 1.0)])
def test_what_is_no_embedding_is_a_fault_and_never_a_number(app, fake_client, monkeypatch, embedding) -> None:
    fake_client.end = Finished(finished().reason, 0, finished().timing, embedding=embedding)
    monkeypatch.setattr("tests.server.fakes.embedding_of", lambda _: embedding)
    response = post(app)
    assert (response.status_code, response.headers["X-Error-Code"]) == (500, "generation_failed")


def test_a_body_that_is_not_json_is_refused(app: Flask) -> None:
    response = app.test_client().post("/v1/embeddings", data="hello", content_type="text/plain")
    assert response.status_code == 400 and "JSON" in json.loads(response.data)["error"]["message"]


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=600).filter(lambda found: any(found)))
def test_every_length_becomes_1_to_a_millionth(numbers: list[float]) -> None:
    packed = normalised(struct.pack(f"<{len(numbers)}f", *numbers))
    found = struct.unpack(f"<{len(numbers)}f", packed)
    assert math.sqrt(math.fsum(one * one for one in found)) == pytest.approx(1.0, abs=1e-6)


def test_nothing_has_no_direction() -> None:
    with pytest.raises(GenerationError):
        normalised(struct.pack("<2f", 0.0, 0.0))
