"""Check over raw sockets that pages of listed origins can call through the real proxy process and read every answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.echo_upstream import EchoUpstream, ScriptedUpstream
from tests.integration.proxy_process import AUTHORIZATION, ProxyProcess, RawClient

PAGE = "https://app.example"
ASKED = "Access-Control-Request-Method: POST"


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(upstream: EchoUpstream) -> Iterator[ProxyProcess]:
    with ProxyProcess(upstream.port, PROXY_CORS_ORIGINS=f"{PAGE}, http://localhost:5173") as running:
        yield running


def exchange(port: int, line: str, *headers: str, origin: str | None = PAGE) -> tuple[int, list[tuple[str, str]], str]:
    """Send a request with no body; return status, headers in order and as often as they came, and the body."""
    lines = [f"{line} HTTP/1.1", "Host: x", *headers, *([f"Origin: {origin}"] if origin is not None else [])]
    with RawClient(port) as client:
        client.send("\r\n".join([*lines, "Connection: close", "", ""]))
        head, _, body = client.read_to_end().decode("latin-1").partition("\r\n\r\n")
    status_line, *fields = head.split("\r\n")
    pairs = [(name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in fields)]
    return int(status_line.split(" ")[1]), pairs, body


def cross_origin(headers: list[tuple[str, str]]) -> dict[str, str]:
    """Return the protocol's headers; each may have come once only."""
    found = [(name, value) for name, value in headers if name.startswith("access-control-") or name == "vary"]
    assert len({name for name, _value in found}) == len(found), found
    return dict(found)


def test_a_preflight_is_answered_without_a_bearer_and_without_the_server(
    proxy: ProxyProcess, upstream: EchoUpstream
) -> None:
    before = len(upstream.seen)
    wanted = "Access-Control-Request-Headers: authorization,content-type,x-stainless-arch,x-stainless-lang"
    status, headers, body = exchange(proxy.port, "OPTIONS /v1/chat/completions", ASKED, wanted)
    told = cross_origin(headers)
    assert (status, body, len(upstream.seen)) == (204, "", before)
    assert told["access-control-allow-origin"] == PAGE and told["vary"] == "Origin"
    assert told["access-control-allow-methods"] == "POST"
    allowed = told["access-control-allow-headers"].lower().split(", ")
    assert {"authorization", "content-type", "x-stainless-arch", "x-stainless-lang"} <= set(allowed)
    assert "access-control-allow-credentials" not in told
    assert not {"content-length", "transfer-encoding"} & {name for name, _value in headers}


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [
        ("OPTIONS /nowhere", (ASKED,), 404),
        ("OPTIONS /rows", (), 405),
        ("OPTIONS *", (ASKED,), 400),
        ("OPTIONS /rows", (ASKED, "Content-Length: 3"), 400),
        ("GET /rows", (), 401),
        ("GET /rows", ("Authorization: Bearer a.b.c",), 401),
        ("GET /metrics", (AUTHORIZATION,), 403),
        ("GET /nowhere", (), 404),
        ("PATCH /rows", (), 405),
        ("GET /rows?a=%ff", (AUTHORIZATION,), 400),
        ("GET /rows", (AUTHORIZATION,), 200),
        ("GET /health", (), 200),
    ],
)
def test_every_answer_can_be_read_by_a_listed_page_and_by_no_other(
    proxy: ProxyProcess, line: str, headers: tuple[str, ...], status: int
) -> None:
    got, fields, _body = exchange(proxy.port, line, *headers)
    told = cross_origin(fields)
    assert (got, told["access-control-allow-origin"], told["vary"]) == (status, PAGE, "Origin")
    assert {"request-id", "x-request-id"} <= set(told["access-control-expose-headers"].lower().split(", "))
    for origin in ("https://evil.example", None):
        _status, fields, _body = exchange(proxy.port, line, *headers, origin=origin)
        assert cross_origin(fields) == {"vary": "Origin"}


def test_a_foreign_pages_preflight_is_refused_and_its_call_left_to_the_bearer(proxy: ProxyProcess) -> None:
    status, headers, body = exchange(proxy.port, "OPTIONS /rows", ASKED, origin="https://evil.example")
    assert (status, cross_origin(headers)) == (403, {"vary": "Origin"})
    assert "Origin is not allowed" in body
    assert exchange(proxy.port, "GET /rows", AUTHORIZATION, origin="https://evil.example")[0] == 200


def test_a_full_window_and_a_missing_server_can_be_read_too() -> None:
    with ScriptedUpstream() as gone:
        port = gone.port
    with ProxyProcess(port, PROXY_CORS_ORIGINS=PAGE, PROXY_REQUESTS_PER_MINUTE="1") as proxy:
        for status in (503, 429):
            got, headers, _body = exchange(proxy.port, "GET /rows", AUTHORIZATION)
            told = cross_origin(headers)
            assert (got, told["access-control-allow-origin"]) == (status, PAGE)
            assert {"retry-after", "x-error-code"} <= set(told["access-control-expose-headers"].lower().split(", "))


def test_the_servers_own_words_on_origins_are_not_passed_on() -> None:
    with ScriptedUpstream() as upstream, ProxyProcess(upstream.port, PROXY_CORS_ORIGINS=PAGE) as proxy:
        with RawClient(proxy.port) as client:
            client.send(f"GET /rows HTTP/1.1\r\nHost: x\r\nOrigin: {PAGE}\r\n{AUTHORIZATION}\r\n\r\n")
            call = upstream.accept()
            call.start_stream(
                "text/event-stream",
                "Access-Control-Allow-Origin: *",
                "Access-Control-Allow-Credentials: true",
                "Vary: Accept",
                "X-Inference-Seed: 7",
            )
            call.send_chunk(b"data: 1\n\n")
            head = client.read_until(b"\r\n\r\n").decode("latin-1")
            call.send_chunk(b"")
        fields = [field.partition(": ") for field in head.split("\r\n") if ": " in field]
        told = cross_origin([(name.lower(), value) for name, _, value in fields])
        assert told["access-control-allow-origin"] == PAGE and told["vary"] == "Origin"
        assert "X-Inference-Seed" in told["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in told


def test_without_the_setting_options_is_a_wrong_method_as_any_other(upstream: EchoUpstream) -> None:
    with ProxyProcess(upstream.port) as proxy:
        status, headers, _body = exchange(proxy.port, "OPTIONS /rows", ASKED)
        assert (status, cross_origin(headers)) == (405, {})
        status, headers, _body = exchange(proxy.port, "GET /rows", AUTHORIZATION)
        assert (status, cross_origin(headers)) == (200, {})


def test_a_star_lets_every_page_in_even_one_without_a_name(upstream: EchoUpstream) -> None:
    with ProxyProcess(upstream.port, PROXY_CORS_ORIGINS="*") as proxy:
        for origin in ("https://anything.example", "null"):
            status, headers, _body = exchange(proxy.port, "OPTIONS /rows", ASKED, origin=origin)
            assert (status, cross_origin(headers)["access-control-allow-origin"]) == (204, "*")
