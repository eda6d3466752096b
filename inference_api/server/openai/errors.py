"""Encode errors as OpenAI does, before and after the 200: one object, whose code clients match on.

Runs in PROCESS 1. Pure; knows the exception tree and no route.
"""

from __future__ import annotations

from flask import Response

from inference_api.errors import InferenceApiError, InvalidRequestError, PromptTooLongError
from inference_api.server.generation import is_retryable
from inference_api.server.responses import coded_response

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""As openai-python 3.54 tells them apart by status; another 4xx is the caller's fault, too."""

_CODES = {
    "invalid_request": None,
    "unauthenticated": "invalid_api_key",
    "overloaded": "server_is_overloaded",
    "warming": "server_is_overloaded",
    "draining": "server_is_overloaded",
    "internal_error": "server_error",
}
"""Codes of ours that OpenAI's clients know by another name; all others keep theirs."""


def error_object(error: InferenceApiError) -> dict[str, object]:
    """Return `{"error": {...}}`, the body of an error and the data of an error event."""
    return {
        "error": {
            "message": _message(error),
            "type": _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error"),
            "param": error.param if isinstance(error, InvalidRequestError) else None,
            "code": _CODES.get(error.code, error.code),
        }
    }


def _message(error: InferenceApiError) -> str:
    """Return an error's text, in which langchain-openai 1.7.3 looks for the code: openai-python 3 shows it no more."""
    return f"{error} ({error.code})" if isinstance(error, PromptTooLongError) else str(error)


def openai_error_response(error: InferenceApiError) -> Response:
    """Return an error's response; clients are told whether to send the request again."""
    response = coded_response(error, error.status, error_object(error))
    response.headers["X-Should-Retry"] = "true" if is_retryable(error) else "false"
    return response
