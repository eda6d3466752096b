"""How the proxy words its own refusals for each API, and that the server words errors of the same path alike."""

from __future__ import annotations

import json

import pytest

from inference_api.errors import RefusedCallError
from inference_api.server.surfaces import ENCODERS, encode_error
from proxy.answers import Refusal
from proxy.error_bodies import refusal_body
from proxy.routes import ROUTES

REFUSED = Refusal(401, "jwt_expired", "JWT has expired.")
MANY = Refusal(429, "rate_limited", "Too many requests, try again later.")
BROKEN = Refusal(502, "upstream_broken", "Inference server gave no valid answer.")


def openai(kind: str, code: str, refusal: Refusal) -> dict[str, object]:
    return {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}


def anthropic(kind: str, refusal: Refusal) -> dict[str, object]:
    return {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": "req_1"}


@pytest.mark.parametrize(
    ("path", "refusal", "expected"),
    [
        ("/inference/mock", REFUSED, {"status_code": 401, "message": "JWT has expired."}),
        ("/v1/requests/req_1", REFUSED, {"status_code": 401, "message": "JWT has expired."}),
        ("/v1/chat/completions", REFUSED, openai("authentication_error", "invalid_api_key", REFUSED)),
        ("/v1/models", MANY, openai("rate_limit_error", "rate_limit_exceeded", MANY)),
        ("/tokenize", BROKEN, openai("server_error", "upstream_broken", BROKEN)),
        ("/v1/messages", REFUSED, anthropic("authentication_error", REFUSED)),
        ("/v1/messages/count_tokens", BROKEN, anthropic("api_error", BROKEN)),
        ("/generate_stream", MANY, {"error": MANY.message, "error_type": "overloaded"}),
        ("/generate", REFUSED, {"error": REFUSED.message, "error_type": "jwt_expired"}),
        ("/", REFUSED, {"status_code": 401, "message": "JWT has expired."}),
    ],
)
def test_a_refusal_is_worded_as_the_api_that_was_called_words_errors(path, refusal, expected) -> None:
    body = refusal_body(path, refusal, "req_1")
    assert json.loads(body) == expected
    assert body.endswith(b"\n")


def test_the_root_speaks_as_what_is_sent_to_it() -> None:
    for content_type in ("application/json", "Application/JSON; charset=utf-8"):
        told = json.loads(refusal_body("/", MANY, "", content_type))
        assert told == {"error": MANY.message, "error_type": "overloaded"}
        assert encode_error("/", RefusedCallError("No.", 405), "application/json").get_json().keys() == told.keys()
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        told = json.loads(refusal_body("/", MANY, "", content_type))
        assert told == {"status_code": 429, "message": MANY.message}
        assert encode_error("/", RefusedCallError("No.", 405), content_type).get_json().keys() == told.keys()


@pytest.mark.parametrize(
    "path", sorted({route.template.replace("<model>", "m").replace("<id>", "i") for route in ROUTES} - {"/"})
)
def test_proxy_and_server_tell_the_errors_of_a_path_in_one_form(path: str) -> None:
    encode = next(encode for beginning, encode in ENCODERS if path.startswith(beginning))
    told = encode(RefusedCallError("No.", 405)).get_json()
    mine = json.loads(refusal_body(path, Refusal(405, "method_not_allowed", "No."), ""))
    assert told.keys() == mine.keys()
    assert type(told.get("error")) is type(mine.get("error"))
