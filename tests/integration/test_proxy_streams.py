"""Check on the real proxy process that bytes pass unchanged and at once, and that each end notices the other leave."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from proxy.auth import verify_assertion
from tests.integration.echo_upstream import Exchange, ScriptedUpstream
from tests.integration.proxy_process import AUTHORIZATION, INTERNAL_KEY, ProxyProcess, RawClient
from tests.integration.service import wait_for

# Three bytes each in UTF-8 (CJK), four (emoji), two, one.
MIXED_TEXT = "日本語😀é text 한국어🧪".encode()
LEAVING_DEADLINE_SECONDS = 0.25
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"

SPOOFING_HEADERS = (
    "Content-Type: application/json",
    "Cookie: a=b",
    "X-Internal-Assertion: forged",
    "Request-Id: forged",
    "X-Request-Id: mine-1",
    "X_Internal_Assertion: forged",
    "X-Forwarded-For: 10.0.0.1",
    "Connection: keep-alive, X-Team-Id",
    "X-Team-Id: evil",
    "Accept-Encoding: gzip",
    "Tracestate: vendor=1",
)
UPSTREAM_HEADER_NAMES = [
    "Accept",
    "Accept-Encoding",
    "Connection",
    "Content-Length",
    "Content-Type",
    "Host",
    "Request-Id",
    "User-Agent",
    "X-Internal-Assertion",
    "X-Request-Id",
    "traceparent",
]


@pytest.fixture(scope="module")
def proxy(shared_upstream: ScriptedUpstream) -> Iterator[ProxyProcess]:
    with ProxyProcess(shared_upstream.port, PROXY_UPSTREAM_TIMEOUT_SECONDS="1") as running:
        yield running


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[RawClient]:
    with RawClient(proxy.port) as connected:
        yield connected


def start_stream(client: RawClient, upstream: ScriptedUpstream) -> Exchange:
    client.request("POST", "/inference/m", "Content-Type: application/json", body=b'{"text": "x"}')
    exchange = upstream.accept()
    exchange.start_stream()
    assert client.read_head()[0] == 200
    return exchange


def test_each_piece_arrives_before_the_next_is_made(client: RawClient, upstream: ScriptedUpstream) -> None:
    exchange = start_stream(client, upstream)
    for number in range(50):
        exchange.send_chunk(b"piece %d" % number)
        assert client.read_chunk() == b"piece %d" % number
    exchange.send_chunk(b"")
    assert client.read_chunk() == b""


def test_an_answer_that_has_ended_closes_its_upstream_connection(client: RawClient, upstream: ScriptedUpstream) -> None:
    exchange = start_stream(client, upstream)
    exchange.send_chunk(b"")
    assert client.read_chunk() == b""
    assert exchange.seconds_until_closed() < LEAVING_DEADLINE_SECONDS


def test_half_a_chunk_arrives_before_the_other_half_is_made(client: RawClient, upstream: ScriptedUpstream) -> None:
    exchange = start_stream(client, upstream)
    exchange.send(b"a\r\n01234")
    assert client.read_chunk() == b"01234"
    exchange.send(b"56789\r\n0\r\n\r\n")
    assert client.read_chunk() == b"56789"


@pytest.mark.parametrize("offset", range(len(MIXED_TEXT) - 2))
def test_three_byte_splits_at_every_offset_pass_unchanged(
    client: RawClient, upstream: ScriptedUpstream, offset: int
) -> None:
    exchange = start_stream(client, upstream)
    pieces = [MIXED_TEXT[:offset], MIXED_TEXT[offset : offset + 3], MIXED_TEXT[offset + 3 :]]
    for piece in filter(None, pieces):
        exchange.send_chunk(piece)
        assert client.read_chunk() == piece
    exchange.send_chunk(b"")
    assert client.read_chunk() == b""


def test_headers_sent_upstream_are_an_allow_list(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.request("POST", "/chat/m?b=2&a=%41", *SPOOFING_HEADERS, body=b"{}")
    exchange = upstream.accept()
    assert exchange.request_line == "POST /chat/m?b=2&a=A HTTP/1.1"
    assert sorted(name for name, _value in exchange.headers) == UPSTREAM_HEADER_NAMES
    assert exchange.header("Accept-Encoding") == "identity"
    request_id = exchange.header("Request-Id") or ""
    assert request_id.startswith("req_") and len(request_id) == 36
    claims = verify_assertion(
        INTERNAL_KEY.encode(),
        exchange.header("X-Internal-Assertion") or "",
        method="POST",
        path="/chat/m",
        request_id=request_id,
        now=time.time(),
    )
    assert (claims.tenant, claims.token_id) == ("team-a", "id-1")
    exchange.answer(b"{}", extra="Set-Cookie: a=b\r\nServer: x\r\nX-Powered-By: x\r\nX-Inference-Rows: 3\r\n")
    _status, headers, _body = client.read_answer()
    assert sorted(headers) == [
        "connection",
        "content-length",
        "content-type",
        "date",
        "request-id",
        "x-inference-rows",
        "x-request-id",
    ]
    assert (headers["request-id"], headers["x-request-id"]) == (request_id, "mine-1")


def test_statistics_are_taken_out_of_a_json_answer_and_logged(
    client: RawClient, upstream: ScriptedUpstream, proxy: ProxyProcess
) -> None:
    client.request("GET", "/info", "X-Request-Id: bad id")
    exchange = upstream.accept()
    exchange.answer(b'{"a": "\xc3\xa9", "__stats": {"tps": 3}}')
    _status, headers, body = client.read_answer()
    assert json.loads(body) == {"a": "é"}
    assert headers["x-request-id"] == headers["request-id"]
    client.request("GET", "/rows")
    upstream.accept().answer(b'{"a":  1}')
    assert client.read_answer()[2] == b'{"a":  1}'
    wait_for(lambda: any("path=/info " in line for line in proxy.lines), 10.0, "the line of the call")
    line = next(line for line in proxy.lines if "path=/info " in line)
    assert 'jwt={"team_id":"team-a","token_id":"id-1"} stats={"tps":3} duration_ms=' in line


@pytest.mark.parametrize("leave", ["close", "reset", "half-close"])
@pytest.mark.parametrize("moment", ["before the head", "in the stream"])
def test_a_client_that_leaves_closes_the_upstream_connection(
    client: RawClient, upstream: ScriptedUpstream, leave: str, moment: str
) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    if moment == "in the stream":
        exchange.start_stream()
        exchange.send_chunk(b"x")
        client.read_head()
        assert client.read_chunk() == b"x"
    if leave == "reset":
        client.reset()
    elif leave == "close":
        client.sock.close()
    else:
        client.sock.shutdown(1)
    assert exchange.seconds_until_closed() < LEAVING_DEADLINE_SECONDS


def test_a_client_that_leaves_after_pipelining_closes_the_upstream_connection(
    client: RawClient, upstream: ScriptedUpstream
) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    client.request("GET", "/rows")
    client.sock.close()
    assert exchange.seconds_until_closed() < LEAVING_DEADLINE_SECONDS


def test_an_upstream_that_dies_in_the_stream_leaves_no_last_chunk(
    client: RawClient, upstream: ScriptedUpstream
) -> None:
    exchange = start_stream(client, upstream)
    exchange.send_chunk(b"x")
    exchange.close()
    assert client.read_to_end() == b"1\r\nx\r\n"


def test_an_upstream_that_resets_after_the_head_is_told_of_and_leaves_no_last_chunk(
    client: RawClient, upstream: ScriptedUpstream, proxy: ProxyProcess
) -> None:
    num_lines = len(proxy.lines)
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    exchange.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    exchange.start_stream()
    exchange.close()
    assert client.read_head()[0] == 200
    assert client.read_to_end() == b""
    text = "answer given up: upstream stopped in the middle (ConnectionResetError)"
    wait_for(lambda: any(text in line for line in proxy.lines[num_lines:]), 2.0, "the proxy's warning")


def test_an_upstream_that_goes_silent_in_the_stream_leaves_no_last_chunk(
    client: RawClient, upstream: ScriptedUpstream
) -> None:
    exchange = start_stream(client, upstream)
    exchange.send_chunk(b"a")
    assert client.read_chunk() == b"a"
    assert client.read_to_end() == b""
    assert exchange.seconds_until_closed() < LEAVING_DEADLINE_SECONDS


@pytest.mark.parametrize("wrong", [b"x\r\nb\r\n", b"1\r\nbc\r\n", b"0\r\nName: value\r\n\r\n"])
def test_what_is_no_chunk_in_the_stream_leaves_no_last_chunk(
    client: RawClient, upstream: ScriptedUpstream, wrong: bytes
) -> None:
    exchange = start_stream(client, upstream)
    exchange.send_chunk(b"a")
    assert client.read_chunk() == b"a"
    exchange.send(wrong)
    assert client.read_to_end() == b""


def test_an_answer_shorter_than_its_length_is_cut_visibly(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    exchange.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 10\r\n\r\nabc")
    exchange.close()
    _status, headers = client.read_head()
    assert headers["content-length"] == "10"
    assert client.read_to_end() == b"abc"


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"", 502, "upstream_broken"),
        (b"HTTP/1.1 200 OK\r\nContent-", 502, "upstream_broken"),
        (b"HTTP/1.1 200 OK\r\n\r\nclose-delimited", 502, "upstream_framing"),
        (OK + b"Cache-Control: a\x01b\r\n\r\n{}", 502, "upstream_broken"),
        (OK + b"Cache-Control: a\x85b\r\n\r\n{}", 502, "upstream_headers"),
        (OK + b"Cache-Control: a\r\n b\r\n\r\n{}", 502, "upstream_broken"),
        (OK + b"Cache-Control: a\rX-Inference-Rows: 1\r\n\r\n{}", 502, "upstream_broken"),
        (OK + b"X-Inference-Rows : 1\r\n\r\n{}", 502, "upstream_broken"),
        (OK + b"Content-Type: text/plain\r\nContent-Type: text/html\r\n\r\n{}", 502, "upstream_headers"),
        (OK + b"Content-Length: 3\r\n\r\n{}", 502, "upstream_broken"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}", 502, "upstream_framing"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 502, "upstream_framing"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
            502,
            "upstream_framing",
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}",
            502,
            "upstream_framing",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 502, "upstream_framing"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", 502, "upstream_framing"),
        (b"HTTP/1.1 103 Early Hints\r\nContent-Length: 0\r\n\r\n", 502, "upstream_status"),
        (b"SSH-2.0-x\r\n", 502, "upstream_broken"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", 502, "upstream_status"),
        (
            b"HTTP/1.1 500 X\r\nContent-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>",
            500,
            "upstream_error",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{", 502, "upstream_broken"),
    ],
)
def test_an_upstream_fault_is_one_json_answer(
    client: RawClient, upstream: ScriptedUpstream, sent: bytes, status: int, code: str
) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    exchange.send(sent)
    exchange.close()
    got_status, headers, body = client.read_answer()
    assert (got_status, headers["x-error-code"]) == (status, code)
    assert json.loads(body)["status_code"] == status
    assert client.buffer == b""
    assert not upstream.has_caller(), "a request that may have been carried out is never repeated"


def test_json_errors_of_the_upstream_pass_with_retry_after(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    body = b'{"message":"Service overloaded, try again later."}'
    upstream.accept().answer(body, status="503 Service Unavailable", extra="Retry-After: 2\r\n")
    status, headers, got = client.read_answer()
    assert (status, headers["retry-after"], got) == (503, "2", body)


def test_an_upstream_that_does_not_answer_in_time_is_a_504(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.request("POST", "/inference/m", body=b"{}")
    exchange = upstream.accept()
    assert client.read_answer()[0] == 504
    assert exchange.seconds_until_closed() < LEAVING_DEADLINE_SECONDS


def test_a_refused_upstream_is_a_503_with_retry_after(upstream: ScriptedUpstream) -> None:
    with ScriptedUpstream() as gone:
        port = gone.port
    with ProxyProcess(port) as lonely, RawClient(lonely.port) as client:
        client.request("GET", "/health")
        status, headers, _body = client.read_answer()
        assert (status, headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("ending", [b"0\r\n\r\n", b""])
def test_an_http_1_0_client_gets_the_whole_answer_or_a_5xx(
    client: RawClient, upstream: ScriptedUpstream, ending: bytes
) -> None:
    client.request("POST", "/inference/m", body=b"{}", version="1.0")
    exchange = upstream.accept()
    exchange.start_stream()
    exchange.send_chunk(b"hello ")
    exchange.send_chunk(b"world")
    exchange.send(ending)
    exchange.close()
    status, headers, body = client.read_answer()
    assert "transfer-encoding" not in headers
    assert (status, body) == (200, b"hello world") if ending else status == 502
    assert client.read_to_end() == b""


def test_pipelined_requests_are_answered_in_order(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.request("POST", "/inference/a", body=b"1")
    first = upstream.accept()
    client.request("POST", "/inference/b", body=b"2")
    assert not upstream.has_caller()
    first.answer(b"[1]")
    upstream.accept().answer(b"[2]")
    assert [client.read_answer()[2], client.read_answer()[2]] == [b"[1]", b"[2]"]


def test_a_chunked_request_body_goes_on_whole(client: RawClient, upstream: ScriptedUpstream) -> None:
    client.send(
        f"POST /inference/m HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}\r\nTransfer-Encoding: chunked\r\n\r\n"
        "3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nX-Team-Id: evil\r\n\r\n"
    )
    exchange = upstream.accept()
    assert exchange.body == b"abcde"
    assert exchange.header("X-Team-Id") is None
    exchange.answer(b"{}")
    assert client.read_answer()[0] == 200
