"""Check the pure parts of the app: how an environ is read, and how statistics are taken out of an answer."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
from flask import Flask
from werkzeug.test import create_environ, run_wsgi_app

from proxy.app import create_app, read_head, take_stats
from proxy.config import read_settings
from proxy.connection import ClientLeft


def test_a_head_is_read_from_what_was_sent_and_not_from_what_was_decoded() -> None:
    environ = {
        "REQUEST_METHOD": "POST",
        "RAW_URI": "/a%2fb?c",
        "PATH_INFO": "/a/b",
        "SERVER_PROTOCOL": "HTTP/1.0",
        "HTTP_X_REQUEST_ID": "i",
        "CONTENT_LENGTH": "3",
        "CONTENT_TYPE": "",
    }
    head = read_head(environ)
    assert (head.method, head.target, head.version) == ("POST", "/a%2fb?c", (1, 0))
    assert head.headers == {"x-request-id": "i", "content-length": "3"}


pytestmark = pytest.mark.usefixtures("hub")


class BrokenConnection:
    left = False
    error_headers: Sequence[tuple[str, str]] = ()

    def on_end(self, ending: object) -> None:
        raise RuntimeError("planted")


class RefusedConnection(BrokenConnection):
    cut_reason = None

    def on_end(self, ending: object) -> None:
        """Forget it."""

    def refuse(self, *, malformed: bool) -> None:
        """Go on."""


class LeftConnection(BrokenConnection):
    def on_end(self, ending: object) -> None:
        raise ClientLeft


@pytest.fixture
def app() -> Flask:
    secret = "0123456789abcdef0123456789abcdef"
    settings = {"JWT_SECRET": secret, "PROXY_CORS_ORIGINS": "https://app.example"}
    return create_app(read_settings(settings, port=0, upstream_url="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("connection", "outcome"), [(RefusedConnection(), "401 UNAUTHORIZED"), (LeftConnection(), "left")]
)
def test_a_request_leaves_nothing_for_the_garbage_collector_which_would_stop_all_others(
    app: Flask, connection: BrokenConnection, outcome: str
) -> None:
    def ask() -> str:
        raw = {"RAW_URI": "/v1/models", "proxy.connection": connection}
        try:
            _body, status, _headers = run_wsgi_app(app, create_environ("/v1/models", environ_overrides=raw))
        except ClientLeft:
            return "left"
        return status

    assert ask() == outcome
    gc.collect()
    gc.disable()
    try:
        ask()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_an_unexpected_exception_leaves_the_app_and_is_no_html_page(app: Flask) -> None:
    connection = BrokenConnection()
    environ = {"RAW_URI": "/", "proxy.connection": connection}
    with pytest.raises(RuntimeError, match="planted"):
        app.test_client().get("/", headers={"Origin": "https://app.example"}, environ_overrides=environ)
    assert ("Access-Control-Allow-Origin", "https://app.example") in connection.error_headers


def test_statistics_are_taken_and_the_rest_stays() -> None:
    assert take_stats('{"a":"é","__stats":{"b":1}}'.encode()) == ('{"a": "é"}'.encode(), {"b": 1})


@pytest.mark.parametrize(
    "body", [b'{"a":  1}', b'["__stats"]', b'{"__stats":', b'{"a": {"__stats": 1}}', b"\xff__stats"]
)
def test_other_bodies_come_back_byte_by_byte(body: bytes) -> None:
    assert take_stats(body) == (body, None)
