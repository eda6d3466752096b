"""Own the shape of a compact JWS: what a bearer text must look like before any key is tried.

Pure; runs in the proxy (user bearers) and in the server (internal assertions). It does not know claims, policies,
clocks or keys: it turns text into a header, a payload and a signature, or refuses. Each rule closes a door that a JWT
library leaves ajar: duplicate names, padded or non-canonical base64, other encodings than UTF-8, numbers that are not
numbers.
"""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_BEARER_BYTES = 8192
MAX_HEADER_BYTES = 512

# RFC 7515 section 7.1 (compact serialization) with the base64url alphabet of RFC 4648 section 5, unpadded.
_COMPACT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
# No claim of ours is longer than a nanosecond timestamp; a longer integer only costs time (quadratic conversion).
_MAX_INTEGER_DIGITS = 20


class ShapeError(ValueError):
    """Refuse a text that is not one well-formed compact JWS; the message is fixed text and safe to show."""


@dataclass(frozen=True, slots=True)
class CompactJws:
    """Hold the three parts of a compact JWS, decoded but not verified; the payload stays bytes until it is."""

    header: dict[str, Any]
    payload: bytes
    signing_input: bytes
    signature: bytes


def parse_compact(
    text: str, *, max_bytes: int = MAX_BEARER_BYTES, max_header_bytes: int = MAX_HEADER_BYTES
) -> CompactJws:
    """Split a compact JWS and decode its parts; raise ShapeError for anything else.

    Sizes are checked before anything is decoded: `max_bytes` bounds the text, `max_header_bytes` the decoded header.
    """
    if len(text) > max_bytes:
        raise ShapeError("JWT is too long.")
    match = _COMPACT.fullmatch(text)
    if match is None:
        raise ShapeError("JWT is not three base64url parts.")
    header_part, payload_part, signature_part = match.groups()
    if len(header_part) * 3 // 4 > max_header_bytes:
        raise ShapeError("JWT header is too long.")
    return CompactJws(
        header=parse_object(decode_base64url(header_part)),
        payload=decode_base64url(payload_part),
        signing_input=f"{header_part}.{payload_part}".encode("ascii"),
        signature=decode_base64url(signature_part),
    )


def decode_base64url(part: str) -> bytes:
    """Decode unpadded base64url; raise ShapeError for any spelling but the canonical one.

    RFC 4648 section 3.5: unused trailing bits must be zero, or several texts would stand for one bearer.
    """
    try:
        decoded = base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except ValueError:
        raise ShapeError("JWT is not three base64url parts.") from None
    if base64.urlsafe_b64encode(decoded).rstrip(b"=").decode("ascii") != part:
        raise ShapeError("JWT is not three base64url parts.")
    return decoded


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object strictly (header or claims); raise ShapeError."""
    try:
        # RFC 8259 section 8.1: UTF-8 only. json.loads(bytes) would guess UTF-16 and UTF-32.
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_names,
            parse_int=_bounded_integer,
            parse_float=_finite_float,
            parse_constant=_refuse_constant,
        )
        # A lone surrogate from a \ud800 escape is not text; encoding finds it wherever it hides.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError):
        raise ShapeError("JWT is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ShapeError("JWT header and payload must be JSON objects.")
    return value


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # RFC 7515 section 4 and RFC 7519 section 4 leave duplicates to the parser; two readers may differ.
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate member name")
    return members


def _bounded_integer(digits: str) -> int:
    if len(digits) > _MAX_INTEGER_DIGITS:
        raise ValueError("integer too long")
    return int(digits)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError("number out of range")
    return number


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
