"""Check the exception tree: stable codes, statuses, and the drawing in the docstring."""

from __future__ import annotations

import re

import pytest

from inference_api import errors
from inference_api.errors import InferenceApiError, RequestError, UnavailableError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, InferenceApiError)]

CODES = {
    "aborted": 409,
    "backend_lost": 503,
    "body_too_large": 413,
    "client_left": 409,
    "context_length_exceeded": 400,
    "deadline_exceeded": 504,
    "draining": 503,
    "forbidden": 403,
    "generation_failed": 500,
    "idempotency_key_reused": 409,
    "internal_error": 500,
    "invalid_request": 400,
    "memory_short": 500,
    "model_error": 500,
    "model_not_found": 404,
    "not_found": 404,
    "overloaded": 503,
    "reader_behind": 408,
    "refused": 400,
    "setting_error": 500,
    "unauthenticated": 401,
    "unavailable": 503,
    "warming": 503,
}


def test_codes_and_statuses_are_stable() -> None:
    assert {error.code: error.status for error in CLASSES} == CODES


def test_the_drawing_shows_every_class_below_its_parent_with_its_status() -> None:
    lines = re.findall(r"^ {4}([│ ]*)(?:[├└]── )?(\w+Error)\s+(.*)$", errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name, _ in lines} == {error.__name__ for error in CLASSES}
    parents: list[str] = []
    for indent, name, text in lines:
        depth = len(indent) // 4 + 1 if name != "InferenceApiError" else 0
        parents[depth:] = [name]
        error = getattr(errors, name)
        if depth:
            assert error.__base__.__name__ == parents[depth - 1], name
        status = re.match(r"\d{3}", text)
        if status:
            assert error.status == int(status.group()), name


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_a_callers_fault_is_a_4xx_and_the_services_own_is_not(error: type[InferenceApiError]) -> None:
    assert (400 <= error.status < 500) == issubclass(error, RequestError)


def test_an_unavailable_service_may_say_when_to_come_back() -> None:
    error = UnavailableError("busy", 3.5)
    assert (str(error), error.retry_after_seconds) == ("busy", 3.5)
    assert UnavailableError("busy").retry_after_seconds is None
