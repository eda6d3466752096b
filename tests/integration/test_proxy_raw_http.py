"""Check raw HTTP requests, good and bad, against the real proxy process, cut into pieces in three ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

import pytest

from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import AUTHORIZATION, ProxyProcess, RawClient
from tests.integration.raw_vectors import VECTORS, at_line_ends, byte_by_byte, fault_of, is_anonymous, on_a_route, whole

SEGMENTATIONS: list[Callable[[bytes], Iterable[bytes]]] = [whole, byte_by_byte, at_line_ends]


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(upstream: EchoUpstream) -> Iterator[ProxyProcess]:
    slow = {"PROXY_HEADER_DEADLINE_SECONDS": "0.6", "PROXY_BODY_GRACE_SECONDS": "0.3"}
    with ProxyProcess(upstream.port, **slow) as running:
        yield running


def exchange(proxy: ProxyProcess, pieces: Iterable[bytes]) -> bytes:
    with RawClient(proxy.port) as client:
        client.send_pieces(pieces)
        return client.read_to_end()


def statuses(answer: bytes) -> list[int]:
    """List the statuses of whole answers in a row; every byte must belong to one."""
    found = []
    while answer:
        head, mark, rest = answer.partition(b"\r\n\r\n")
        assert mark, f"an answer without an end of its head: {answer!r}"
        found.append(int(re.fullmatch(rb"HTTP/1\.[01] ([0-9]{3}) [^\r\n]+", head.split(b"\r\n")[0])[1]))  # type: ignore[index]
        length = re.search(rb"\r\nContent-Length: ([0-9]+)", head)
        assert length and b"Transfer-Encoding" not in head and b"Server:" not in head
        assert len(rest) >= int(length[1])
        answer = rest[int(length[1]) :]
    return found


@pytest.mark.parametrize("cut", SEGMENTATIONS)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_a_raw_request_is_read_as_its_vector_says(
    proxy: ProxyProcess, upstream: EchoUpstream, vector: dict[str, str], cut: Callable[[bytes], Iterable[bytes]]
) -> None:
    upstream_before = len(upstream.seen)
    got = statuses(exchange(proxy, cut(on_a_route(vector["raw"], anonymous=is_anonymous(vector)))))
    assert fault_of(vector, got, len(upstream.seen) - upstream_before) is None


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"].startswith("spoof")], ids=lambda vector: vector["id"])
def test_a_spoofed_header_never_reaches_the_upstream(
    proxy: ProxyProcess, upstream: EchoUpstream, vector: dict[str, str]
) -> None:
    assert statuses(exchange(proxy, [on_a_route(vector["raw"], anonymous=False)])) == [200]
    last = upstream.seen[-1]
    assert not {"evil", "127.0.0.1", "kube-probe/1.29"} & {value for _name, value in last.headers}
    assert last.header("X-Team-Id") is None


@pytest.mark.parametrize(
    ("line", "host", "status"),
    [
        ("GET http://x/rows HTTP/1.1", "x", 200),
        ("GET http://X:80/rows HTTP/1.1", "x:80", 200),
        ("GET http://y/rows HTTP/1.1", "x", 400),
        ("GET https://x/rows HTTP/1.1", "x", 400),
        ("GET /rows HTTP/1.1", "x/v1?", 400),
        ("GET /rows HTTP/1.1", "[::1]:80", 200),
        ("GET //rows HTTP/1.1", "x", 404),
        ("GET /./rows HTTP/1.1", "x", 404),
        ("GET /%72ows HTTP/1.1", "x", 404),
        ("GET /rows; HTTP/1.1", "x", 404),
        ("GET /rows/ HTTP/1.1", "x", 404),
        ("GET /rows?a=%ff HTTP/1.1", "x", 400),
        ("CONNECT x:443 HTTP/1.1", "x", 405),
        ("OPTIONS * HTTP/1.1", "x", 400),
        ("POST /inference/.. HTTP/1.1", "x", 404),
        ("PATCH /rows HTTP/1.1", "x", 405),
    ],
)
def test_targets_and_hosts_are_decided_before_anything_is_forwarded(
    proxy: ProxyProcess, upstream: EchoUpstream, line: str, host: str, status: int
) -> None:
    before = len(upstream.seen)
    raw = f"{line}\r\nHost: {host}\r\n{AUTHORIZATION}\r\nConnection: close\r\n\r\n"
    assert statuses(exchange(proxy, [raw.encode()])) == [status]
    assert len(upstream.seen) - before == (status == 200)


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "PUT", "PATCH", "DELETE", "OPTIONS", "GTE"])
def test_a_wrong_method_is_told_the_right_ones_before_anybody_is_asked_who_they_are(
    proxy: ProxyProcess, upstream: EchoUpstream, method: str
) -> None:
    before = len(upstream.seen)
    answer = exchange(proxy, [f"{method} /rows HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()])
    assert statuses(answer) == [405]
    assert b"\r\nAllow: GET\r\n" in answer
    assert len(upstream.seen) == before


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /rows HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /rows HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 60 + b"\r\n", 431),
        (b"GET /rows HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 500_000, 431),
        (b"POST /inference/m HTTP/1.1\r\nHost: x\r\nAUTH\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n", 415),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /rows HTTP/1.9\r\nHost: x\r\nConnection: close\r\n\r\n", 401),
    ],
)
def test_what_is_too_long_coded_or_of_another_protocol_is_told_so(
    proxy: ProxyProcess, upstream: EchoUpstream, raw: bytes, status: int
) -> None:
    before = len(upstream.seen)
    assert statuses(exchange(proxy, [raw.replace(b"AUTH", AUTHORIZATION.encode())])) == [status]
    assert len(upstream.seen) == before


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.3"])
def test_an_upgrade_is_ignored_and_the_request_answered_as_it_is(proxy: ProxyProcess, protocol: str) -> None:
    raw = f"GET /rows HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
    raw += f"Upgrade: {protocol}\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    assert statuses(exchange(proxy, [raw.encode()])) == [200]


def test_a_missing_host_is_refused_for_1_1_and_accepted_for_1_0(proxy: ProxyProcess) -> None:
    assert statuses(exchange(proxy, [b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"])) == [400]
    assert statuses(exchange(proxy, [b"GET /health HTTP/1.0\r\n\r\n"])) == [200]


def test_nothing_is_read_behind_a_request_that_is_refused_as_malformed(
    proxy: ProxyProcess, upstream: EchoUpstream
) -> None:
    before = len(upstream.seen)
    good = f"GET /rows HTTP/1.1\r\nHost: x\r\n{AUTHORIZATION}\r\nConnection: close\r\n\r\n"
    for malformed in ("GET /rows HTTP/1.1\r\n\r\n", "GET /rows HTTP/1.1\r\nHost: x y\r\n\r\n"):
        assert statuses(exchange(proxy, [(malformed + good).encode()])) == [400]
    assert len(upstream.seen) == before
    assert statuses(exchange(proxy, [("GET /rows HTTP/1.1\r\nHost: x\r\n\r\n" + good).encode()])) == [401, 200]


def test_a_peer_cannot_rewrite_the_path_with_script_name(proxy: ProxyProcess) -> None:
    raw = b"GET /health/rows HTTP/1.1\r\nHost: x\r\nSCRIPT_NAME: /health\r\nConnection: close\r\n\r\n"
    assert statuses(exchange(proxy, [raw])) == [404]


def test_head_of_a_public_route_has_no_body(proxy: ProxyProcess) -> None:
    answer = exchange(proxy, [b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")
