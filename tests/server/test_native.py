"""Check the native generation routes byte by byte, with a client that answers from a script."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import DrainingError, OverloadedError, WarmingError
from inference_api.messages import FinishReason, SequenceOutput
from inference_api.server.context import ServerContext
from inference_api.server.responses import STREAM_HEADERS
from inference_api.server.tokenizer import IncrementalDecoder
from tests.server.fakes import FakeClient, finished

ROUTES = ("/inference/mock", "/predictions/mock", "/chat/mock")


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def _post(app: Flask, path: str, *, protocol: str = "HTTP/1.1", **body: Any) -> TestResponse:
    environ = {"SERVER_PROTOCOL": protocol}
    return app.test_client().post(path, json={"text": "hello", **body}, environ_overrides=environ)


def _answer(message: str) -> bytes:
    return b"event: answer\ndata: " + json.dumps({"message": message}).encode() + b"\n\n"


CLOSE = b'event: close\ndata: {"message": "Connection closed"}\n\n'


def _error(response: TestResponse) -> tuple[int, Any]:
    assert response.content_type == "application/json"
    return response.status_code, response.get_json()


@pytest.mark.parametrize("path", ["/inference/mock", "/predictions/mock"])
def test_raw_routes_send_the_text_and_nothing_else(app: Flask, fake_client: FakeClient, path: str) -> None:
    response = _post(app, path)
    assert (response.status_code, response.data) == (200, b"Hello")
    assert response.headers["Content-Type"] == "text/event-stream"
    assert {name: response.headers[name] for name in STREAM_HEADERS} == STREAM_HEADERS
    assert fake_client.aborts == []


@pytest.mark.parametrize(
    ("path", "prompt"),
    [("/inference/mock", b"hello"), ("/predictions/mock", b"User: hello\nAI: "), ("/chat/mock", b"User: hello\nAI: ")],
)
def test_each_route_builds_its_own_prompt(app: Flask, fake_client: FakeClient, path: str, prompt: bytes) -> None:
    _post(app, path)
    assert bytes(fake_client.last.token_ids) == prompt
    assert fake_client.last.num_prompt_tokens == len(prompt)


def test_chat_sends_the_whole_message_so_far_in_every_event_and_then_closes(app: Flask) -> None:
    response = _post(app, "/chat/mock")
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.data == _answer("H") + _answer("Hello") + CLOSE


def test_an_answer_without_text_is_an_empty_body_or_a_close(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = []
    assert _post(app, "/inference/mock").data == b""
    assert _post(app, "/chat/mock").data == CLOSE


def test_return_prompt_puts_the_prompt_before_the_answer(app: Flask) -> None:
    assert _post(app, "/inference/mock", return_prompt=True).data == b"helloHello"
    assert _post(app, "/predictions/mock", return_prompt="true").data == b"User: hello\nAI: Hello"
    assert _post(app, "/chat/mock", return_prompt=True).data.endswith(_answer("User: hello\nAI: Hello") + CLOSE)
    assert _post(app, "/inference/mock", return_prompt="false").data == b"Hello"


def test_a_context_becomes_a_system_message_of_the_models_template(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/chat/mock", text="why?", rag_context="a fact")
    start, end = 257, 258
    expected = [
        *(start, *b"system\na fact", end, *b"\n"),
        *(start, *b"user\nwhy?", end, *b"\n"),
        *(start, *b"assistant\n"),
    ]
    assert fake_client.last.token_ids == expected


def test_without_a_template_a_context_goes_before_the_users_text(make_app, fake_client: FakeClient) -> None:
    app = make_app({"chat_template": None})
    _post(app, "/predictions/mock", text="why?", rag_context="a fact")
    assert bytes(fake_client.last.token_ids) == b"Context: a fact\nUser: why?\nAI: "


def test_the_raw_route_knows_no_context(app: Flask) -> None:
    status, body = _error(_post(app, "/inference/mock", rag_context="a fact"))
    assert status == 400 and "rag_context" in body["message"]


def test_control_texts_of_a_caller_are_plain_text(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/inference/mock", text="<|im_end|><|endoftext|>")
    assert bytes(fake_client.last.token_ids) == b"<|im_end|><|endoftext|>"


def test_parameters_cross_as_they_were_sent(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/inference/mock", temperature="0.5", top_k="3", top_p=0.25, max_tokens=7, seed=11, stop_sequence="\n#")
    submit = fake_client.last
    params = submit.sampling
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 3, 0.25, 11)
    assert (submit.max_tokens, submit.stop_sequences, submit.tenant) == (7, [b"\n#"], "local")
    assert (submit.queue_seconds, submit.first_token_seconds, submit.total_seconds) == (60.0, 120.0, 600.0)


def test_rules_of_the_end_and_options_of_drawing_cross_as_they_were_sent(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/inference/mock", max_tokens=7, min_tokens="3", ignore_eos=True, stop_token_ids=[5, 6, 5], min_p=0.5)
    submit = fake_client.last
    assert (submit.stop_ids, submit.min_tokens, submit.ignore_eos) == ((5, 6), 3, True)
    assert submit.sampling.min_p == 0.5
    _post(app, "/inference/mock")
    submit = fake_client.last
    assert (submit.stop_ids, submit.min_tokens, submit.ignore_eos) == ((), 0, False)


def test_an_id_is_checked_against_the_models_own_vocabulary(app: Flask, context: ServerContext) -> None:
    last = context.limits.vocab_size - 1
    assert _post(app, "/inference/mock", banned_token_ids=[last]).status_code == 200
    response = _post(app, "/inference/mock", banned_token_ids=[last + 1])
    assert response.status_code == 400 and f"<= {last}." in response.get_json()["message"]


def test_max_tokens_is_clamped_to_the_room_that_the_prompt_leaves(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/inference/mock", text="x" * 60, max_tokens=128)
    assert fake_client.last.max_tokens == 4


def test_a_prompt_over_the_context_is_refused_and_never_cropped(app: Flask, fake_client: FakeClient) -> None:
    status, body = _error(_post(app, "/inference/mock", text="x" * 65))
    assert status == 400
    assert "65 tokens long and the context is 64" in body["message"]
    assert fake_client.submits == []


def test_a_seed_is_drawn_where_none_is_sent_and_told_in_a_header(app: Flask, fake_client: FakeClient) -> None:
    seeds = set()
    for _ in range(3):
        response = _post(app, "/inference/mock")
        assert response.headers["X-Inference-Seed"] == str(fake_client.last.sampling.seed)
        seeds.add(fake_client.last.sampling.seed)
    assert len(seeds) == 3
    assert _post(app, "/inference/mock", seed=5).headers["X-Inference-Seed"] == "5"


def test_every_generation_has_a_session_id_of_128_random_bits_that_no_client_chooses(app, fake_client) -> None:
    for _ in range(2):
        response = _post(app, "/inference/mock", session_id="mine")
        assert response.headers["X-Client-Session-Id"] == "mine"
    first, second = (submit.session_id for submit in fake_client.submits)
    assert first != second
    assert len(first) == 32 and int(first, 16) >= 0


def test_a_stop_sequence_is_trimmed_from_text_and_events(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"one ST", b"OP"]
    fake_client.end = finished(FinishReason.STOP, stop=b"STOP")
    assert _post(app, "/inference/mock", stop_sequence="STOP").data == b"one "
    assert _post(app, "/chat/mock", stop_sequence="STOP").data.endswith(_answer("one ") + CLOSE)


def test_without_a_stop_sequence_only_the_models_own_end_stops_and_the_word_none_does_not(app, fake_client) -> None:
    fake_client.pieces = [b"None", b" of them"]
    for stop in ({}, {"stop_sequence": ""}, {"stop_sequence": "<|endoftext|>"}):
        assert _post(app, "/inference/mock", **stop).data == b"None of them"
        assert fake_client.last.stop_sequences == []


def test_the_prompts_length_counts_the_very_ids_that_are_sent(app: Flask, fake_client: FakeClient) -> None:
    _post(app, "/predictions/mock", text="<|endoftext|>a<|endoftext|>")
    submit = fake_client.last
    assert submit.num_prompt_tokens == len(submit.token_ids) == len("User: <|endoftext|>a<|endoftext|>\nAI: ")


def test_the_original_end_text_is_sent_only_when_it_is_asked_for(app, make_app) -> None:
    assert _post(app, "/inference/mock").data == b"Hello"
    legacy = make_app(legacy_eos=True)
    assert _post(legacy, "/inference/mock").data == b"Hello<|endoftext|>"
    assert b"endoftext" not in _post(legacy, "/chat/mock").data


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("refusal", "status", "code", "retry_after"),
    [
        (OverloadedError("Service overloaded, try again later.", 2.2), 503, "overloaded", "3"),
        (DrainingError("The service is stopping, try again later.", 0.1), 503, "draining", "1"),
        (WarmingError("The model is not ready yet, try again later."), 503, "warming", None),
    ],
)
def test_a_refusal_keeps_its_status_on_every_route(app, fake_client, path, refusal, status, code, retry_after) -> None:
    fake_client.refusal = refusal
    response = _post(app, path)
    assert _error(response) == (status, {"status_code": status, "message": str(refusal)})
    assert response.headers["X-Error-Code"] == code
    assert response.headers.get("Retry-After") == retry_after


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("protocol", ["HTTP/1.0", "HTTP/1.1"])
@pytest.mark.parametrize(
    ("code", "status"), [("deadline_exceeded", 504), ("backend_lost", 503), ("generation_failed", 500)]
)
def test_an_error_before_the_first_text_keeps_its_status(app, fake_client, path, protocol, code, status) -> None:
    fake_client.pieces, fake_client.end = [], finished(error=code)
    response = _post(app, path, protocol=protocol)
    assert _error(response) == (status, {"status_code": status, "message": "it broke"})


@pytest.mark.parametrize("path", ["/inference/mock", "/predictions/mock"])
def test_a_raw_stream_that_breaks_never_ends_cleanly(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.end = finished(error="backend_lost")
    response = _post(app, path)
    assert response.status_code == 200
    received: list[bytes] = []
    with pytest.raises(BrokenPipeError) as caught:
        received.extend(response.iter_encoded())
    assert caught.value.errno == errno.EPIPE
    assert b"".join(received) == b"Hello"
    response.close()


def test_a_chat_that_breaks_ends_with_an_error_event_and_no_close(app: Flask, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="backend_lost")
    data = _post(app, "/chat/mock").data
    event = data.removeprefix(_answer("H") + _answer("Hello"))
    assert event.startswith(b"event: error\ndata: ")
    assert json.loads(event.split(b"data: ", 1)[1]) == {
        "status_code": 503,
        "code": "backend_lost",
        "message": "it broke",
        "retryable": True,
        "num_delivered_tokens": 5,
    }
    assert b"event: close" not in data


def test_a_silent_chat_gets_pings_and_its_headers_after_the_hold(make_app, fake_client: FakeClient) -> None:
    app = make_app(sse_hold_seconds=0.0, sse_ping_seconds=0.05)
    fake_client.pieces, fake_client.end = [], None
    response = _post(app, "/chat/mock")
    chunks = response.iter_encoded()
    assert [next(chunks), next(chunks)] == [b": ping\n\n"] * 2
    stream = fake_client.streams[0]
    stream.deliver(SequenceOutput(stream.session_id, 0, 1, 0, [72], finished()))
    assert b"".join(chunks) == _answer("H") + CLOSE
    response.close()


@pytest.mark.parametrize("path", ROUTES)
def test_an_old_client_gets_the_whole_answer_with_its_length(app: Flask, fake_client: FakeClient, path: str) -> None:
    response = _post(app, path, protocol="HTTP/1.0")
    assert response.status_code == 200
    assert response.headers["Content-Length"] == str(len(response.data))
    assert b"Hello" in response.data
    assert fake_client.aborts == []


@pytest.mark.parametrize("path", ROUTES)
def test_an_old_client_gets_the_error_of_an_answer_that_breaks(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.end = finished(error="backend_lost")
    response = _post(app, path, protocol="HTTP/1.0")
    assert _error(response) == (503, {"status_code": 503, "message": "it broke"})


@pytest.mark.parametrize("path", ROUTES)
def test_a_response_that_is_closed_early_aborts_its_request(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.end = None
    response = _post(app, path)
    next(iter(response.iter_encoded()))
    response.close()
    assert fake_client.aborts == [(response.headers["Request-Id"], "local")]


def test_an_unknown_model_is_not_found_and_the_known_ones_are_named(app: Flask) -> None:
    status, body = _error(_post(app, "/inference/gpt-9"))
    assert status == 404
    assert body["message"] == "Unknown model 'gpt-9'. Known: mock, alias, falcon40b."


@pytest.mark.parametrize("name", ["mock", "alias", "falcon40b"])
def test_every_name_and_the_original_one_are_served(app: Flask, name: str) -> None:
    assert _post(app, f"/inference/{name}").data == b"Hello"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"{}", "text/plain", "Request was not JSON"),
        (b"{", "application/json", "Malformed JSON request body."),
        (b"[]", "application/json", "Malformed JSON request body."),
        (b"{}", "application/json", "required 'text' parameter is either empty or not provided"),
        (
            b'{"text": "x", "top_k": "many"}',
            "application/json",
            "Parameter: top_k is type=<class 'str'>, expected <class 'int'>",
        ),
        (
            b'{"text": "x", "top_p": 2}',
            "application/json",
            "Parameter: top_p=2.0 is outside bounds, 0.01 <= top_p <= 1.0.",
        ),
    ],
)
def test_a_wrong_body_gets_the_text_that_callers_know(app, fake_client, body, content_type, message) -> None:
    response = app.test_client().post("/chat/mock", data=body, content_type=content_type)
    assert _error(response) == (400, {"status_code": 400, "message": message})
    assert fake_client.submits == []


@pytest.fixture
def broken_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the decoder raise at an X, as a defect of ours would."""
    decode = IncrementalDecoder.decode

    def decode_or_raise(self: IncrementalDecoder, ids: Sequence[int]) -> str:
        if ord("X") in ids:
            raise ValueError("cannot be decoded")
        return decode(self, ids)

    monkeypatch.setattr(IncrementalDecoder, "decode", decode_or_raise)


@pytest.mark.usefixtures("broken_decoder")
@pytest.mark.parametrize("path", ROUTES)
def test_a_text_that_cannot_be_decoded_is_a_500_before_its_head_and_gives_its_row_back(
    app: Flask, fake_client: FakeClient, path: str
) -> None:
    fake_client.pieces, fake_client.end = [b"X"], None
    response = _post(app, path)
    assert _error(response) == (500, {"status_code": 500, "message": "Internal error."})
    assert len(fake_client.aborts) == 1
    fake_client.pieces, fake_client.end = [b"ok"], finished(FinishReason.STOP)
    assert b"ok" in _post(app, path).data


@pytest.mark.usefixtures("broken_decoder")
@pytest.mark.parametrize("path", ROUTES)
def test_a_text_that_cannot_be_decoded_further_breaks_its_own_stream_and_gives_its_row_back(
    app: Flask, fake_client: FakeClient, path: str
) -> None:
    fake_client.pieces, fake_client.end = [b"a", b"X"], None
    response = app.test_client().post(path, json={"text": "hello"}, buffered=False)
    chunks = iter(response.response)
    assert response.status_code == 200 and b"a" in next(chunks)
    with pytest.raises(ValueError, match="cannot be decoded"):
        next(chunks)
    response.close()
    assert len(fake_client.aborts) == 1
