"""Check that each API's callers get errors in its own words, by the path that they called."""

from __future__ import annotations

import pytest

from inference_api.errors import InvalidRequestError, NotFoundError, OverloadedError
from inference_api.server.surfaces import ENCODERS, encode_error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/m", "/v1/other"])
def test_openais_paths_get_openais_error(path: str) -> None:
    response = encode_error(path, InvalidRequestError("n: Input should be 1; it is 0.", "n"))
    assert response.status_code == 400
    assert response.get_json() == {
        "error": {
            "message": "n: Input should be 1; it is 0.",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }


@pytest.mark.parametrize("path", ["/inference/m", "/chat/m", "/rows", "/v1/requests/req_1", "/unknown", "/v1"])
def test_all_other_paths_get_the_native_error(path: str) -> None:
    response = encode_error(path, NotFoundError("No such request."))
    assert response.status_code == 404
    assert response.get_json() == {"status_code": 404, "message": "No such request."}


def test_the_root_speaks_as_what_was_sent_to_it() -> None:
    error = OverloadedError("Service overloaded, try again later.", 2.5)
    as_tgi = encode_error("/", error, "application/json")
    assert (as_tgi.status_code, as_tgi.get_json()["error_type"]) == (429, "overloaded")
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"):
        native = encode_error("/", error, media_type)
        assert (native.status_code, native.get_json()["status_code"]) == (503, 503)


@pytest.mark.parametrize("path", [beginning for beginning, _ in ENCODERS])
def test_every_surface_tells_a_stable_code_and_when_to_come_back(path: str) -> None:
    response = encode_error(path, OverloadedError("Service overloaded, try again later.", 2.5))
    assert response.status_code >= 400
    assert response.headers["X-Error-Code"] == "overloaded"
    assert response.headers["Retry-After"] == "3"
    assert "Service overloaded, try again later." in response.get_data(as_text=True)


def test_a_path_belongs_to_the_first_beginning_that_fits_and_every_path_to_one() -> None:
    beginnings = [beginning for beginning, _ in ENCODERS]
    assert beginnings[-1] == "/"
    shadowed = [
        (earlier, later)
        for place, later in enumerate(beginnings)
        for earlier in beginnings[:place]
        if later.startswith(earlier)
    ]
    assert not shadowed
