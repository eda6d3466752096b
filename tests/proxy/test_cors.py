"""Check who may call from a page: how origins are read, what a preflight is told, what an answer carries."""

from __future__ import annotations

import pytest
from gevent import GreenletExit
from hypothesis import given
from hypothesis import strategies as st

from proxy.answers import Refusal
from proxy.config import ConfigError, read_settings
from proxy.cors import CrossOrigin, parse_origins
from proxy.routes import ROUTES, RouteTable
from proxy.worker import ProxyWorker

PAGE = "https://app.example"
LISTED = CrossOrigin(frozenset({PAGE, "http://localhost:5173"}))
EVERYBODY = CrossOrigin(frozenset({"*"}))
NOBODY = CrossOrigin(frozenset())
VARY = ("Vary", "Origin")


def asked(origin: str, names: str = "", method: str = "POST") -> dict[str, str]:
    headers = {"origin": origin, "access-control-request-method": method}
    return {**headers, "access-control-request-headers": names} if names else headers


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", set()),
        ("  ", set()),
        ("*", {"*"}),
        ("https://app.example", {"https://app.example"}),
        (" https://App.Example , http://localhost:5173", {"https://app.example", "http://localhost:5173"}),
        ("https://app.example:443,http://app.example:80", {"https://app.example", "http://app.example"}),
        ("http://app.example:443,https://app.example:80", {"http://app.example:443", "https://app.example:80"}),
        ("http://[::1]:8080,http://127.0.0.1:3000", {"http://[::1]:8080", "http://127.0.0.1:3000"}),
        ("chrome-extension://abcdefgh,capacitor://localhost", {"chrome-extension://abcdefgh", "capacitor://localhost"}),
    ],
)
def test_origins_are_read_as_browsers_write_them(text: str, origins: set[str]) -> None:
    assert parse_origins(text) == origins


@pytest.mark.parametrize(
    "text",
    [
        "app.example",
        "https://app.example/",
        "https://app.example/path",
        "https://app.example?a",
        "https://app.example#a",
        "https://user@app.example",
        "https://*.app.example",
        "https://app.example:*",
        "https://app.example:0",
        "https://app.example:65536",
        "https://app.example:",
        "https://",
        "https://bücher.example",
        "https://a.example https://b.example",
        "https://a.example,",
        ",",
        "null",
        "*,https://app.example",
        "*,*",
    ],
)
def test_what_is_no_origin_stops_the_start_by_name(text: str) -> None:
    environ = {"JWT_SECRET": "0123456789abcdef0123456789abcdef", "PROXY_CORS_ORIGINS": text}
    with pytest.raises(ConfigError, match=r"^PROXY_CORS_ORIGINS: "):
        read_settings(environ, port=0, upstream_url="http://127.0.0.1:1")


def test_the_setting_reaches_the_settings_and_is_off_by_itself() -> None:
    environ = {"JWT_SECRET": "0123456789abcdef0123456789abcdef"}
    assert read_settings(environ, port=0, upstream_url="http://127.0.0.1:1").cors_origins == frozenset()
    environ["PROXY_CORS_ORIGINS"] = PAGE
    assert read_settings(environ, port=0, upstream_url="http://127.0.0.1:1").cors_origins == {PAGE}


@pytest.mark.parametrize(
    ("rules", "method", "headers", "preflight"),
    [
        (LISTED, "OPTIONS", asked(PAGE), True),
        (LISTED, "OPTIONS", asked("https://evil.example"), True),
        (LISTED, "OPTIONS", {"origin": PAGE}, False),
        (LISTED, "OPTIONS", {"access-control-request-method": "POST"}, False),
        (LISTED, "POST", asked(PAGE), False),
        (NOBODY, "OPTIONS", asked(PAGE), False),
    ],
)
def test_a_preflight_is_options_with_an_origin_and_a_method(
    rules: CrossOrigin, method: str, headers: dict[str, str], preflight: bool
) -> None:
    assert rules.is_preflight(method, headers) is preflight


def test_a_preflight_is_told_the_methods_of_its_path_and_the_headers_of_the_sdks() -> None:
    names = "authorization,x-stainless-os, X-Stainless-Retry-Count,x-made-up,x-stainless-\r\nset-cookie"
    headers = dict(LISTED.preflight_headers(asked(PAGE, names), ["GET", "POST"]))
    assert headers["Access-Control-Allow-Methods"] == "GET, POST"
    allowed = headers["Access-Control-Allow-Headers"].lower().split(", ")
    assert {"authorization", "content-type", "x-api-key", "idempotency-key", "x-request-id", "traceparent"} < set(
        allowed
    )
    assert {"anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access"} < set(allowed)
    assert allowed[-2:] == ["x-stainless-os", "x-stainless-retry-count"]
    assert "x-made-up" not in allowed and len(set(allowed)) == len(allowed)
    assert int(headers["Access-Control-Max-Age"]) > 0


def test_a_preflight_cannot_make_the_answer_long() -> None:
    names = ",".join(f"x-stainless-{number}" for number in range(1000))
    headers = dict(LISTED.preflight_headers(asked(PAGE, names), ["GET"]))
    assert headers["Access-Control-Allow-Headers"].count("x-stainless-") == 32


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example", "null", "", "*", "https://app.example.evil", PAGE + "/", PAGE.upper(), f"{PAGE},{PAGE}"],
)
def test_a_foreign_origin_is_refused_a_preflight_and_gets_no_header_but_vary(origin: str) -> None:
    with pytest.raises(Refusal) as caught:
        LISTED.preflight_headers(asked(origin), ["GET"])
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")
    assert LISTED.answer_headers(origin, ["Request-Id"]) == [VARY]


def test_an_answer_to_a_listed_origin_names_it_and_what_its_page_may_read() -> None:
    names = ["Content-Type", "Cache-Control", "Request-Id", "X-Inference-Queue-Ms"]
    assert LISTED.answer_headers(PAGE, names) == [
        VARY,
        ("Access-Control-Allow-Origin", PAGE),
        ("Access-Control-Expose-Headers", "Request-Id, X-Inference-Queue-Ms"),
    ]
    assert LISTED.answer_headers(PAGE, ["Content-Type"]) == [VARY, ("Access-Control-Allow-Origin", PAGE)]


@given(st.text(min_size=1))
def test_everybody_is_told_a_star_and_never_their_own_words(origin: str) -> None:
    assert EVERYBODY.answer_headers(origin, []) == [VARY, ("Access-Control-Allow-Origin", "*")]
    assert EVERYBODY.preflight_headers(asked(origin), ["GET"])


def test_a_caller_without_an_origin_gets_vary_alone() -> None:
    assert LISTED.answer_headers(None, ["Request-Id"]) == EVERYBODY.answer_headers(None, ["Request-Id"]) == [VARY]


def test_without_the_setting_nothing_is_added() -> None:
    assert NOBODY.answer_headers(PAGE, ["Request-Id"]) == []


def test_credentials_are_never_allowed() -> None:
    for rules in (LISTED, EVERYBODY):
        headers = rules.preflight_headers(asked(PAGE), ["GET"]) + rules.answer_headers(PAGE, ["Request-Id"])
        assert "access-control-allow-credentials" not in {name.lower() for name, _value in headers}


class FakeClient:
    answer_started = False
    linger = False

    def __init__(self) -> None:
        self.error_headers = LISTED.answer_headers(PAGE, ["X-Error-Code"])
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data


def test_an_error_that_the_worker_tells_can_be_read_by_the_page_too() -> None:
    client = FakeClient()
    ProxyWorker.handle_error(ProxyWorker.__new__(ProxyWorker), None, client, None, GreenletExit())  # type: ignore[arg-type]
    head = client.sent.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[0] == "HTTP/1.1 503 Service Unavailable"
    assert f"Access-Control-Allow-Origin: {PAGE}" in head and "Access-Control-Expose-Headers: X-Error-Code" in head


def test_the_methods_of_a_path_are_all_that_its_routes_have() -> None:
    table = RouteTable()
    for route in ROUTES:
        path = route.template.replace("<model>", "m").replace("<id>", "i")
        assert route.method in table.methods(path)
    assert table.methods("/") == ["GET", "HEAD", "POST"]
    with pytest.raises(Refusal) as caught:
        table.methods("/nowhere")
    assert caught.value.status == 404
