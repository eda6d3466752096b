"""Check the Responses API's routes: what they submit, answer, refuse and cancel, with a client that has a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import OverloadedError
from inference_api.messages import (
    ErrorInfo,
    FinishReason,
    QueryKind,
    RequestView,
    SequenceOutput,
    Snapshot,
)
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.context import ServerContext
from inference_api.server.responses import STREAM_HEADERS
from tests.server.fakes import FakeClient, finished

START, END = 257, 258
PATH = "/v1/responses"
REQUEST_ID = "req_" + "ef" * 16
RESPONSE_ID = "resp_" + "ef" * 16
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def post(app: Flask, *, protocol: str = "HTTP/1.1", **members: Any) -> TestResponse:
    body = {"model": "mock", "input": "hi", **members}
    return app.test_client().post(PATH, json=body, environ_overrides={"SERVER_PROTOCOL": protocol})


def turn(role: str, text: str) -> list[int]:
    return [START, *f"{role}\n{text}".encode(), END, *b"\n"]


def events(data: bytes) -> list[dict[str, Any]]:
    blocks = [block for block in data.split(b"\n\n") if block.startswith(b"event: ")]
    return [json.loads(block.split(b"data: ", 1)[1]) for block in blocks]


def fault(response: TestResponse) -> tuple[int, Any]:
    return response.status_code, response.get_json()["error"]


def view(state: str, reason: FinishReason | None = None, error: ErrorInfo | None = None) -> Snapshot:
    request = RequestView(REQUEST_ID, state, 5, 3, finish_reason=reason, error=error)
    return Snapshot(1, 0, 4, 1, request=request)


def test_an_answer_is_a_response_whose_id_is_its_requests(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.STOP, num_tokens=5)
    response = post(app)
    body = response.get_json()
    request_id = response.headers["Request-Id"]
    assert (response.status_code, body["object"], body["status"]) == (200, "response", "completed")
    assert body["id"] == request_id.replace("req_", "resp_")
    assert body["output"][0]["content"][0]["text"] == "Hello"
    assert body["created_at"] <= body["completed_at"]
    assert body["usage"]["input_tokens"] == fake_client.last.num_prompt_tokens
    assert (body["usage"]["output_tokens"], body["usage"]["total_tokens"]) == (
        5,
        fake_client.last.num_prompt_tokens + 5,
    )
    assert response.headers["X-Inference-Seed"] == str(fake_client.last.sampling.seed)
    assert fake_client.aborts == []


def test_instructions_and_input_become_the_models_own_conversation(app: Flask, fake_client: FakeClient) -> None:
    post(app, instructions="be", input=[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}])
    expected = [*turn("system", "be"), *turn("assistant", "a"), *turn("user", "b"), START, *b"assistant\n"]
    assert fake_client.last.token_ids == expected


def test_control_texts_of_a_caller_are_plain_text(app: Flask, fake_client: FakeClient) -> None:
    post(app, input="<|im_end|>")
    assert fake_client.last.token_ids == [*turn("user", "<|im_end|>"), START, *b"assistant\n"]


def test_parameters_cross_as_they_were_sent(app: Flask, fake_client: FakeClient) -> None:
    post(app, temperature=0.5, top_p=0.25, max_output_tokens=7, include=[LOGPROBS], top_logprobs=2)
    submit = fake_client.last
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (0.5, 0.25, 0, 2)
    assert (submit.max_tokens, submit.stop_sequences, submit.tenant) == (7, [], "local")


def test_what_is_absent_has_openais_defaults_and_goes_on_to_the_end_of_the_context(app, fake_client) -> None:
    post(app)
    submit = fake_client.last
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, None)
    assert submit.max_tokens == 64 - submit.num_prompt_tokens
    post(app)
    assert fake_client.submits[0].sampling.seed != fake_client.submits[1].sampling.seed


def test_logprobs_are_reported_where_they_are_included(app: Flask) -> None:
    (part,) = post(app, include=[LOGPROBS], top_logprobs=1).get_json()["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Hello"
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [1] * 5
    (part,) = post(app).get_json()["output"][0]["content"]
    assert part["logprobs"] == []


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.QUOTA])
def test_an_answer_cut_at_its_length_is_incomplete(app: Flask, fake_client: FakeClient, reason: FinishReason) -> None:
    fake_client.end = finished(reason, num_tokens=5)
    body = post(app).get_json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["completed_at"] is None


def test_a_stream_tells_the_same_response_as_a_whole_answer(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.STOP, num_tokens=5)
    response = post(app, stream=True, metadata={"k": "v"})
    assert response.headers["Content-Type"] == "text/event-stream"
    assert {name: response.headers[name] for name in STREAM_HEADERS} == STREAM_HEADERS
    told = events(response.data)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert [event["delta"] for event in told if "delta" in event] == ["H", "ello"]
    last = told[-1]["response"]
    whole = post(app, metadata={"k": "v"}).get_json()
    differing = {"id", "created_at", "completed_at"}
    for body in (last, whole):
        body["output"][0].pop("id")
    assert {name: last[name] for name in last.keys() - differing} == {
        name: whole[name] for name in whole.keys() - differing
    }
    assert last["metadata"] == {"k": "v"}
    assert response.data.endswith(b"data: [DONE]\n\n")


def test_an_error_after_the_head_fails_the_response(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="backend_lost")
    response = post(app, stream=True)
    last = events(response.data)[-1]
    assert (response.status_code, last["type"], last["response"]["status"]) == (200, "response.failed", "failed")
    assert last["response"]["error"]["message"] == "it broke"
    assert b"[DONE]" not in response.data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("deadline_exceeded", 504), ("backend_lost", 503), ("generation_failed", 500)]
)
def test_an_error_before_the_first_text_keeps_its_status(app, fake_client, stream, code, status) -> None:
    fake_client.pieces, fake_client.end = [], finished(error=code)
    assert fault(post(app, stream=stream)) == (
        status,
        {"message": "it broke", "type": "server_error", "param": None, "code": code},
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_and_time(app: Flask, fake_client: FakeClient, stream: bool) -> None:
    fake_client.refusal = OverloadedError("Service overloaded, try again later.", 2.2)
    response = post(app, stream=stream)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "3")
    assert response.get_json()["error"]["code"] == "server_is_overloaded"


def test_a_silent_stream_gets_its_begin_and_pings_after_the_hold(make_app, fake_client: FakeClient) -> None:
    app = make_app(sse_hold_seconds=0.0, sse_ping_seconds=0.05)
    fake_client.pieces, fake_client.end = [], None
    response = post(app, stream=True)
    chunks = response.iter_encoded()
    assert [event["type"] for event in events(next(chunks) + next(chunks))] == [
        "response.created",
        "response.in_progress",
    ]
    assert [next(chunks), next(chunks)] == [b": ping\n\n"] * 2
    stream = fake_client.streams[0]
    stream.deliver(SequenceOutput(stream.session_id, 0, 1, 0, [72], finished()))
    assert events(b"".join(chunks))[-1]["type"] == "response.incomplete"
    response.close()


def test_an_old_client_gets_the_whole_stream_or_the_status_of_its_error(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, protocol="HTTP/1.0", stream=True)
    assert response.headers["Content-Length"] == str(len(response.data))
    assert events(response.data)[-1]["type"] == "response.incomplete"
    fake_client.end = finished(error="backend_lost")
    assert post(app, protocol="HTTP/1.0", stream=True).status_code == 503


def test_a_stream_that_is_closed_early_aborts_its_request(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = None
    response = post(app, stream=True)
    next(iter(response.iter_encoded()))
    response.close()
    assert fake_client.aborts == [(response.headers["Request-Id"], "local")]


@pytest.mark.parametrize(
    ("members", "param", "text"),
    [
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "only when stream is true"),
        ({"top_logprobs": 1}, "top_logprobs", f"needs include to hold '{LOGPROBS}'"),
        ({"previous_response_id": RESPONSE_ID}, "previous_response_id", "nothing is stored"),
    ],
)
def test_a_wrong_body_is_a_400_that_names_the_member(app, fake_client, members, param, text) -> None:
    status, error = fault(post(app, **members))
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, None)
    assert text in error["message"]
    assert fake_client.submits == []


def test_an_unknown_model_is_not_found_and_the_served_ones_are_named(app: Flask) -> None:
    status, error = fault(post(app, model="gpt-9"))
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"] == "The model 'gpt-9' does not exist. Served: mock, alias."


def test_what_does_not_fit_is_refused_in_words_that_clients_match_on(app: Flask, fake_client: FakeClient) -> None:
    status, error = fault(post(app, max_output_tokens=60))
    num_prompt_tokens = len(turn("user", "hi")) + 11
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["message"] == (
        f"This model's maximum context length is 64 tokens. However, you requested {num_prompt_tokens + 60} tokens"
        f" ({num_prompt_tokens} in the prompt, 60 for the completion). Please reduce the length of the messages."
        " (context_length_exceeded)"
    )
    assert fault(post(app, input="x" * 64, truncation="disabled"))[1]["code"] == "context_length_exceeded"
    assert fake_client.submits == []


def test_a_model_without_a_chat_template_takes_no_input(make_app) -> None:
    status, error = fault(post(make_app({"chat_template": None})))
    assert (status, error["param"]) == (400, "input")
    assert error["message"] == "input: this model has no chat template; use /v1/completions."


def test_what_a_template_refuses_is_a_fault_of_the_input(make_app, context: ServerContext) -> None:
    template = ChatTemplate("{{ raise_exception('no system messages') }}", context.tokenizer)
    status, error = fault(post(make_app({"chat_template": template}), instructions="be brief"))
    assert (status, error["param"]) == (400, "input")
    assert error["message"].startswith("input: ") and "no system messages" in error["message"]


@pytest.mark.parametrize(
    ("state", "reason", "status"),
    [
        ("waiting", None, "in_progress"),
        ("prefilling", None, "in_progress"),
        ("decoding", None, "in_progress"),
        ("finished", FinishReason.STOP, "completed"),
        ("finished", FinishReason.LENGTH, "incomplete"),
        ("finished", FinishReason.ABORT, "cancelled"),
        ("finished", FinishReason.ERROR, "failed"),
    ],
)
def test_a_response_is_known_by_the_state_of_its_request(app, fake_client, state, reason, status) -> None:
    fake_client.snapshot = view(state, reason)
    body = app.test_client().get(f"{PATH}/{RESPONSE_ID}").get_json()
    assert (body["id"], body["status"], body["output"]) == (RESPONSE_ID, status, [])
    assert (body["usage"] is None) == (reason is None)
    assert fake_client.queries == [(QueryKind.REQUEST, "local", REQUEST_ID)]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("response_id", [RESPONSE_ID, REQUEST_ID, "chatcmpl-1"])
def test_a_foreign_or_unknown_response_is_not_found_and_nothing_is_aborted(
    app, fake_client, method, response_id
) -> None:
    if response_id != RESPONSE_ID:
        fake_client.snapshot = view("decoding")
    path = f"{PATH}/{response_id}" + ("/cancel" if method == "POST" else "")
    assert fault(app.test_client().open(path, method=method)) == (
        404,
        {
            "message": f"Unknown response '{response_id}'.",
            "type": "not_found_error",
            "param": None,
            "code": "not_found",
        },
    )
    assert fake_client.aborts == []


def test_cancelling_aborts_as_the_tenant_and_tells_how_the_response_ended(app, fake_client, monkeypatch) -> None:
    fake_client.snapshot = view("decoding")
    aborts = []

    def abort(request_id: str, tenant: str, _call_id: str = "") -> None:
        aborts.append((request_id, tenant))
        fake_client.snapshot = view("finished", FinishReason.ABORT)

    monkeypatch.setattr(fake_client, "abort", abort)
    response = app.test_client().post(f"{PATH}/{RESPONSE_ID}/cancel")
    body = response.get_json()
    assert (response.status_code, body["id"], body["status"], body["error"]) == (200, RESPONSE_ID, "cancelled", None)
    assert aborts == [(REQUEST_ID, "local")]


def test_cancelling_what_has_ended_changes_nothing(app: Flask, fake_client: FakeClient) -> None:
    fake_client.snapshot = view("finished", FinishReason.STOP)
    response = app.test_client().post(f"{PATH}/{RESPONSE_ID}/cancel")
    assert (response.status_code, response.get_json()["status"]) == (200, "completed")
    assert fake_client.aborts == []


@pytest.mark.parametrize("query", ["stream=true", "starting_after=3"])
def test_events_cannot_be_read_again(app: Flask, fake_client: FakeClient, query: str) -> None:
    fake_client.snapshot = view("decoding")
    status, error = fault(app.test_client().get(f"{PATH}/{RESPONSE_ID}?{query}"))
    assert (status, error["param"]) == (400, query.split("=")[0])
    assert app.test_client().get(f"{PATH}/{RESPONSE_ID}?stream=false").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_backend_that_does_not_answer_is_a_503_with_a_time_to_retry(app, fake_client, method: str) -> None:
    fake_client.snapshot = None
    path = f"{PATH}/{RESPONSE_ID}" + ("/cancel" if method == "POST" else "")
    response = app.test_client().open(path, method=method)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
