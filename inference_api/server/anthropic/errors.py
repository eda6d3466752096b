"""Encode errors as Anthropic does, before and after the 200: a type that clients match on, and the call's id.

Runs in PROCESS 1. Knows the exception tree and no route.
"""

from __future__ import annotations

from flask import Response, g, has_request_context

from inference_api.errors import InferenceApiError, OverloadedError
from inference_api.server.context import Call
from inference_api.server.generation import is_retryable
from inference_api.server.responses import coded_response

OVERLOADED_STATUS = 529
"""Anthropic's status of a service that is full; anthropic-python 2.12 raises OverloadedError for it."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
"""As Anthropic's API reference has them by status; another 4xx is `invalid_request_error`, another 5xx `api_error`."""


def status_of(error: InferenceApiError) -> int:
    """Return the status by which Anthropic's API would tell an error."""
    return OVERLOADED_STATUS if isinstance(error, OverloadedError) else error.status


def error_object(error: InferenceApiError, request_id: str | None) -> dict[str, object]:
    """Return `{"type": "error", ...}`, the body of an error and the data of an error event."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


def anthropic_error_response(error: InferenceApiError) -> Response:
    """Return an error's response, with the call's id (null where it has none), and whether to send it again."""
    call: Call | None = g.get("call") if has_request_context() else None
    body = error_object(error, call.request_id if call is not None else None)
    response = coded_response(error, status_of(error), body)
    response.headers["X-Should-Retry"] = "true" if is_retryable(error) else "false"
    return response
