"""Check that each error has the status and the type by which TGI's clients choose an exception."""

from __future__ import annotations

import pytest

from inference_api.errors import (
    AbortedError,
    BackendLostError,
    BodyTooLargeError,
    DeadlineError,
    DrainingError,
    GenerationError,
    InferenceApiError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    UnauthenticatedError,
    WarmingError,
)
from inference_api.server.surfaces import encode_error


@pytest.mark.parametrize(
    ("error", "status", "error_type"),
    [
        (InvalidRequestError("it broke", "inputs"), 422, "validation"),
        (PromptTooLongError("it broke"), 422, "validation"),
        (BodyTooLargeError("it broke"), 413, "validation"),
        (OverloadedError("it broke", 2.0), 429, "overloaded"),
        (WarmingError("it broke", 1.0), 503, "overloaded"),
        (DrainingError("it broke"), 503, "overloaded"),
        (GenerationError("it broke"), 424, "generation"),
        (DeadlineError("it broke"), 500, "incomplete_generation"),
        (BackendLostError("it broke", 1.0), 500, "incomplete_generation"),
        (UnauthenticatedError("it broke"), 401, "unauthenticated"),
        (NotFoundError("it broke"), 404, "not_found"),
        (AbortedError("it broke"), 409, "aborted"),
        (InferenceApiError("it broke"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
def test_an_error_has_its_type_and_keeps_our_code(
    path: str, error: InferenceApiError, status: int, error_type: str
) -> None:
    response = encode_error(path, error, "application/json")
    assert (response.status_code, response.get_json()) == (status, {"error": "it broke", "error_type": error_type})
    assert response.headers["X-Error-Code"] == error.code


def test_a_time_to_retry_is_told() -> None:
    assert encode_error("/generate", OverloadedError("full", 2.5)).headers["Retry-After"] == "3"
