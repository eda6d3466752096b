"""Check the pure parts of the app: how an environ is read, and how statistics are taken out of an answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from proxy.app import create_app, read_head, take_stats
from proxy.config import read_settings


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


class BrokenConnection:
    left = False
    error_headers: Sequence[tuple[str, str]] = ()

    def on_end(self, ending: object) -> None:
        raise RuntimeError("planted")


def test_an_unexpected_exception_leaves_the_app_and_is_no_html_page() -> None:
    secret = "0123456789abcdef0123456789abcdef"
    settings = {"JWT_SECRET": secret, "PROXY_CORS_ORIGINS": "https://app.example"}
    app = create_app(read_settings(settings, port=0, upstream_url="http://127.0.0.1:1"))
    connection = BrokenConnection()
    environ = {"RAW_URI": "/", "proxy.connection": connection}
    with pytest.raises(RuntimeError, match="planted"):
        app.test_client().get("/", headers={"Origin": "https://app.example"}, environ_overrides=environ)
    assert ("Access-Control-Allow-Origin", "https://app.example") in connection.error_headers
    for handler in logging.getLogger("proxy.transaction").handlers:
        logging.getLogger("proxy.transaction").removeHandler(handler)


def test_statistics_are_taken_and_the_rest_stays() -> None:
    assert take_stats('{"a":"é","__stats":{"b":1}}'.encode()) == ('{"a": "é"}'.encode(), {"b": 1})


@pytest.mark.parametrize(
    "body", [b'{"a":  1}', b'["__stats"]', b'{"__stats":', b'{"a": {"__stats": 1}}', b"\xff__stats"]
)
def test_other_bodies_come_back_byte_by_byte(body: bytes) -> None:
    assert take_stats(body) == (body, None)
