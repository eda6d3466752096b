"""Check the Anthropic routes with a client that answers from a script: prompts, answers, events, counts, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import DrainingError, OverloadedError, WarmingError
from inference_api.messages import FinishReason, SequenceOutput
from inference_api.server.responses import STREAM_HEADERS
from tests.server.anthropic.named_events import read_event, read_events
from tests.server.fakes import FakeClient, finished

START, END = 257, 258
USER = {"role": "user", "content": "hi"}
USER_IDS = [START, *b"user\nhi", END, *b"\n"]
OPEN_IDS = [START, *b"assistant\n"]


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def post(app: Flask, path: str = "/v1/messages", *, protocol: str = "HTTP/1.1", **members: Any) -> TestResponse:
    body = {"model": "mock", "max_tokens": 8, "messages": [USER], **members}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    return app.test_client().post(path, json=body, environ_overrides={"SERVER_PROTOCOL": protocol})


def text_of(found: list[tuple[str, Any]]) -> str:
    return "".join(data["delta"]["text"] for name, data in found if name == "content_block_delta")


def error_of(response: TestResponse) -> tuple[int, str, str]:
    body = response.get_json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers.get("Request-Id")
    return response.status_code, body["error"]["type"], body["error"]["message"]


def test_a_whole_answer_tells_text_end_and_usage(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.STOP, 5)
    response = post(app)
    body = response.get_json()
    assert (response.status_code, body["content"]) == (200, [{"type": "text", "text": "Hello"}])
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (len(USER_IDS + OPEN_IDS), 5)
    assert body["id"] == response.headers["Request-Id"].replace("req_", "msg_")
    assert fake_client.aborts == []


def test_the_prompt_is_the_models_own_template(app: Flask, fake_client: FakeClient) -> None:
    post(app, system=[{"type": "text", "text": "be brief"}])
    assert fake_client.last.token_ids == [START, *b"system\nbe brief", END, *b"\n", *USER_IDS, *OPEN_IDS]


def test_a_system_message_between_turns_stays_where_it_is(app: Flask, fake_client: FakeClient) -> None:
    post(app, messages=[USER, {"role": "system", "content": "x"}])
    assert fake_client.last.token_ids == [*USER_IDS, START, *b"system\nx", END, *b"\n", *OPEN_IDS]


def test_control_texts_of_a_caller_are_plain_text(app: Flask, fake_client: FakeClient) -> None:
    post(app, messages=[{"role": "user", "content": "<|im_end|>"}])
    assert fake_client.last.token_ids.count(END) == 1


def test_parameters_cross_as_they_were_sent(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, temperature=0.5, top_k=3, top_p=0.25, stop_sequences=["\n#", "END"])
    submit = fake_client.last
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 3, 0.25)
    assert (submit.max_tokens, submit.stop_sequences, submit.tenant) == (8, [b"\n#", b"END"], "local")
    assert response.headers["X-Inference-Seed"] == str(submit.sampling.seed)


def test_a_stop_sequence_is_cut_off_and_named(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.STOP, 4, b"l")
    body = post(app, stop_sequences=["x", "l"]).get_json()
    assert body["content"] == [{"type": "text", "text": "He"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "l")
    found = read_events(post(app, stop_sequences=["x", "l"], stream=True).data)
    assert text_of(found) == "He"
    assert found[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "l"}


def test_a_stream_is_the_whole_answer_in_read_events(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.LENGTH, 5)
    response = post(app, stream=True)
    assert response.headers["Content-Type"] == "text/event-stream"
    assert {name: response.headers[name] for name in STREAM_HEADERS} == STREAM_HEADERS
    found = read_events(response.data)
    assert text_of(found) == "Hello"
    order = list(dict.fromkeys(name for name, _ in found))
    assert order == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message = found[0][1]["message"]
    assert message["id"] == response.headers["Request-Id"].replace("req_", "msg_")
    assert message["usage"]["input_tokens"] == len(USER_IDS + OPEN_IDS)
    assert found[-2][1]["usage"]["output_tokens"] == 5


def test_a_silent_stream_gets_its_head_after_the_hold_and_then_pings(make_app, fake_client: FakeClient) -> None:
    app = make_app(sse_hold_seconds=0.0, sse_ping_seconds=0.05)
    fake_client.pieces, fake_client.end = [], None
    response = post(app, stream=True)
    chunks = response.iter_encoded()
    names = [read_event(next(chunks))[0] for _ in range(4)]
    assert names == ["message_start", "ping", "ping", "ping"]
    stream = fake_client.streams[0]
    stream.deliver(SequenceOutput(stream.session_id, 0, 1, 0, [72], finished()))
    assert text_of([read_event(chunk) for chunk in chunks]) == "H"
    response.close()


def test_an_error_after_the_head_is_an_event_and_the_last_one(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="backend_lost")
    response = post(app, stream=True)
    found = read_events(response.data)
    assert text_of(found) == "Hello"
    told = {"type": "error", "error": {"type": "api_error", "message": "it broke"}}
    assert found[-1] == ("error", {**told, "request_id": response.headers["Request-Id"]})
    assert not {"content_block_stop", "message_delta", "message_stop"} & {name for name, _ in found}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("deadline_exceeded", 504, "timeout_error"),
        ("backend_lost", 503, "api_error"),
        ("generation_failed", 500, "api_error"),
    ],
)
def test_an_error_before_the_first_text_keeps_its_status(app, fake_client, stream, code, status, kind) -> None:
    fake_client.pieces, fake_client.end = [], finished(error=code)
    assert error_of(post(app, stream=stream)) == (status, kind, "it broke")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "retry_after"),
    [
        (OverloadedError("Service overloaded, try again later.", 2.2), 529, "overloaded_error", "3"),
        (DrainingError("The service is stopping, try again later.", 0.1), 503, "api_error", "1"),
        (WarmingError("The model is not ready yet, try again later."), 503, "api_error", None),
    ],
)
def test_a_refusal_keeps_its_status(app, fake_client, stream, refusal, status, kind, retry_after) -> None:
    fake_client.refusal = refusal
    response = post(app, stream=stream)
    assert error_of(response) == (status, kind, str(refusal))
    assert response.headers.get("Retry-After") == retry_after
    assert response.headers["X-Should-Retry"] == "true"


def test_a_full_queue_has_its_line_in_the_log(
    app: Flask, fake_client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake_client.refusal = OverloadedError("Service overloaded, try again later.", 1.0)
    with caplog.at_level(logging.INFO, "inference_api.server.request_log"):
        post(app).close()
    (record,) = [record for record in caplog.records if record.message == "request"]
    fields = record.__dict__["fields"]
    assert (fields["status"], fields["finish"]) == (529, "overloaded")


def test_a_count_is_the_length_of_the_very_prompt_that_is_submitted(app: Flask, fake_client: FakeClient) -> None:
    members = {"system": "s", "messages": [USER, {"role": "assistant", "content": "\u00e9"}, USER]}
    response = post(app, "/v1/messages/count_tokens", **members)
    assert (response.status_code, response.get_json()) == (200, {"input_tokens": response.get_json()["input_tokens"]})
    assert fake_client.submits == []
    answer = post(app, max_tokens=1, **members).get_json()
    assert response.get_json()["input_tokens"] == answer["usage"]["input_tokens"] == fake_client.last.num_prompt_tokens


def test_a_prompt_over_the_context_is_counted_and_not_answered(app: Flask, fake_client: FakeClient) -> None:
    members = {"messages": [{"role": "user", "content": "x" * 100}]}
    num_tokens = post(app, "/v1/messages/count_tokens", **members).get_json()["input_tokens"]
    assert num_tokens == len(USER_IDS + OPEN_IDS) + 98
    told = f"prompt is too long: {num_tokens} tokens > 63 maximum"
    assert error_of(post(app, **members)) == (400, "invalid_request_error", told)
    assert fake_client.submits == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("members", "status", "kind", "told"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "The model 'gpt' does not exist. Served: mock, alias."),
        ({"unheard": 1}, 400, "invalid_request_error", "Unknown parameter: unheard."),
        (
            {"messages": [USER, {"role": "assistant", "content": "The"}]},
            400,
            "invalid_request_error",
            "messages[1].role: the last message is the assistant's, whose text the answer would go on with (prefill);"
            " this is not served here. The conversation must end with a user message.",
        ),
    ],
)
def test_a_wrong_body_is_refused_alike_by_both_routes(app, fake_client, path, members, status, kind, told) -> None:
    assert error_of(post(app, path, **members)) == (status, kind, told)
    assert fake_client.submits == []


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_model_without_a_template_is_refused(make_app, path: str) -> None:
    status, kind, told = error_of(post(make_app({"chat_template": None}), path))
    assert (status, kind) == (400, "invalid_request_error") and "no chat template" in told


def test_what_is_no_json_and_what_is_too_large_are_refused_in_anthropics_words(app: Flask) -> None:
    client = app.test_client()
    broken = client.post("/v1/messages", data=b"{", content_type="application/json")
    assert error_of(broken) == (400, "invalid_request_error", "The body is not valid JSON.")
    large = post(app, messages=[{"role": "user", "content": "x" * 4096}])
    assert error_of(large)[:2] == (413, "request_too_large")


def test_calls_that_no_route_takes_are_refused_in_anthropics_words(app: Flask) -> None:
    client = app.test_client()
    for response, status, kind in (
        (client.get("/v1/messages"), 405, "invalid_request_error"),
        (client.post("/v1/messages/batches", json={}), 404, "not_found_error"),
    ):
        body = response.get_json()
        assert (response.status_code, body["error"]["type"], body["request_id"]) == (status, kind, None)


def test_nobody_is_answered_without_an_assertion(make_app, fake_client: FakeClient) -> None:
    response = post(make_app(anonymous=False))
    assert (response.status_code, response.get_json()["error"]["type"]) == (401, "authentication_error")
    assert fake_client.submits == []


def test_an_old_client_gets_the_whole_stream_with_its_length_or_the_error(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, stream=True, protocol="HTTP/1.0")
    assert response.headers["Content-Length"] == str(len(response.data))
    assert read_events(response.data)[-1][0] == "message_stop"
    fake_client.end = finished(error="backend_lost")
    assert error_of(post(app, stream=True, protocol="HTTP/1.0")) == (503, "api_error", "it broke")


def test_an_answer_that_its_tenant_aborts_is_a_conflict(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.ABORT)
    assert error_of(post(app)) == (409, "conflict_error", "The request was aborted.")
    assert read_events(post(app, stream=True).data)[-1][1]["error"]["type"] == "conflict_error"
