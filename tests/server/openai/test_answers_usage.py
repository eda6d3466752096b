"""Check the cached tokens of OpenAI's usage, in whole answers and in the chunks of a stream, through the routes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.messages import NO_TIMING, Finished, FinishReason
from tests.server.fakes import FakeClient


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.end = Finished(FinishReason.LENGTH, 5, NO_TIMING, num_cached_tokens=3)
    return make_app()


def complete(app: Flask, **members: Any) -> str:
    """Ask for text completions and return the body."""
    body = {"model": "mock", "prompt": "hello", "max_tokens": 5, **members}
    return app.test_client().post("/v1/completions", json=body).get_data(as_text=True)


def usages(app: Flask, **members: Any) -> list[dict[str, Any] | None]:
    """Return the usage of each chunk of a stream."""
    lines = complete(app, stream=True, **members).splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [chunk["usage"] for chunk in chunks]


@pytest.mark.parametrize(("members", "num_cached"), [({}, 3), ({"n": 3}, 3), ({"prompt": ["hello", "hi"]}, 6)])
def test_a_whole_answer_and_a_streams_last_chunk_tell_the_same(
    app: Flask, members: dict[str, Any], num_cached: int
) -> None:
    usage = json.loads(complete(app, **members))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": num_cached}
    assert usages(app, stream_options={"include_usage": True}, **members)[-1] == usage


def test_nothing_is_told_as_cached_before_the_last_answer_has_ended(app: Flask) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = usages(app, n=2, stream_options=options)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told if usage is not None]
    assert cached[-1] == 3 and cached[:-2] == [0] * (len(cached) - 2)
