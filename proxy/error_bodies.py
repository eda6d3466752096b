"""Word the proxy's own refusals as the API that was called words its errors: each has clients that match on them.

Pure. What a path belongs to is told by its beginning, and of `/` by what is sent, as in the server behind; status, code
and message are the refusal's own. Knows no reasons.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus

from proxy.answers import Refusal, error_body

_Body = Callable[[Refusal, str], dict[str, object]]

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""What OpenAI's clients know by another name; all other codes keep theirs."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""As Anthropic's API reference has them by status."""


def refusal_body(path: str, refusal: Refusal, request_id: str, content_type: str = "") -> bytes:
    """Render a refusal of a call of `path` with a body of `content_type` as UTF-8 JSON."""
    is_json = content_type.partition(";")[0].strip().lower() == "application/json"
    for beginnings, word in _SURFACES:
        if path.startswith(beginnings) or (path == "/" and is_json and word is _tgi_body):
            return json.dumps(word(refusal, request_id)).encode() + b"\n"
    return error_body(refusal.status, refusal.message)


def _openai_body(refusal: Refusal, _request_id: str) -> dict[str, object]:
    code = _OPENAI_CODES.get(refusal.status, refusal.code)
    kind = _OPENAI_TYPES.get(refusal.status, _by_status(refusal, "invalid_request_error", "server_error"))
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}


def _anthropic_body(refusal: Refusal, request_id: str) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(refusal.status, _by_status(refusal, "invalid_request_error", "api_error"))
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": request_id}


def _tgi_body(refusal: Refusal, _request_id: str) -> dict[str, object]:
    kind = "overloaded" if refusal.status == HTTPStatus.TOO_MANY_REQUESTS else refusal.code
    return {"error": refusal.message, "error_type": kind}


def _by_status(refusal: Refusal, of_caller: str, of_service: str) -> str:
    return of_caller if refusal.status < HTTPStatus.INTERNAL_SERVER_ERROR else of_service


_SURFACES: tuple[tuple[tuple[str, ...], _Body], ...] = (
    (("/v1/requests/",), lambda refusal, _: {"status_code": refusal.status, "message": refusal.message}),
    (("/v1/messages",), _anthropic_body),
    (("/v1/", "/tokenize", "/detokenize", "/apply-template", "/slots", "/props"), _openai_body),
    (("/generate",), _tgi_body),
)
"""Beginnings of paths and their words; the first that fits counts, and what fits none is told natively.

JSON that is posted to `/` itself is TGI's.
"""
