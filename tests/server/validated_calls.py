"""Send prompts for the tests of the prompt validator, and read what its refusals say in each API's words."""

from __future__ import annotations

import json
from collections.abc import Callable

from flask import Flask
from werkzeug.test import TestResponse

from inference_api.server.identity import ASSERTION_HEADER
from proxy.auth import Claims, mint_assertion
from tests.server.conftest import INTERNAL_KEY, NOW

REQUEST_ID = "req_" + "ab" * 16
Make = Callable[..., Flask]


def message(content: object, **members: object) -> dict[str, object]:
    return {"role": "user", "content": content, **members}


def chat(content: object, **members: object) -> dict[str, object]:
    return {"model": "mock", "max_tokens": 5, "messages": [message(content)], **members}


def post(app: Flask, path: str, body: object, mode: str | None = None) -> TestResponse:
    """Send a body, JSON unless it is text; with a mode as a tenant whose mode the proxy tells."""
    raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    content_type = "text/plain" if isinstance(body, str) else "application/json"
    headers = {}
    if mode is not None:
        claims = Claims("alpha", None, frozenset({"inference"}), None, {"prompt_validator": mode})
        assertion = mint_assertion(INTERNAL_KEY, claims, method="POST", path=path, request_id=REQUEST_ID, now=NOW)
        headers = {ASSERTION_HEADER: assertion, "Request-Id": REQUEST_ID}
    return app.test_client().post(path, data=raw, content_type=content_type, headers=headers)


def told(path: str, body: object, response: TestResponse) -> str:
    """Return the text of an error, from where the API of the path has it."""
    answer = response.get_json()
    if path.startswith(("/inference", "/predictions", "/chat")) or isinstance(body, str):
        assert answer.keys() == {"status_code", "message"}
        return str(answer["message"])
    if path.startswith("/generate") or path == "/":
        assert answer["error_type"] == "validation"
        return str(answer["error"])
    assert answer["error"]["type"] == "invalid_request_error"
    return str(answer["error"]["message"])
