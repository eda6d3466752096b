"""Check raw HTTP requests, good and bad, against the real proxy process, cut into pieces in three ways.

The sample vectors name the path /v1/x; here it stands for a route of this proxy (POST for generation, anything else for
the rows), so that every decision but the one under test lets the request pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import AUTHORIZATION, ProxyProcess, RawClient

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "http_raw_vectors_sample.json").read_text())["vectors"]


def whole(raw: bytes) -> Iterable[bytes]:
    return [raw]


def byte_by_byte(raw: bytes) -> Iterable[bytes]:
    return (raw[index : index + 1] for index in range(len(raw)))


def at_line_ends(raw: bytes) -> Iterable[bytes]:
    return re.split(rb"(?<=\r\n)", raw)


SEGMENTATIONS: list[Callable[[bytes], Iterable[bytes]]] = [whole, byte_by_byte, at_line_ends]

# What the vector's text allows: statuses of the only answer (None: closed without one), how many reach the upstream.
ALLOWED: dict[str, tuple[set[int | None], int]] = {
    "400-or-close": ({400, 501, None}, 0),
    "400-or-413": ({400, 413}, 0),
    "431": ({431}, 0),
    "400": ({400}, 0),
    "400-or-401": ({400, 401}, 0),
    "401": ({401}, 0),
    "404-or-400-never-upstream": ({400, 404}, 0),
    "405-or-501-or-400, no upstream request": ({405, 501, 400}, 0),
    "401 or 413 with no 100 Continue first": ({401, 413}, 0),
    "exactly one answer": ({400}, 0),
}
# One reading: the coding, case or leading line is taken as RFC 9112 says, or the request is refused; never in between.
ONE_READING = {"te-gzip-chunked": (501, 0), "te-case": (200, 1), "line-lead-crlf": (200, 1)}


@pytest.fixture(scope="module")
def upstream() -> Iterator[EchoUpstream]:
    with EchoUpstream() as running:
        yield running


@pytest.fixture(scope="module")
def proxy(upstream: EchoUpstream) -> Iterator[ProxyProcess]:
    slow = {"PROXY_HEADER_DEADLINE_SECONDS": "0.6", "PROXY_BODY_GRACE_SECONDS": "0.3"}
    with ProxyProcess(upstream.port, **slow) as running:
        yield running


def on_a_route(raw: str, *, authorized: bool) -> bytes:
    route = "/inference/x" if raw.startswith("POST") else "/rows"
    raw = re.sub(
        r"(?<=[ /])/?v1/x(?=[ ?#])", lambda match: route if match.group().startswith("/") else route[1:], raw, count=0
    )
    if authorized:
        raw = re.sub(r"(Host: [^\r]*\r\n)", lambda match: match.group(1) + AUTHORIZATION + "\r\n", raw)
    return raw.encode("latin-1")


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
    expect, upstream_before = vector["expect"], len(upstream.seen)
    anonymous = expect.startswith("401")
    got = statuses(exchange(proxy, cut(on_a_route(vector["raw"], authorized=not anonymous))))
    num_forwarded = len(upstream.seen) - upstream_before
    if expect == "one-reading":
        assert (got, num_forwarded) == ([ONE_READING[vector["id"]][0]], ONE_READING[vector["id"]][1])
    elif expect in ("as-origin-form", "no chunked framing to a 1.0 client", "no 101 ever"):
        assert (got, num_forwarded) == ([200], 1)
    elif expect == "two complete answers in order":
        assert (got, num_forwarded) == ([200, 200], 2)
    elif expect.startswith("401-and-no-upstream-request"):
        assert (got, num_forwarded) == ([401], 0)
    else:
        allowed, forwarded = ALLOWED[expect]
        # A body that merely stops is not malformed yet: the proxy waits for its pace, then says so and closes.
        allowed = {408} if vector["id"] == "chunk-no-final" else allowed
        assert len(got) <= 1 and (got[0] if got else None) in allowed
        assert num_forwarded == forwarded


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["id"].startswith("spoof")], ids=lambda vector: vector["id"])
def test_a_spoofed_header_never_reaches_the_upstream(
    proxy: ProxyProcess, upstream: EchoUpstream, vector: dict[str, str]
) -> None:
    assert statuses(exchange(proxy, [on_a_route(vector["raw"], authorized=True)])) == [200]
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


def test_a_missing_host_is_refused_for_1_1_and_accepted_for_1_0(proxy: ProxyProcess) -> None:
    assert statuses(exchange(proxy, [b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"])) == [400]
    assert statuses(exchange(proxy, [b"GET /health HTTP/1.0\r\n\r\n"])) == [200]


def test_a_peer_cannot_rewrite_the_path_with_script_name(proxy: ProxyProcess) -> None:
    raw = b"GET /health/rows HTTP/1.1\r\nHost: x\r\nSCRIPT_NAME: /health\r\nConnection: close\r\n\r\n"
    assert statuses(exchange(proxy, [raw])) == [404]


def test_head_of_a_public_route_has_no_body(proxy: ProxyProcess) -> None:
    answer = exchange(proxy, [b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"])
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\n")
