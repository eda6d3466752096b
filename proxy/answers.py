"""Own the proxy's own answers: a refusal as a value, and its JSON body.

Pure; raised by the core and turned into an answer at one place in the app and one in the worker. It knows HTTP
statuses, not why something was refused. Every message is fixed text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus

ERROR_CODE_HEADER = "X-Error-Code"


class Refusal(Exception):
    """End a request with an error answer: HTTP status, stable code, fixed message, extra headers."""

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


def error_body(status: int, message: str) -> bytes:
    """Render the two-key error body of this API as UTF-8 JSON."""
    return json.dumps({"status_code": status, "message": message}).encode("utf-8") + b"\n"


def error_headers(refusal: Refusal) -> list[tuple[str, str]]:
    """List the headers of an error answer; a 401 names the scheme (RFC 9110 section 11.6.1)."""
    headers = [("Content-Type", "application/json"), (ERROR_CODE_HEADER, refusal.code), *refusal.headers.items()]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append(("WWW-Authenticate", "Bearer"))
    return headers


def raw_error_answer(refusal: Refusal, extra: Iterable[tuple[str, str]] = ()) -> bytes:
    """Render a whole HTTP/1.1 answer that closes the connection, for requests that the app does not answer."""
    body = error_body(refusal.status, refusal.message)
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in [*error_headers(refusal), *extra]]
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body
