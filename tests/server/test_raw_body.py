"""Check the prompt that is a request's whole body: taken byte for byte, answered as a pipeline does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import DrainingError, OverloadedError
from inference_api.messages import FinishReason
from inference_api.server.raw_body import MAX_NEW_TOKENS
from tests.server.fakes import FakeClient, finished

SMILE = "\U0001f642"


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.end = finished(FinishReason.STOP, num_tokens=5)
    return make_app()


def post(app: Flask, prompt: str | bytes, content_type: str = "text/plain") -> TestResponse:
    data = prompt.encode() if isinstance(prompt, str) else prompt
    return app.test_client().post("/", data=data, content_type=content_type)


def test_the_answer_is_the_pipelines_list_of_one_and_begins_with_the_prompt(app: Flask, fake_client) -> None:
    response = post(app, "say ")
    assert (response.status_code, response.content_type) == (200, "application/json")
    assert response.get_json() == [{"generated_text": "say Hello"}]
    assert "Request-Id" in response.headers and fake_client.aborts == []


def test_it_is_greedy_and_may_wait_for_others_like_it(app: Flask, fake_client: FakeClient) -> None:
    post(app, "say ")
    submit = fake_client.last
    assert (submit.sampling.temperature, submit.batches, submit.pooling) == (0.0, True, None)
    assert submit.max_tokens == 64 - len("say ") < MAX_NEW_TOKENS, "clamped to what the context has room for"


@pytest.mark.parametrize(
    "prompt", [" two  blanks ", "line\r\nline\n", f"a+b=%41&c;{SMILE}", "<|im_end|>", "\ufeff\x00"]
)
def test_every_byte_of_the_body_is_the_prompts(app: Flask, fake_client: FakeClient, prompt: str) -> None:
    for content_type in ("text/plain; charset=UTF-8", "application/x-www-form-urlencoded"):
        assert post(app, prompt, content_type).get_json() == [{"generated_text": f"{prompt}Hello"}]
        assert bytes(fake_client.last.token_ids) == prompt.encode()


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"", "The body is empty; it is the prompt."),
        (b"ab\xff", "The body must be UTF-8; byte 2 is not."),
        (b"\xed\xa0\x80", "The body must be UTF-8; byte 0 is not."),
        (b"x" * 65, "The prompt is 65 tokens long and the context is 64. Shorten the prompt."),
        (b"Paris is the [MASK] of France.", "The body holds [MASK], but the model continues texts and fills no masks;"),
    ],
)
def test_what_is_no_prompt_is_refused_in_the_native_words(app: Flask, fake_client, prompt: bytes, text: str) -> None:
    response = post(app, prompt)
    assert response.status_code == 400 and response.get_json()["message"].startswith(text)
    assert fake_client.submits == []


def test_another_charset_is_refused_and_never_guessed(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, "caf\u00e9".encode("latin-1"), "text/plain; charset=latin-1")
    assert response.status_code == 400
    assert response.get_json()["message"] == "The body must be UTF-8; it is declared as 'latin-1'."
    assert fake_client.submits == []


def test_a_body_over_the_limit_is_a_413(app: Flask) -> None:
    response = post(app, "x" * 2049, "application/x-www-form-urlencoded")
    assert (response.status_code, response.get_json()["status_code"]) == (413, 413)


@pytest.mark.parametrize("refusal", [OverloadedError("full", 2.5), DrainingError("stopping", 2.5)])
def test_a_full_queue_is_told_at_once_with_when_to_come_back(app: Flask, fake_client, refusal: Exception) -> None:
    fake_client.refusal = refusal
    response = post(app, "say ")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "3")
    assert response.get_json() == {"status_code": 503, "message": str(refusal)}


def test_a_deadline_is_a_504_and_a_fault_tells_nothing_of_the_prompt(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="deadline_exceeded")
    assert post(app, "say ").status_code == 504
    fake_client.end = finished(error="generation_failed")
    response = post(app, "secret")
    assert (response.status_code, response.get_json()["message"]) == (500, "it broke")
