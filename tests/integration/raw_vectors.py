"""Say what the raw HTTP vectors mean for this proxy: which bytes are sent, in which pieces, and what may come of them.

Pure; the tests and the campaign send them. The vectors name the path /v1/x; here it stands for a route of this proxy
(POST for generation, anything else for one that only reads), so that every decision but the one under test lets the
request pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.integration.proxy_process import AUTHORIZATION

VECTORS: Sequence[Mapping[str, str]] = json.loads(
    (Path(__file__).parents[1] / "data" / "http_raw_vectors_sample.json").read_text()
)["vectors"]

# What the vector's text allows: statuses of the only answer (None: closed without one). None reaches the upstream.
_REFUSED: Mapping[str, frozenset[int | None]] = {
    "400-or-close": frozenset({400, 501, None}),
    "400-or-413": frozenset({400, 413}),
    "431": frozenset({431}),
    "400": frozenset({400}),
    "400-or-401": frozenset({400, 401}),
    "401": frozenset({401}),
    "404-or-400-never-upstream": frozenset({400, 404}),
    "405-or-501-or-400, no upstream request": frozenset({405, 501, 400}),
    "401 or 413 with no 100 Continue first": frozenset({401, 413}),
    "exactly one answer": frozenset({400}),
}
_PASSED: Mapping[str, Sequence[int]] = {
    "as-origin-form": (200,),
    "no chunked framing to a 1.0 client": (200,),
    "no 101 ever": (200,),
    "two complete answers in order": (200, 200),
}
# One reading: the coding, case or leading line is taken as RFC 9112 says, or the request is refused; never in between.
_ONE_READING: Mapping[str, Sequence[int]] = {"te-gzip-chunked": (501,), "te-case": (200,), "line-lead-crlf": (200,)}


def whole(raw: bytes) -> Iterable[bytes]:
    """Send it in one piece."""
    return [raw]


def byte_by_byte(raw: bytes) -> Iterable[bytes]:
    """Send each byte by itself."""
    return (raw[index : index + 1] for index in range(len(raw)))


def at_line_ends(raw: bytes) -> Iterable[bytes]:
    """Send each line by itself."""
    return re.split(rb"(?<=\r\n)", raw)


def is_anonymous(vector: Mapping[str, str]) -> bool:
    """Tell whether the vector's text is about a request without a bearer."""
    return vector["expect"].startswith("401")


def on_a_route(
    raw: str, *, anonymous: bool, reading: str = "/rows", generating: str = "/inference/x", fields: Sequence[str] = ()
) -> bytes:
    """Return a vector's bytes for routes of this service, with a bearer and more fields behind each Host."""
    route = generating if raw.startswith("POST") else reading
    raw = re.sub(
        r"(?<=[ /])/?v1/x(?=[ ?#])", lambda match: route if match.group().startswith("/") else route[1:], raw, count=0
    )
    added = "".join(f"{line}\r\n" for line in ([] if anonymous else [AUTHORIZATION]) + list(fields))
    return re.sub(r"(Host: [^\r]*\r\n)", lambda match: match.group(1) + added, raw).encode("latin-1")


def fault_of(vector: Mapping[str, str], statuses: Sequence[int], num_forwarded: int) -> str | None:
    """Say what is wrong with the answers that a connection to the proxy got; None if nothing is."""
    expect = vector["expect"]
    expected = _ONE_READING[vector["id"]] if expect == "one-reading" else _PASSED.get(expect)
    if expect.startswith("401-and-no-upstream-request"):
        expected = (401,)
    if expected is not None:
        right = tuple(statuses) == tuple(expected) and num_forwarded == list(expected).count(200)
    else:
        # A body that merely stops is not malformed yet: the proxy waits for its pace, then says so and closes.
        allowed = frozenset({408}) if vector["id"] == "chunk-no-final" else _REFUSED[expect]
        right = len(statuses) <= 1 and (statuses[0] if statuses else None) in allowed and num_forwarded == 0
    return None if right else f"expected {expect!r}, answered {list(statuses)}, {num_forwarded} forwarded"
