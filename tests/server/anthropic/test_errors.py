"""Check the type and status that each error has in Anthropic's words."""

from __future__ import annotations

import pytest

from inference_api.errors import (
    AbortedError,
    BackendLostError,
    BodyTooLargeError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    GenerationError,
    InferenceApiError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    RefusedCallError,
    UnauthenticatedError,
    WarmingError,
)
from inference_api.server.anthropic.errors import anthropic_error_response, error_object

CASES = [
    (InvalidRequestError("no"), 400, "invalid_request_error", "false"),
    (PromptTooLongError("no"), 400, "invalid_request_error", "false"),
    (UnauthenticatedError("no"), 401, "authentication_error", "false"),
    (ForbiddenError("no"), 403, "permission_error", "false"),
    (NotFoundError("no"), 404, "not_found_error", "false"),
    (RefusedCallError("no", 405), 405, "invalid_request_error", "false"),
    (AbortedError("no"), 409, "conflict_error", "false"),
    (BodyTooLargeError("no"), 413, "request_too_large", "false"),
    (RefusedCallError("no", 429), 429, "rate_limit_error", "false"),
    (InferenceApiError("no"), 500, "api_error", "false"),
    (GenerationError("no"), 500, "api_error", "false"),
    (DrainingError("no"), 503, "api_error", "true"),
    (WarmingError("no"), 503, "api_error", "true"),
    (BackendLostError("no"), 503, "api_error", "true"),
    (DeadlineError("no"), 504, "timeout_error", "true"),
    (OverloadedError("no"), 529, "overloaded_error", "true"),
]


@pytest.mark.parametrize(("error", "status", "kind", "retry"), CASES, ids=lambda value: type(value).__name__)
def test_each_error_has_its_status_its_type_and_its_advice(error, status: int, kind: str, retry: str) -> None:
    response = anthropic_error_response(error)
    assert response.status_code == status
    assert response.get_json() == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": None}
    assert response.headers["X-Should-Retry"] == retry
    assert response.headers["X-Error-Code"] == error.code


def test_a_retry_time_is_a_whole_number_of_seconds() -> None:
    response = anthropic_error_response(OverloadedError("later", 1.2))
    assert response.headers["Retry-After"] == "2"


def test_an_error_after_the_head_tells_whose_it_is() -> None:
    told = error_object(BackendLostError("gone"), "req_1")
    assert told == {"type": "error", "error": {"type": "api_error", "message": "gone"}, "request_id": "req_1"}
