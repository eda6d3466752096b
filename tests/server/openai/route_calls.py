"""Call the OpenAI routes for the tests, whole and streamed, and take their answers apart."""

from __future__ import annotations

import json
from typing import Any

from flask import Flask
from werkzeug.test import TestResponse

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock", "messages": HELLO},
    TEXT: {"model": "mock", "prompt": "hello"},
}
BOTH = tuple(LEAST)


def post(app: Flask, path: str, *, protocol: str = "HTTP/1.1", **members: Any) -> TestResponse:
    environ = {"SERVER_PROTOCOL": protocol}
    return app.test_client().post(path, json={**LEAST[path], **members}, environ_overrides=environ)


def whole(app: Flask, path: str, **members: Any) -> Any:
    response = post(app, path, **members)
    assert response.status_code == 200, response.get_data(as_text=True)
    return response.get_json()


def streamed(app: Flask, path: str, **members: Any) -> list[Any]:
    """Return the chunks of a stream that ends as one should."""
    response = post(app, path, stream=True, **members)
    assert response.status_code == 200, response.get_data(as_text=True)
    assert response.content_type == "text/event-stream"
    *chunks, done, rest = response.get_data(as_text=True).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def refusal(app: Flask, path: str, **members: Any) -> tuple[int, str, str | None]:
    """Return the status, the text and the member of an error."""
    response = post(app, path, **members)
    error = response.get_json()["error"]
    return response.status_code, error["message"], error["param"]


def choice_text(choice: dict[str, Any]) -> str:
    """Return the text of a choice, whole or of a chunk, chat or text."""
    said = choice.get("message") or choice.get("delta")
    return (said.get("content") or "") if said is not None else choice.get("text", "")


def joined(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice_text(choice) for choice in choices if choice["index"] == index)
