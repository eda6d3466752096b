"""Check how `POST /` tells kinds of bodies apart: one URL, one meaning for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from tests.server.fakes import FakeClient


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def post(app: Flask, data: bytes, content_type: str | None) -> TestResponse:
    return app.test_client().post("/", data=data, content_type=content_type)


def test_json_with_inputs_is_tgis_and_does_not_tell_the_prompt(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, b'{"inputs": "hi", "parameters": {"max_new_tokens": 5}}', "application/json")
    assert response.get_json() == [{"generated_text": "Hello"}]
    assert fake_client.last.max_tokens == 5 and not fake_client.last.batches


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None, "TEXT/plain; a=b"])
def test_a_body_that_is_declared_as_no_json_is_a_prompt(app: Flask, fake_client, content_type: str | None) -> None:
    assert post(app, b"a=b&c=%20", content_type).get_json() == [{"generated_text": "a=b&c=%20Hello"}]
    assert bytes(fake_client.last.token_ids) == b"a=b&c=%20"


def test_a_text_that_reads_like_json_is_a_text_where_it_is_declared_as_one(app: Flask, fake_client) -> None:
    assert post(app, b'{"inputs": "hi"}', "text/plain").status_code == 200
    assert bytes(fake_client.last.token_ids) == b'{"inputs": "hi"}'


@pytest.mark.parametrize(
    "data", [b'{"inputs": "hi"}', b'{"article": "a", "question": "q"}', b'{"inputs": 1, "inputs": 2}']
)
@pytest.mark.parametrize("content_type", ["application/x-www-form-urlencoded", None])
def test_json_that_a_client_forgot_to_declare_is_told_so(app: Flask, fake_client, data: bytes, content_type) -> None:
    response = post(app, data, content_type)
    text = "The body is JSON: send Content-Type: application/json."
    assert (response.status_code, response.get_json()) == (400, {"status_code": 400, "message": text})
    assert fake_client.submits == []


@pytest.mark.parametrize("data", [b"{}", b"[1]", b'"hi"', b"5", b"{", b'{"a": 1}'])
def test_any_other_json_is_a_prompt_where_nothing_declares_it(app: Flask, fake_client: FakeClient, data: bytes) -> None:
    assert post(app, data, "application/x-www-form-urlencoded").status_code == 200
    assert bytes(fake_client.last.token_ids) == data


@pytest.mark.parametrize("data", [b"raw", b"{", b'["inputs"]', b'"inputs"', b'{"text": "hi"}', b""])
def test_json_without_inputs_is_told_what_is_taken_in_tgis_words(app: Flask, fake_client, data: bytes) -> None:
    response = post(app, data, "application/json")
    assert response.status_code == 400
    assert '"inputs"' in response.get_json()["error"] and "text/plain" in response.get_json()["error"]
    assert fake_client.submits == []


def test_an_article_is_refused_by_its_name(app: Flask, fake_client: FakeClient) -> None:
    response = post(app, b'{"article": "a", "question": "q"}', "application/json")
    assert response.status_code == 400 and '"article"' in response.get_json()["error"]
    assert fake_client.submits == []


@pytest.mark.parametrize(
    "content_type", ["multipart/form-data; boundary=x", "application/octet-stream", "text/html", "x"]
)
def test_another_kind_of_body_is_told_what_is_taken(app: Flask, fake_client: FakeClient, content_type: str) -> None:
    response = post(app, b"hi", content_type)
    assert response.status_code == 400
    assert "text/plain" in response.get_json()["message"] and response.headers["X-Error-Code"] == "bad_request"
    assert fake_client.submits == []


def test_the_root_still_tells_health(app: Flask) -> None:
    response = app.test_client().get("/")
    assert (response.status_code, response.data) == (200, b"OK\n")
