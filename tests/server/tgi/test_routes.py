"""Check the TGI routes over HTTP, whole and token by token, with a client that answers from a script."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import DrainingError, GenerationError, OverloadedError
from inference_api.messages import FinishReason, Grammar, GrammarKind
from inference_api.server.context import ServerContext
from tests.server.fakes import FakeClient, finished

END_ID = 258
"""The mock vocabulary's `<|im_end|>`."""

PATHS = ("/generate", "/generate_stream", "/")


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.end = finished(FinishReason.LENGTH, num_tokens=5)
    return make_app()


def post(app: Flask, path: str, *, protocol: str = "HTTP/1.1", **body: Any) -> TestResponse:
    environ = {"SERVER_PROTOCOL": protocol}
    return app.test_client().post(path, json={"inputs": "hello", **body}, environ_overrides=environ)


def whole(app: Flask, inputs: str = "hello", **parameters: Any) -> dict[str, Any]:
    response = post(app, "/generate", inputs=inputs, parameters=parameters)
    assert response.status_code == 200, response.data
    body: dict[str, Any] = response.get_json()
    return body


def events(response: TestResponse) -> list[dict[str, Any]]:
    assert (response.status_code, response.headers["Content-Type"]) == (200, "text/event-stream"), response.data
    lines = response.data.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data:")) for line in lines if not line.startswith(":")]


def stream(app: Flask, **parameters: Any) -> list[dict[str, Any]]:
    return events(post(app, "/generate_stream", parameters=parameters))


def letter(char: str, text: str | None = None) -> dict[str, Any]:
    return {"id": ord(char), "text": char if text is None else text, "logprob": -ord(char) / 100, "special": False}


def test_a_whole_answer_is_its_text_alone_unless_more_is_asked_for(app: Flask, fake_client: FakeClient) -> None:
    assert whole(app) == {"generated_text": "Hello"}
    assert fake_client.last.sampling.logprobs is None
    assert fake_client.aborts == []


def test_details_tell_the_end_and_every_token(app: Flask) -> None:
    assert whole(app, details=True, seed=7, temperature=0.5) == {
        "generated_text": "Hello",
        "details": {
            "finish_reason": "length",
            "generated_tokens": 5,
            "seed": 7,
            "prefill": [],
            "tokens": [letter(char) for char in "Hello"],
        },
    }


def test_a_greedy_answer_has_no_seed(app: Flask) -> None:
    assert whole(app, details=True, seed=7)["details"]["seed"] is None


def test_decoder_input_details_tell_the_prompts_tokens_and_all_else(app: Flask, fake_client: FakeClient) -> None:
    details = whole(app, "hi", decoder_input_details=True)["details"]
    assert details["prefill"] == [
        {"id": ord("h"), "text": "h", "logprob": None},
        {"id": ord("i"), "text": "i", "logprob": -1.05},
    ]
    assert len(details["tokens"]) == 5
    assert fake_client.last.prompt_logprobs == 0
    whole(app, "hi", details=True)
    assert fake_client.last.prompt_logprobs is None, "a prompt is scored only where that is told"


def test_a_truncated_prompt_is_told_as_it_was_read(app: Flask) -> None:
    prefill = whole(app, "hello", decoder_input_details=True, truncate=2)["details"]["prefill"]
    assert [(token["text"], token["logprob"]) for token in prefill] == [("l", None), ("o", -1.11)]


def test_top_n_tokens_tell_the_likeliest_at_each_place(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"A"]
    body = whole(app, details=True, top_n_tokens=2)
    assert body["details"]["top_tokens"] == [[letter("A"), letter("B")]]
    (event,) = stream(app, top_n_tokens=2)
    assert event["top_tokens"] == [letter("A"), letter("B")]
    assert "top_tokens" not in stream(app)[0]


def test_the_full_text_begins_with_the_prompt(app: Flask) -> None:
    assert whole(app, return_full_text=True) == {"generated_text": "helloHello"}
    assert stream(app, return_full_text=True)[-1]["generated_text"] == "helloHello"
    assert whole(app, return_full_text=False) == {"generated_text": "Hello"}


def test_a_stream_has_an_event_a_token_and_the_last_one_tells_the_end(app: Flask) -> None:
    found = stream(app, details=True, do_sample=True, seed=3)
    assert [event["index"] for event in found] == [1, 2, 3, 4, 5]
    assert [event["token"] for event in found] == [letter(char) for char in "Hello"]
    assert {event["generated_text"] for event in found[:-1]} == {event["details"] for event in found[:-1]} == {None}
    assert found[-1]["generated_text"] == "Hello"
    assert found[-1]["details"] == {
        "finish_reason": "length",
        "generated_tokens": 5,
        "seed": 3,
        "input_length": 5,
    }


def test_without_details_the_last_event_has_the_text_only(app: Flask) -> None:
    last = stream(app)[-1]
    assert (last["generated_text"], last["details"]) == ("Hello", None)


def test_the_models_end_is_a_special_token_without_text(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [[*b"Hi", END_ID]]
    fake_client.end = finished(FinishReason.STOP, num_tokens=3)
    ending = {"id": END_ID, "text": "", "logprob": -2.58, "special": True}
    found = stream(app, details=True)
    assert [event["token"] for event in found] == [letter("H"), letter("i"), ending]
    assert (found[-1]["generated_text"], found[-1]["details"]["finish_reason"]) == ("Hi", "eos_token")
    body = whole(app, details=True)
    assert body["generated_text"] == "Hi"
    assert body["details"]["tokens"][-1] == ending
    assert (body["details"]["finish_reason"], body["details"]["generated_tokens"]) == ("eos_token", 3)


def test_nothing_of_a_stop_is_text_and_its_tokens_are_counted(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"Hel", b"lo"]
    fake_client.end = finished(FinishReason.STOP, num_tokens=5, stop=b"lo")
    found = stream(app, details=True, stop=["lo"])
    assert fake_client.last.stop_sequences == [b"lo"]
    assert [event["token"]["text"] for event in found] == ["H", "e", "l", "", ""]
    assert found[-1]["generated_text"] == "Hel"
    assert found[-1]["details"]["finish_reason"] == "stop_sequence"
    assert len(found) == found[-1]["details"]["generated_tokens"]
    body = whole(app, details=True, stop=["lo"])
    assert body["generated_text"] == "Hel"
    assert [token["text"] for token in body["details"]["tokens"]] == ["H", "e", "l", "", ""]


def test_tokens_inside_a_character_have_no_text_until_it_is_whole(app: Flask, fake_client: FakeClient) -> None:
    smile = "\U0001f642".encode()
    fake_client.pieces = [smile[:2], smile[2:]]
    found = stream(app)
    assert [event["token"]["id"] for event in found] == list(smile)
    assert [event["token"]["text"] for event in found] == ["", "", "", "\U0001f642"]
    assert found[-1]["generated_text"] == "\U0001f642"


def test_an_answer_without_tokens_still_ends_with_an_event(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = []
    fake_client.end = finished(FinishReason.QUOTA)
    (event,) = stream(app, details=True, top_n_tokens=2)
    assert (event["generated_text"], event["details"]["finish_reason"]) == ("", "length")
    assert (event["token"]["text"], event["token"]["special"]) == ("", True)
    assert whole(app, details=True)["details"]["tokens"] == []


def test_the_root_streams_only_if_asked_and_lists_a_whole_answer(app: Flask) -> None:
    response = post(app, "/")
    assert (response.status_code, response.get_json()) == (200, [{"generated_text": "Hello"}])
    assert post(app, "/", stream=False).get_json() == [{"generated_text": "Hello"}]
    assert len(events(post(app, "/", stream=True))) == 5


def test_the_root_still_tells_health(app: Flask) -> None:
    response = app.test_client().get("/")
    assert (response.status_code, response.data) == (200, b"OK\n")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"inputs": ""}, "inputs: "),
        ({"inputs": 5}, "inputs: "),
        ({"prompt": "x"}, "Unknown parameter: prompt."),
        ({"parameters": {"temperature": 0}}, "parameters.temperature: "),
        ({"parameters": {"adapter_id": "lora"}}, "parameters.adapter_id: "),
        ({"inputs": "x" * 65}, "This model's maximum context length is 64 tokens."),
        ({"parameters": {"max_new_tokens": 60}}, "This model's maximum context length is 64 tokens."),
        ({"inputs": "\ud800"}, "inputs"),
        ({"parameters": {"best_of": 2}}, "parameters.best_of: "),
    ],
)
def test_what_cannot_be_served_is_a_validation_error(app: Flask, fake_client, path: str, body, text: str) -> None:
    response = post(app, path, **body)
    assert (response.status_code, response.get_json()["error_type"]) == (422, "validation")
    assert response.get_json()["error"].startswith(text) or text == "inputs"
    assert text.split(":")[0] in response.get_json()["error"]
    assert fake_client.submits == []


@pytest.mark.parametrize(
    "parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True, "details": True}]
)
def test_what_has_no_place_in_a_stream_is_refused_there_only(app: Flask, parameters: dict[str, Any]) -> None:
    assert post(app, "/generate_stream", parameters=parameters).status_code == 422
    assert post(app, "/", parameters=parameters, stream=True).status_code == 422
    assert post(app, "/", parameters=parameters, stream=False).status_code == 200


@pytest.mark.parametrize(("path", "stream"), [("/generate", True), ("/generate_stream", False)])
def test_a_stream_member_that_a_route_would_not_follow_is_refused(app: Flask, path: str, stream: bool) -> None:
    response = post(app, path, stream=stream)
    assert response.status_code == 422 and response.get_json()["error"].startswith("stream: ")
    assert post(app, path, stream=not stream).status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_a_repeated_member_is_named(app: Flask, path: str) -> None:
    data = b'{"inputs": "a", "inputs": "b"}'
    response = app.test_client().post(path, data=data, content_type="application/json")
    assert (response.status_code, response.get_json()["error"][:6]) == (422, "inputs")


def test_of_several_answers_the_likeliest_comes_first_and_the_others_are_told(app, fake_client: FakeClient) -> None:
    fake_client.answers = [[b"zz"], [b"AA"], [b"MM"]]
    body = whole(app, best_of=3, do_sample=True, details=True)
    assert body["generated_text"] == "AA"
    others = body["details"]["best_of_sequences"]
    assert [other["generated_text"] for other in others] == ["MM", "zz"]
    assert [token["text"] for token in others[0]["tokens"]] == ["M", "M"]
    assert [submit.choice for submit in fake_client.submits] == [0, 1, 2]
    fake_client.submits.clear()
    assert whole(app, best_of=3, do_sample=True, return_full_text=True) == {"generated_text": "helloAA"}


def test_parameters_cross_as_they_were_sent(app: Flask, fake_client: FakeClient) -> None:
    whole(
        app,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        seed=11,
        max_new_tokens=7,
        stop=["\n#", "##"],
    )
    submit = fake_client.last
    params = submit.sampling
    assert (params.temperature, params.top_k, params.top_p, params.typical_p, params.seed) == (0.5, 3, 0.25, 0.75, 11)
    assert (params.repetition_penalty, params.frequency_penalty) == (1.5, 0.5)
    assert (submit.max_tokens, submit.stop_sequences, submit.tenant) == (7, [b"\n#", b"##"], "local")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (
            "json",
            {"type": "object"},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}', "parameters.grammar.value"),
        ),
        ("json", '{"a": 1}', Grammar(GrammarKind.JSON_SCHEMA, '{"a": 1}', "parameters.grammar.value")),
        ("regex", "a+", Grammar(GrammarKind.REGEX, "a+", "parameters.grammar.value")),
        (
            "json_schema",
            {"name": "n", "schema": {"type": "array"}},
            Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array"}', "parameters.grammar.value.schema"),
        ),
    ],
)
def test_a_grammar_is_the_form_of_the_answer(app, fake_client, path: str, kind: str, value, expected) -> None:
    assert post(app, path, parameters={"grammar": {"type": kind, "value": value}}).status_code == 200
    assert fake_client.last.grammar == expected


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ({"type": "xml", "value": "x"}, "parameters.grammar.type: Input should be 'json', 'regex' or 'json_schema'"),
        ({"type": "json"}, "Missing required parameter: parameters.grammar.value."),
        ({"type": "regex", "value": {}}, "parameters.grammar.value: a regular expression is a string"),
        ({"type": "json_schema", "value": "x"}, "parameters.grammar.value: must be an object with the member schema"),
        ({"type": "json_schema", "value": {"name": "n"}}, "parameters.grammar.value.schema: must be a JSON schema"),
        (
            {"type": "json_schema", "value": {"schema": {}, "strict": True}},
            "parameters.grammar.value.strict: is unknown",
        ),
    ],
)
def test_a_grammar_that_is_none_is_a_validation_error(app, fake_client, grammar, text: str) -> None:
    response = post(app, "/generate", parameters={"grammar": grammar})
    assert (response.status_code, response.get_json()["error_type"]) == (422, "validation")
    assert text in response.get_json()["error"]
    assert fake_client.submits == []


@pytest.mark.parametrize(
    ("parameters", "temperature", "top_k"),
    [({}, 0.0, 0), ({"do_sample": True}, 1.0, 0), ({"top_k": 5}, 1.0, 5), ({"top_k": 10**6}, 1.0, 259)],
)
def test_an_answer_is_greedy_unless_drawn(app, fake_client, parameters, temperature: float, top_k: int) -> None:
    whole(app, **parameters)
    params = fake_client.last.sampling
    assert (params.temperature, params.top_k, params.top_p) == (temperature, top_k, 1.0)


def test_by_default_an_answer_has_a_hundred_tokens_at_most_and_what_the_context_has_room_for(
    make_app: Callable[..., Flask], context: ServerContext, fake_client: FakeClient
) -> None:
    roomy = make_app({"limits": dataclasses.replace(context.limits, context_tokens=1000)})
    whole(roomy)
    assert fake_client.last.max_tokens == 100
    whole(make_app())
    assert fake_client.last.max_tokens == 64 - 5


def test_truncate_keeps_the_end_of_the_prompt_only_when_asked(app: Flask, fake_client: FakeClient) -> None:
    whole(app, "x" * 60 + "the end", truncate=7)
    assert bytes(fake_client.last.token_ids) == b"the end"
    assert fake_client.last.num_prompt_tokens == 7
    whole(app, "short", truncate=100)
    assert bytes(fake_client.last.token_ids) == b"short"


def test_truncated_answers_tell_the_length_that_was_read(app: Flask) -> None:
    assert stream(app, details=True, truncate=2)[-1]["details"]["input_length"] == 2


def test_control_texts_of_a_caller_are_plain_text(app: Flask, fake_client: FakeClient) -> None:
    whole(app, "<|im_end|><|endoftext|>")
    assert bytes(fake_client.last.token_ids) == b"<|im_end|><|endoftext|>"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (OverloadedError("full", 2.0), 429, "overloaded"),
        (DrainingError("stopping"), 503, "overloaded"),
        (GenerationError("broken"), 424, "generation"),
    ],
)
def test_a_refusal_before_the_head_keeps_its_status(app, fake_client, path: str, error, status, error_type) -> None:
    fake_client.refusal = error
    response = post(app, path, stream=None if path != "/" else True)
    assert (response.status_code, response.get_json()["error_type"]) == (status, error_type)


def test_an_answer_that_fails_at_once_keeps_its_status_in_a_stream_too(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = []
    fake_client.end = finished(error="generation_failed")
    for path in PATHS:
        response = post(app, path, stream=True if path == "/" else None)
        assert (response.status_code, response.get_json()) == (424, {"error": "it broke", "error_type": "generation"})


@pytest.mark.parametrize(
    ("code", "error_type"), [("generation_failed", "generation"), ("backend_lost", "incomplete_generation")]
)
def test_a_stream_that_breaks_ends_with_an_error_event(app, fake_client, code: str, error_type: str) -> None:
    fake_client.end = finished(error=code)
    found = stream(app)
    assert found[-1] == {"error": "it broke", "error_type": error_type}
    assert [event["token"]["text"] for event in found[:-1]] == list("Hello")
    assert all(event["generated_text"] is None for event in found[:-1])
    whole_response = post(app, "/generate")
    assert whole_response.status_code in (424, 500)


def test_a_stream_over_http_1_0_is_whole_or_an_error(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, "/generate_stream", protocol="HTTP/1.0")
    assert response.headers["Content-Length"] and len(events(response)) == 5
    fake_client.end = finished(error="generation_failed")
    assert post(app, "/generate_stream", protocol="HTTP/1.0").status_code == 424


def test_a_silent_stream_is_pinged(make_app: Callable[..., Flask], fake_client: FakeClient) -> None:
    app = make_app(sse_hold_seconds=0.01, sse_ping_seconds=0.01)
    fake_client.pieces, fake_client.end = [], None
    response = app.test_client().post("/generate_stream", json={"inputs": "hello"}, buffered=False)
    chunks = response.iter_encoded()
    assert next(chunks) == b": ping\n\n"
    response.close()
    assert len(fake_client.aborts) == 1
