"""Check over HTTP what OpenAI's routes tell of a prompt's tokens, with a client that answers from a script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.messages import FinishReason
from tests.server.fakes import FakeClient, finished

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "mock", "prompt": "hello"},
}
SMILE = "\U0001f642"


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.end = finished(FinishReason.STOP, num_tokens=5)
    return make_app(body_bytes=65_536)


def post(app: Flask, path: str, **members: Any) -> Any:
    response = app.test_client().post(path, json={**LEAST[path], **members})
    assert response.status_code == 200, response.get_data(as_text=True)
    return response


def whole(app: Flask, path: str, **members: Any) -> Any:
    return post(app, path, **members).get_json()


def choices_of(app: Flask, **members: Any) -> list[Any]:
    """Return the choices of a stream's chunks."""
    *chunks, done, rest = post(app, TEXT, stream=True, **members).get_data(as_text=True).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [choice for chunk in chunks for choice in json.loads(chunk.removeprefix("data: "))["choices"]]


def test_what_evaluation_harnesses_send_is_answered_with_the_prompts_logprobs_alone(app, fake_client) -> None:
    fake_client.end = finished()
    body = whole(app, TEXT, prompt=[[104, 105], [121]], echo=True, max_tokens=0, logprobs=1, temperature=0)
    assert [choice["text"] for choice in body["choices"]] == ["hi", "y"]
    assert body["choices"][0]["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["h", "i"],
        "token_logprobs": [None, -1.05],
        "top_logprobs": [None, {"i": -1.05}],
    }
    assert body["choices"][1]["logprobs"]["token_logprobs"] == [None]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 0)
    assert [(submit.max_tokens, submit.prompt_logprobs) for submit in fake_client.submits] == [(0, 1), (0, 1)]


def test_an_echo_of_nothing_but_the_prompt_needs_no_logprobs(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished()
    (choice,) = whole(app, TEXT, echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == ("hello", None)
    assert fake_client.last.prompt_logprobs == 0, "the backend has something to do"


def test_a_prompt_that_fills_the_context_may_be_scored(app: Flask) -> None:
    assert whole(app, TEXT, prompt="x" * 64, echo=True, max_tokens=0, logprobs=0)["usage"]["prompt_tokens"] == 64
    response = app.test_client().post(TEXT, json={"model": "mock", "prompt": "x" * 65, "echo": True, "max_tokens": 0})
    error = response.get_json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "you requested 65 tokens (65 in the prompt, 0 for the completion)" in error["message"]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_stream_tells_the_prompt_first_and_joins_to_the_whole(app: Flask, max_tokens: int) -> None:
    asked = {"prompt": f"a\u00e9{SMILE}", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    answers = whole(app, TEXT, **asked)["choices"]
    streamed = choices_of(app, **asked)
    for index, answer in enumerate(answers):
        parts = [choice for choice in streamed if choice["index"] == index]
        assert parts[0]["text"] == f"a\u00e9{SMILE}"
        assert "".join(part["text"] for part in parts) == answer["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for part in parts for one in part["logprobs"][name]] == answer["logprobs"][name], name
        assert [part["finish_reason"] for part in parts][-1] == "stop"


def test_more_logprobs_of_prompts_than_an_answer_holds_are_refused(app: Flask, fake_client: FakeClient) -> None:
    body = {"model": "mock", "prompt": ["x" * 60] * 32, "max_tokens": 0, "echo": True, "logprobs": 20}
    assert app.test_client().post(TEXT, json=body).status_code == 200
    fake_client.submits.clear()
    over = {**body, "prompt": ["x" * 64] * 8, "n": 4, "logprobs": None, "prompt_logprobs": 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference_api.server.generation_request.MAX_LOGPROBS", 32 * 64 * 21 - 1)
        response = app.test_client().post(TEXT, json=over)
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "logprobs")
    assert fake_client.submits == []


def test_a_prompt_is_not_scored_unless_that_is_told(app: Flask, fake_client: FakeClient) -> None:
    for members in ({"echo": True}, {"logprobs": 3}, {}):
        whole(app, TEXT, **members)
        assert fake_client.last.prompt_logprobs is None


def test_best_of_tells_each_kept_answers_own_prompt(app: Flask) -> None:
    body = whole(app, TEXT, prompt=["hi", "y"], n=1, best_of=3, echo=True, logprobs=0)
    assert [choice["text"] for choice in body["choices"]] == ["hiHello", "yHello"]
    assert [choice["logprobs"]["token_logprobs"][:2] for choice in body["choices"]] == [[None, -1.05], [None, -0.72]]


def test_vllms_prompt_logprobs_stand_in_each_choice_of_a_text(app: Flask, fake_client: FakeClient) -> None:
    body = whole(app, TEXT, prompt="hi", prompt_logprobs=1, n=2)
    expected = [None, {"105": {"logprob": -1.05, "rank": 1, "decoded_token": "i"}}]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [expected, expected]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert "prompt_logprobs" not in whole(app, TEXT)["choices"][0]


@pytest.mark.parametrize(
    "members", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"logprobs": True, "n": 2}]
)
def test_vllms_prompt_logprobs_stand_beside_the_choices_of_a_chat(make_app, context, fake_client, members: Any) -> None:
    app = make_app({"limits": dataclasses.replace(context.limits, context_tokens=600)})
    body = whole(app, CHAT, prompt_logprobs=0, **members)
    prompt_ids = fake_client.last.token_ids
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(prompt_ids)
    assert [list(one) for one in body["prompt_logprobs"][1:]] == [[str(token_id)] for token_id in prompt_ids[1:]]
    assert "prompt_logprobs" not in whole(app, CHAT)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        (CHAT, {"logprobs": True}),
        (CHAT, {"prompt_logprobs": 0}),
        (TEXT, {"logprobs": 1}),
        (TEXT, {"echo": True, "logprobs": 1, "max_tokens": 0}),
        (TEXT, {"prompt_logprobs": 1}),
    ],
)
def test_answers_with_logprobs_are_encoded_without_holding_up_the_worker(
    app: Flask, monkeypatch: pytest.MonkeyPatch, path: str, members: dict[str, Any]
) -> None:
    expected = whole(app, path, seed=1, **members)["choices"]
    # The module that is slow with megabytes; a route that asked for it would be a 500.
    monkeypatch.setattr("inference_api.server.responses.json", None)
    assert whole(app, path, seed=1, **members)["choices"] == expected
