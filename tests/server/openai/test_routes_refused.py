"""Check over HTTP what the OpenAI routes say of a call that is refused or fails, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from flask import Flask

from inference_api.errors import DrainingError, OverloadedError, WarmingError
from tests.server.fakes import finished
from tests.server.openai.route_calls import BOTH, CHAT, TEXT, post, refusal


@pytest.mark.parametrize(
    ("path", "members", "text", "param"),
    [
        (CHAT, {"stream_options": {}}, "stream_options: is allowed only when stream is true.", "stream_options"),
        (TEXT, {"stream_options": {}}, "stream_options: is allowed only when stream is true.", "stream_options"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs: needs logprobs to be true.", "top_logprobs"),
        (TEXT, {"best_of": 1, "n": 2}, "best_of: 1 is less than n, which is 2.", "best_of"),
        (TEXT, {"best_of": 2, "stream": True}, "best_of: cannot be streamed when it is over n.", "best_of"),
        (
            TEXT,
            {"max_tokens": 0, "logprobs": 1},
            "max_tokens: is 0, so that nothing is answered; it may be with echo or prompt_logprobs.",
            "max_tokens",
        ),
        (
            CHAT,
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs: is allowed only when stream is not true.",
            "prompt_logprobs",
        ),
        (
            TEXT,
            {"prompt": ["x"] * 4, "n": 9},
            "prompt: 4 prompts of 9 answers each are 36 answers, at most 32 are made in one call.",
            "prompt",
        ),
        (TEXT, {"prompt": ""}, "prompt: is empty; at least one token is needed.", "prompt"),
        (TEXT, {"prompt": ["x", ""]}, "prompt[1]: is empty; at least one token is needed.", "prompt[1]"),
        (TEXT, {"prompt": [1, 259]}, "prompt[1]: 259 is outside the vocabulary, whose last id is 258.", "prompt"),
        (
            TEXT,
            {"prompt": [[1], [2, 300]]},
            "prompt[1][1]: 300 is outside the vocabulary, whose last id is 258.",
            "prompt[1]",
        ),
        (CHAT, {"n": 0}, "n: Input should be greater than or equal to 1; it is 0.", "n"),
        (CHAT, {"logit_biases": {}}, "Unknown parameter: logit_biases.", "logit_biases"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages[0].content[0].type: Input should be 'text'; it is \"image_url\".",
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_answered_is_a_400_that_says_why(app, fake_client, path, members, text, param) -> None:
    assert refusal(app, path, **members) == (400, text, param)
    assert fake_client.submits == []


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_is_not_served_is_not_found_and_the_served_ones_are_named(app: Flask, path, stream) -> None:
    response = post(app, path, model="gpt-9", stream=stream)
    assert response.status_code == 404
    assert response.get_json()["error"] == {
        "message": "The model 'gpt-9' does not exist. Served: mock, alias.",
        "type": "not_found_error",
        "param": None,
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    ("path", "members"),
    [(TEXT, {"prompt": "x" * 60, "max_tokens": 5}), (CHAT, {"max_tokens": 64}), (TEXT, {"prompt": "x" * 64})],
)
def test_what_is_over_the_context_is_told_in_the_sentence_that_clients_know(app, fake_client, path, members) -> None:
    response = post(app, path, **members)
    error = response.get_json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is 64 tokens. However, you requested")
    assert fake_client.submits == []


def test_a_model_without_a_template_has_no_chat(make_app: Callable[..., Flask]) -> None:
    app = make_app({"chat_template": None})
    assert refusal(app, CHAT)[:2] == (400, "This model has no chat template: use /v1/completions.")
    assert post(app, TEXT).status_code == 200


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [OverloadedError, DrainingError, WarmingError])
def test_a_refusal_keeps_its_status_and_says_when_to_come_back(app, fake_client, path, stream, error) -> None:
    fake_client.refusal = error("Service overloaded, try again later.", 2.0)
    response = post(app, path, stream=stream, n=2)
    assert response.status_code == 503
    assert response.get_json()["error"]["message"] == "Service overloaded, try again later."
    assert (response.headers["Retry-After"], response.headers["X-Should-Retry"]) == ("2", "true")


@pytest.mark.parametrize("path", BOTH)
def test_an_answer_that_breaks_is_an_error_whole_and_an_error_event_streamed(app, fake_client, path: str) -> None:
    fake_client.end = finished(error="backend_lost")
    assert refusal(app, path) == (503, "it broke", None)
    data = post(app, path, stream=True).get_data(as_text=True)
    last = json.loads(data.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"]["message"] == "it broke" and last["error"]["code"] == "backend_lost"
    assert "[DONE]" not in data


@pytest.mark.parametrize("path", BOTH)
def test_an_answer_that_fails_before_its_text_keeps_its_status_though_streamed(app, fake_client, path: str) -> None:
    fake_client.pieces, fake_client.end = [], finished(error="generation_failed")
    response = post(app, path, stream=True)
    assert response.status_code == 500 and response.headers["X-Should-Retry"] == "false"
    assert response.get_json()["error"]["code"] == "generation_failed"


@pytest.mark.parametrize(("body", "text"), [(b"{", "The body is not valid JSON."), (b"x" * 70_000, "65536 bytes")])
def test_a_body_that_cannot_be_read_is_told_in_openais_words(app: Flask, body: bytes, text: str) -> None:
    response = app.test_client().post(CHAT, data=body, content_type="application/json")
    assert response.status_code in (400, 413)
    assert text in response.get_json()["error"]["message"]


def test_without_an_identity_the_error_is_openais(make_app: Callable[..., Flask]) -> None:
    response = post(make_app(anonymous=False), CHAT)
    assert response.status_code == 401
    assert response.get_json()["error"]["code"] == "invalid_api_key"
