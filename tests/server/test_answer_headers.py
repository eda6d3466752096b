"""Check the headers of every answer: whose call, how long to the head, and the figures of an answer that is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask, Response, g
from werkzeug.test import TestResponse

from inference_api.errors import OverloadedError
from inference_api.messages import Finished, FinishReason, Timing
from inference_api.server.answer_headers import AnswerHeaders
from tests.server.fakes import FakeClient, finished

TIMING = Timing(queue_seconds=0.0105, prefill_seconds=0.25, decode_seconds=0.5, batch_size=3, context_tokens=16)
CHAT = "/v1/chat/completions"
TIMES = {"X-Inference-Queue-Ms": "10.500", "X-Inference-Prefill-Ms": "250.000", "X-Inference-Decode-Ms": "500.000"}


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def chat(app: Flask, **members: Any) -> TestResponse:
    """Ask for a chat completion."""
    body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **members}
    return app.test_client().post(CHAT, json=body, buffered=True)


def figures(response: TestResponse) -> dict[str, str]:
    """Return the headers of an answer's figures."""
    names = [*TIMES, "X-Inference-Prompt-Tokens", "X-Inference-Completion-Tokens"]
    return {name: response.headers[name] for name in names if name in response.headers}


def test_a_whole_answer_carries_its_figures_which_are_those_of_its_usage(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = Finished(FinishReason.LENGTH, 5, TIMING)
    response = chat(app)
    usage = response.get_json()["usage"]
    assert figures(response) == TIMES | {
        "X-Inference-Prompt-Tokens": str(usage["prompt_tokens"]),
        "X-Inference-Completion-Tokens": "5",
    }
    assert usage["completion_tokens"] == 5


def test_several_answers_have_counts_and_no_times(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = Finished(FinishReason.LENGTH, 5, TIMING)
    response = chat(app, n=3)
    usage = response.get_json()["usage"]
    assert figures(response) == {
        "X-Inference-Prompt-Tokens": str(usage["prompt_tokens"]),
        "X-Inference-Completion-Tokens": str(usage["completion_tokens"]),
    }
    assert usage["completion_tokens"] == 15


@pytest.mark.parametrize("path", [CHAT, "/inference/mock", "/chat/mock"])
def test_a_stream_has_no_figures_in_its_head(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.end = Finished(FinishReason.LENGTH, 5, TIMING)
    native = {"text": "hi"}
    response = chat(app, stream=True) if path == CHAT else app.test_client().post(path, json=native, buffered=True)
    assert response.status_code == 200 and figures(response) == {}
    assert response.headers["OpenAI-Processing-Ms"].isdigit()


def test_a_native_answer_in_one_piece_has_them_too(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = Finished(FinishReason.LENGTH, 5, TIMING)
    environ = {"SERVER_PROTOCOL": "HTTP/1.0"}
    response = app.test_client().post("/inference/mock", json={"text": "hi"}, environ_overrides=environ)
    assert figures(response).items() >= TIMES.items()


def test_an_end_without_the_backends_figures_has_no_times(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [], finished(error="backend_lost")
    response = chat(app)
    assert response.status_code == 503
    assert figures(response).keys() == {"X-Inference-Prompt-Tokens", "X-Inference-Completion-Tokens"}


def test_a_call_that_generates_nothing_has_no_figures(app: Flask, fake_client: FakeClient) -> None:
    fake_client.refusal = OverloadedError("full", 1.0)
    assert figures(chat(app)) == figures(app.test_client().get("/v1/models")) == {}


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 200), ("/v1/nowhere", 404), (CHAT, 405), ("/health", 200), ("/rows", 503)]
)
def test_every_answer_tells_how_long_it_took(app: Flask, fake_client: FakeClient, path: str, status: int) -> None:
    fake_client.snapshot = None
    response = app.test_client().get(path)
    assert response.status_code == status
    assert response.headers["OpenAI-Processing-Ms"].isdigit()


def test_a_caller_who_is_not_known_is_told_too(make_app: Callable[..., Flask]) -> None:
    response = chat(make_app(anonymous=False))
    assert (response.status_code, response.headers["X-Should-Retry"]) == (401, "false")
    assert response.headers["OpenAI-Processing-Ms"].isdigit()


def test_the_time_is_from_the_arrival_to_the_head_in_milliseconds(app: Flask) -> None:
    with app.test_request_context("/v1/models"):
        g.began_at = 10.0
        response = AnswerHeaders(lambda: 10.2504).add(Response())
    assert response.headers["openai-processing-ms"] == "250"
