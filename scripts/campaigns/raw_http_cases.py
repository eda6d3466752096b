"""Make the raw requests that the part `raw_http` sends: the vectors, mutants of them, and forged identities.

Pure; what is drawn comes from the generator that is given. Each case carries a nonce of its own in its path and in its
X-Request-Id, so that an answer or an upstream request can be told from those of any other connection.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from tests.integration.proxy_process import AUTHORIZATION
from tests.integration.raw_vectors import VECTORS, at_line_ends, byte_by_byte, is_anonymous, on_a_route, whole

Segmentation = Callable[[bytes], Iterable[bytes]]
Identify = Callable[[str, str, str], list[str]]
"""Header lines that say who calls, beside the bearer's, for a method, a path and a nonce."""

_MAX_EDITS = 4
# What parsers disagree on: line ends, blanks, separators, signs, NUL, controls, bytes beyond ASCII.
_BYTES = b'\r\n\t \0\x0b\x0c\x1f\x7f\x80\xff:;,=+-0x19aZ_#%/?"\\'
_INSERTS = (
    b"\r\n",
    b"\n",
    b"\r",
    b"\r\n ",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Connection: keep-alive\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\n",
    b"Host: y\r\n",
    b"0\r\n\r\n",
    b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
)
_FORGED_ASSERTION = "eyJhbGciOiJub25lIiwidHlwIjoiaW50ZXJuYWwrand0In0.eyJ0ZWFtX2lkIjoiZXZpbCJ9."

SPOOFS: Mapping[str, tuple[str, ...]] = {
    "team": ("X-Team-Id: evil",),
    "team-case": ("x-team-ID: evil",),
    "team-underscore": ("X_Team_Id: evil",),
    "team-twice": ("X-Team-Id: evil", "X-Team-Id: evil2"),
    "team-hop-by-hop": ("Connection: close, X-Team-Id", "X-Team-Id: evil"),
    "authorization-hop-by-hop": ("Connection: close, Authorization, X-Internal-Assertion",),
    "assertion": (f"X-Internal-Assertion: {_FORGED_ASSERTION}",),
    "assertion-underscore": (f"X_Internal_Assertion: {_FORGED_ASSERTION}",),
    "assertion-twice": ("X-Internal-Assertion: evil", f"x-internal-assertion: {_FORGED_ASSERTION}"),
    "request-id": ("Request-Id: req_00000000000000000000000000000000", "request-id: evil"),
    "forwarded": ("X-Forwarded-For: 127.0.0.1", "Forwarded: for=127.0.0.1;by=evil", "X-Real-Ip: evil"),
    "forwarded-path": ("X-Forwarded-Uri: /metrics", "X-Original-URL: /metrics", "X-Rewrite-URL: /evil"),
    "method": ("X-HTTP-Method-Override: DELETE", "X-Method-Override: evil"),
    "probe": ("User-Agent: kube-probe/1.29", "X-Kubernetes: evil"),
    "script-name": ("SCRIPT_NAME: /evil", "PATH_INFO: /metrics", "Remote-User: evil"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One connection's bytes and pieces; `vector` is None for what no vector tells the answer of."""

    name: str
    nonce: str
    raw: bytes
    pieces: tuple[bytes, ...]
    vector: Mapping[str, str] | None = None
    is_spoof: bool = False


def vector_cases(rng: random.Random, identify: Identify) -> Iterator[Case]:
    """Make every vector in each of four segmentations."""
    for vector in VECTORS:
        for cut in (whole, byte_by_byte, at_line_ends, cut_at_random(rng)):
            nonce = draw_nonce(rng)
            raw = _with_nonce(vector, nonce, identify)
            yield Case(f"{vector['id']} {cut.__name__}", nonce, raw, tuple(cut(raw)), vector)


def mutants(rng: random.Random, number: int, identify: Identify) -> Iterator[Case]:
    """Make so many vectors with up to four edits each, cut at random."""
    for index in range(number):
        vector, nonce = rng.choice(VECTORS), draw_nonce(rng)
        raw = bytearray(_with_nonce(vector, nonce, identify))
        for _ in range(rng.randint(1, _MAX_EDITS)):
            _edit(raw, rng)
        cut = rng.choice((whole, cut_at_random(rng)))
        yield Case(f"mutant {index} of {vector['id']}", nonce, bytes(raw), tuple(cut(bytes(raw))))


def draw_nonce(rng: random.Random) -> str:
    """Draw a word that no other case has."""
    return f"n{rng.getrandbits(64):016x}"


def cut_at_random(rng: random.Random) -> Segmentation:
    """Return a segmentation into a few pieces at random places."""

    def at_random(raw: bytes) -> Iterable[bytes]:
        places = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randint(1, 8)))
        return [raw[begin:end] for begin, end in zip([0, *places], [*places, len(raw)], strict=True) if begin < end]

    return at_random


def spoof_cases(rng: random.Random) -> Iterator[Case]:
    """Make a good request with each forged identity beside its bearer."""
    for name, lines in SPOOFS.items():
        nonce = draw_nonce(rng)
        raw = good_request(nonce, *lines)
        yield Case(f"spoof {name}", nonce, raw, (raw,), is_spoof=True)


def good_request(nonce: str, *lines: str) -> bytes:
    """Return a request that passes, with more lines in its head."""
    head = [f"GET {_reading(nonce)} HTTP/1.1", "Host: x", AUTHORIZATION, f"X-Request-Id: {nonce}", *lines]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode("latin-1")


def canary(nonce: str, identify: Identify) -> bytes:
    """Return a good request for a way in."""
    return good_request(nonce, *identify("GET", _reading(nonce), nonce))


def _reading(nonce: str) -> str:
    return f"/v1/models/{nonce}"


def _with_nonce(vector: Mapping[str, str], nonce: str, identify: Identify) -> bytes:
    generating, anonymous = f"/inference/{nonce}", is_anonymous(vector)
    is_post = vector["raw"].startswith("POST")
    identity = identify("POST", generating, nonce) if is_post else identify("GET", _reading(nonce), nonce)
    fields = [f"X-Request-Id: {nonce}", *([] if anonymous else identity)]
    # Bodies have their lengths: only a vector of several requests gets the fields in each of them.
    is_pipeline = vector["id"].startswith("pipeline")
    head, mark, rest = (vector["raw"], "", "") if is_pipeline else vector["raw"].partition("\r\n\r\n")
    raw = on_a_route(head + mark, anonymous=anonymous, reading=_reading(nonce), generating=generating, fields=fields)
    return raw + rest.encode("latin-1")


def _edit(raw: bytearray, rng: random.Random) -> None:
    place = rng.randrange(len(raw) + 1)
    match rng.randrange(6):
        case 0:
            raw[place : place + 1] = bytes([rng.choice(_BYTES)])
        case 1:
            raw[place:place] = bytes([rng.choice(_BYTES)])
        case 2:
            del raw[place : place + rng.randint(1, 4)]
        case 3:
            start = _line_start(raw, place)
            raw[start:start] = rng.choice(_INSERTS)
        case 4:
            start, end = _line_start(raw, place), raw.find(b"\n", place) + 1
            raw[start:start] = raw[start : end or len(raw)]
        case _:
            start, end = _line_start(raw, place), raw.find(b"\n", place) + 1
            del raw[start : end or len(raw)]


def _line_start(raw: bytearray, place: int) -> int:
    return raw.rfind(b"\n", 0, place) + 1
