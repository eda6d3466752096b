"""Encode errors as TGI does, before and after the 200: a text and its type, from which clients choose an exception.

Runs in PROCESS 1. Pure; knows the exception tree and no route.
"""

from __future__ import annotations

from flask import Response

from inference_api.errors import (
    BackendLostError,
    BodyTooLargeError,
    DeadlineError,
    DrainingError,
    GenerationError,
    InferenceApiError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    WarmingError,
)
from inference_api.server.responses import coded_response

_TOLD: tuple[tuple[type[InferenceApiError], int | None, str], ...] = (
    (InvalidRequestError, 422, "validation"),
    (PromptTooLongError, 422, "validation"),
    (BodyTooLargeError, None, "validation"),
    (OverloadedError, 429, "overloaded"),
    (WarmingError, None, "overloaded"),
    (DrainingError, None, "overloaded"),
    (GenerationError, 424, "generation"),
    (DeadlineError, 500, "incomplete_generation"),
    (BackendLostError, 500, "incomplete_generation"),
)
"""Status and type of each error: TGI's own four, docs/openapi.json of text-generation-inference 3.

Where TGI has no such error the status stays ours. What is not listed keeps status and code.
"""


def told(error: InferenceApiError) -> tuple[int, dict[str, object]]:
    """Return an error's status, and `{"error", "error_type"}`: the body, or the data of an error event."""
    for kind, status, error_type in _TOLD:
        if isinstance(error, kind):
            return status or error.status, {"error": str(error), "error_type": error_type}
    return error.status, {"error": str(error), "error_type": error.code}


def tgi_error_response(error: InferenceApiError) -> Response:
    """Return an error's response."""
    return coded_response(error, *told(error))
