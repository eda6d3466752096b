"""Check OpenAI's error body for every error of ours: what clients match on, and whether they try again."""

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
    UnknownModelError,
    WarmingError,
)
from inference_api.server.openai.errors import error_object, openai_error_response

ERRORS = [
    (InvalidRequestError("it broke", "n"), 400, "invalid_request_error", None, False),
    (PromptTooLongError("it broke"), 400, "invalid_request_error", "context_length_exceeded", False),
    (UnauthenticatedError("it broke"), 401, "authentication_error", "invalid_api_key", False),
    (ForbiddenError("it broke"), 403, "permission_error", "forbidden", False),
    (NotFoundError("it broke"), 404, "not_found_error", "not_found", False),
    (UnknownModelError("it broke"), 404, "not_found_error", "model_not_found", False),
    (AbortedError("it broke"), 409, "conflict_error", "aborted", False),
    (BodyTooLargeError("it broke"), 413, "invalid_request_error", "body_too_large", False),
    (RefusedCallError("it broke", 405), 405, "invalid_request_error", "method_not_allowed", False),
    (InferenceApiError("it broke"), 500, "server_error", "server_error", False),
    (GenerationError("it broke"), 500, "server_error", "generation_failed", False),
    (OverloadedError("it broke"), 503, "server_error", "server_is_overloaded", True),
    (WarmingError("it broke"), 503, "server_error", "server_is_overloaded", True),
    (DrainingError("it broke"), 503, "server_error", "server_is_overloaded", True),
    (BackendLostError("it broke"), 503, "server_error", "backend_lost", True),
    (DeadlineError("it broke"), 504, "server_error", "deadline_exceeded", True),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "retry"), ERRORS, ids=lambda one: type(one).__name__)
def test_each_error_has_the_words_that_clients_match_on(error, status, kind, code, retry) -> None:
    response = openai_error_response(error)
    param = "n" if isinstance(error, InvalidRequestError) else None
    message = "it broke (context_length_exceeded)" if code == "context_length_exceeded" else "it broke"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    assert response.status_code == status and response.content_type == "application/json"
    assert response.get_json() == error_object(error) == body
    assert response.headers["X-Should-Retry"] == str(retry).lower()
    assert response.headers["X-Error-Code"] == error.code


@pytest.mark.parametrize(("seconds", "header"), [(None, None), (0.0, "1"), (0.2, "1"), (2.0, "2"), (2.1, "3")])
def test_a_wait_is_told_in_whole_seconds(seconds: float | None, header: str | None) -> None:
    assert openai_error_response(OverloadedError("x", seconds)).headers.get("Retry-After") == header
