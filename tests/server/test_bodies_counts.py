"""Counts of tokens that no context could ever hold are refused by every surface, by their name."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from flask import Flask

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("value", ["2147483648", "9" * 4300])
@pytest.mark.parametrize(
    ("path", "body", "name", "status"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, "max_tokens", 400),
        ("/v1/chat/completions", {"messages": HELLO}, "max_completion_tokens", 400),
        ("/v1/completions", {"prompt": "hi"}, "min_tokens", 400),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens", 400),
        ("/v1/messages", {"messages": HELLO}, "max_tokens", 400),
        ("/generate", {"inputs": "hi"}, "max_new_tokens", 422),
    ],
)
def test_a_count_beyond_every_context_is_refused_by_its_name(
    make_app: Callable[..., Flask], path: str, body: dict[str, object], name: str, status: int, value: str
) -> None:
    given = {**body, "model": "mock"}
    text = json.dumps(given)[:-1] + f', "{name}": {value}}}'
    if path == "/generate":
        text = f'{{"inputs": "hi", "parameters": {{"{name}": {value}}}}}'
    response = make_app(body_bytes=8192).test_client().post(path, data=text, content_type="application/json")
    assert response.status_code == status
    assert name in response.text
