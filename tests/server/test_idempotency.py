"""Check what an Idempotency-Key makes of a call: its name, what is told of a repetition, and what is no key."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flask import Flask

from inference_api.config import Settings
from inference_api.errors import InvalidRequestError, KeyReusedError
from inference_api.messages import IdempotencyKey
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.idempotency import CallKey, call_digest, check_key
from inference_api.server.validation import NativeLimits
from tests.server.fakes import READY, STOPPED, FakeClient, finished

CHAT = "/v1/chat/completions"
HELLO = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/inference/mock", {"text": "hi"}),
    ("/predictions/mock", {"text": "hi"}),
    ("/chat/mock", {"text": "hi"}),
    (CHAT, HELLO),
    (CHAT, {**HELLO, "stream": True}),
    ("/v1/completions", {"model": "mock", "prompt": "hi"}),
    ("/v1/responses", {"model": "mock", "input": "hi"}),
    ("/v1/responses", {"model": "mock", "input": "hi", "stream": True}),
    ("/v1/messages", {**HELLO, "max_tokens": 9}),
    ("/v1/messages", {**HELLO, "max_tokens": 9, "stream": True}),
    ("/generate", {"inputs": "hi"}),
    ("/generate_stream", {"inputs": "hi"}),
    ("/", {"inputs": "hi"}),
]


def key_of(tenant: str = "alpha", key: str = "key") -> CallKey:
    return CallKey(tenant, key, b"digest", "req_1")


@pytest.mark.parametrize("value", ["a", "!", "~" * 255, '"8e03978e-40d5-43dd"', "a+b-c"])
def test_a_key_is_any_visible_ascii_of_1_to_255_characters(value: str) -> None:
    assert check_key(value, 600.0) == value


@pytest.mark.parametrize("value", ["", " ", "a b", "a\t", "é", "\x7f", "x" * 256, "a\n", "a,b", ",", "key,key"])
def test_what_is_no_key_is_refused_by_the_headers_name(value: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Idempotency-Key: must be 1 to 255 visible ASCII") as caught:
        check_key(value, 600.0)
    assert caught.value.param == "Idempotency-Key"


def test_where_nothing_is_kept_the_header_is_refused_with_the_settings_name() -> None:
    with pytest.raises(InvalidRequestError, match="INFERENCE_API_IDEMPOTENCY_SECONDS is 0"):
        check_key("key", 0.0)


def test_ids_and_seeds_follow_from_tenant_and_key_and_from_nothing_else() -> None:
    assert key_of().request_id == CallKey("alpha", "key", b"other", "req_2").request_id
    assert key_of().seed == CallKey("alpha", "key", b"other", "req_2").seed
    names = [("alpha", "key"), ("alphak", "ey"), ("beta", "key"), ("alpha", "KEY"), ("alpha", '","key')]
    ids = {key_of(*name).request_id for name in names}
    assert len(ids) == len({key_of(*name).seed for name in names}) == len(names)
    assert all(len(one) == 36 and one.startswith("req_") for one in ids)
    assert all(0 <= key_of("alpha", str(number)).seed < 2**63 for number in range(200))


def test_the_digest_is_of_method_route_media_type_and_every_byte_of_the_body() -> None:
    calls = [
        ("POST", "/a?", "application/json", b"{}"),
        ("POST", "/b?", "application/json", b"{}"),
        ("POST", "/a?x", "application/json", b"{}"),
        ("POST", "/a?", "text/plain", b"{}"),
        ("POST", "/a?", "application/json", b"{ }"),
        ("PUT", "/a?", "application/json", b"{}"),
    ]
    assert len({call_digest(*call) for call in calls}) == len(calls)


def test_the_generations_of_a_call_share_its_key_and_differ_in_their_part() -> None:
    request = GenerationRequest([1], SamplingParams(1.0, 0, 1.0, 7), 5, num_choices=3)
    submits = key_of().named(request.submits("req_9", "alpha", Settings()), 77)
    assert [submit.idempotency for submit in submits] == [IdempotencyKey("key", b"digest", part) for part in range(3)]
    assert {(submit.created, submit.call_id) for submit in submits} == {(77, "req_1")}


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_that_makes_something_passes_the_key_on_and_calls_itself_by_it(
    make_app: Callable[..., Flask], fake_client: FakeClient, path: str, body: dict[str, Any]
) -> None:
    fake_client.end = finished(num_tokens=5)
    client = make_app().test_client()
    headers = {"Idempotency-Key": "key", "Request-Id": "req_" + "ab" * 16}
    answers = [client.post(path, json=body, headers=headers) for _ in range(2)]
    first, second = fake_client.submits
    assert first.idempotency is not None and first.idempotency == second.idempotency
    assert first.idempotency.key == "key"
    assert first.call_id == "req_" + "ab" * 16 != first.request_id
    expected = CallKey("local", "key", b"", "").request_id
    assert first.request_id == second.request_id == expected == answers[0].headers["Request-Id"]
    assert first.created > 0
    assert all("Idempotent-Replayed" not in answer.headers for answer in answers)


def test_the_inputs_of_an_embedding_are_parts_of_one_call(
    make_app: Callable[..., Flask], fake_client: FakeClient
) -> None:
    fake_client.ready = msgspec.structs.replace(READY, embedding_size=2)
    fake_client.pieces = []
    fake_client.end = msgspec.structs.replace(finished(STOPPED), embedding=struct.pack("<2f", 3.0, 4.0))
    fake_client.repeated_created = 5
    body = {"model": "mock", "input": ["a", "b"]}
    answer = make_app().test_client().post("/v1/embeddings", json=body, headers={"Idempotency-Key": "key"})
    assert answer.status_code == 200
    assert answer.headers["Idempotent-Replayed"] == "true"
    parts = [submit.idempotency.part for submit in fake_client.submits if submit.idempotency is not None]
    assert parts == [0, 1]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_seed_that_is_not_sent_follows_from_the_key(
    make_app: Callable[..., Flask], fake_client: FakeClient, path: str, body: dict[str, Any]
) -> None:
    client = make_app().test_client()
    client.post(path, json=body, headers={"Idempotency-Key": "key"})
    client.post(path, json=body)
    assert fake_client.submits[0].sampling.seed == CallKey("local", "key", b"", "").seed
    assert fake_client.submits[1].sampling.seed != fake_client.submits[0].sampling.seed
    assert (fake_client.submits[1].idempotency, fake_client.submits[1].call_id) == (None, "")


def test_a_seed_that_is_sent_is_the_seed(make_app: Callable[..., Flask], fake_client: FakeClient) -> None:
    client = make_app().test_client()
    client.post(CHAT, json={**HELLO, "seed": 5}, headers={"Idempotency-Key": "key"})
    client.post("/inference/mock", json={"text": "hi", "seed": 6}, headers={"Idempotency-Key": "key"})
    assert [submit.sampling.seed for submit in fake_client.submits] == [5, 6]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_key_that_is_none_is_refused_before_anything_is_asked(
    make_app: Callable[..., Flask], fake_client: FakeClient, path: str, body: dict[str, Any]
) -> None:
    answer = make_app().test_client().post(path, json=body, headers={"Idempotency-Key": "a b"})
    assert answer.status_code == (422 if "inputs" in body else 400)
    assert "Idempotency-Key: must be" in answer.text
    assert fake_client.submits == []


def test_a_repetition_is_told_and_carries_the_first_calls_time(
    make_app: Callable[..., Flask], fake_client: FakeClient
) -> None:
    fake_client.repeated_created = 1_234
    client = make_app().test_client()
    answer = client.post(CHAT, json=HELLO, headers={"Idempotency-Key": "key"})
    assert answer.headers["Idempotent-Replayed"] == "true"
    assert answer.get_json()["created"] == 1_234
    native = client.post("/inference/mock", json={"text": "hi"}, headers={"Idempotency-Key": "key"})
    assert native.headers["Idempotent-Replayed"] == "true"
    response = client.post("/v1/responses", json=ROUTES[6][1], headers={"Idempotency-Key": "key"}).get_json()
    assert (response["created_at"], response["completed_at"]) == (1_234, None)


@pytest.mark.parametrize(("key", "deltas"), [("key", ["H", "e", "l", "l", "o"]), (None, ["H", "ello"])])
def test_ids_that_come_together_are_events_one_by_one_as_those_of_the_first_call_were(
    make_app: Callable[..., Flask], fake_client: FakeClient, key: str | None, deltas: list[str]
) -> None:
    fake_client.pieces, fake_client.end = [b"Hello"], finished(num_tokens=5)
    headers = {"Idempotency-Key": key} if key is not None else {}
    body = {**HELLO, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    answer = make_app().test_client().post(CHAT, json=body, headers=headers)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    texts = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("content")]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in texts] == deltas
    counts = [chunk["usage"]["completion_tokens"] for chunk in texts]
    assert counts == [len("".join(deltas[: place + 1])) for place in range(len(deltas))]


def test_another_call_under_the_same_key_is_a_409_of_the_surface(
    make_app: Callable[..., Flask], fake_client: FakeClient
) -> None:
    fake_client.refusal = KeyReusedError("Idempotency-Key: was sent before.")
    client = make_app().test_client()
    for path, body in ROUTES:
        answer = client.post(path, json=body, headers={"Idempotency-Key": "key"})
        assert answer.status_code == 409, path
        assert answer.headers["X-Error-Code"] == "idempotency_key_reused"
        assert "Idempotency-Key: was sent before." in answer.text


def test_with_nothing_kept_a_call_with_a_key_is_a_400(make_app: Callable[..., Flask], fake_client: FakeClient) -> None:
    client = make_app(idempotency_seconds=0.0).test_client()
    answer = client.post(CHAT, json=HELLO, headers={"Idempotency-Key": "key"})
    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "Idempotency-Key")
    assert client.post(CHAT, json=HELLO).status_code == 200
    assert len(fake_client.submits) == 1


def test_a_body_over_the_limit_is_told_as_such_with_a_key_too(make_app: Callable[..., Flask]) -> None:
    answer = make_app().test_client().post(CHAT, data=b"x" * 4096, headers={"Idempotency-Key": "key"})
    assert answer.status_code == 413


def test_an_abort_names_the_call_and_not_the_request_alone(
    make_app: Callable[..., Flask], fake_client: FakeClient
) -> None:
    fake_client.end = finished(error="generation_failed")
    fake_client.answers = [[b"a"], [b"b"]]
    headers = {"Idempotency-Key": "key", "Request-Id": "req_" + "cd" * 16}
    make_app().test_client().post(CHAT, json={**HELLO, "n": 2}, headers=headers)
    assert fake_client.aborts
    assert set(fake_client.aborted_calls) == {"req_" + "cd" * 16}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions_have_the_same_ids_in_a_repetition(
    make_app: Callable[..., Flask], fake_client: FakeClient, stream: bool
) -> None:
    text = b'<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    fake_client.pieces, fake_client.end, fake_client.repeated_created = [text], finished(num_tokens=9), 5
    function = {"name": "f"}
    tools = [{"type": "function", "function": function}]
    anthropic = [{"name": "f", "input_schema": {"type": "object"}}]
    limits = NativeLimits(context_tokens=2048, vocab_size=259, eos_text="")
    client = make_app({"limits": limits}).test_client()
    for path, body in (
        (CHAT, {**HELLO, "tools": tools, "stream": stream, "max_tokens": 5}),
        ("/v1/messages", {**HELLO, "tools": anthropic, "stream": stream, "max_tokens": 5}),
    ):
        first, second = (client.post(path, json=body, headers={"Idempotency-Key": "key"}) for _ in range(2))
        assert first.status_code == 200, first.text
        assert first.data == second.data
        other = client.post(path, json=body, headers={"Idempotency-Key": "other"})
        assert other.data != first.data
