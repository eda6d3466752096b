"""Check the server's debug events of a session: their order, and that they hold neither text nor token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from inference_api.debug_log import DebugLog
from inference_api.errors import OverloadedError
from tests.server.fakes import FakeClient


@pytest.fixture
def traced(make_app: Callable[..., Flask], tmp_path: Path) -> tuple[Flask, Callable[[], list[dict[str, Any]]]]:
    """Return an application in debug mode, and what reads its events."""
    log = DebugLog(tmp_path / "debug_logs", "frontend-7000")

    def events() -> list[dict[str, Any]]:
        return [json.loads(line) for line in log.path.read_text().splitlines()]

    return make_app({"debug_log": log}), events


def test_a_session_is_opened_accepted_begun_and_closed(traced, fake_client: FakeClient) -> None:
    app, events = traced
    body = {"text": "secret words", "max_tokens": 7}
    response = app.test_client().post("/inference/mock", json=body, buffered=True)
    assert response.data == b"Hello"
    opened, accepted, first, closed = events()
    assert [event["event"] for event in events()] == ["opened", "accepted", "first_token", "closed"]
    assert {event["session_id"] for event in events()} == {fake_client.last.session_id}
    assert (opened["request_id"], opened["tenant"]) == (response.headers["Request-Id"], "local")
    assert (opened["num_prompt_tokens"], opened["max_tokens"], opened["num_stop_sequences"]) == (12, 7, 0)
    assert first["row"] == 0 and accepted["time"] <= first["time"]
    assert (closed["reason"], closed["num_delivered_tokens"], closed["abandoned"]) == ("length", 5, False)
    text = json.dumps(events())
    assert "secret" not in text and "Hello" not in text and "[" not in text[1:-1]


def test_a_refused_session_says_why(traced, fake_client: FakeClient) -> None:
    app, events = traced
    fake_client.refusal = OverloadedError("full", 1.0)
    app.test_client().post("/chat/mock", json={"text": "x"})
    assert [(event["event"], event.get("code")) for event in events()] == [("opened", None), ("refused", "overloaded")]


def test_an_abandoned_session_is_closed_without_a_reason_of_the_backend(traced, fake_client: FakeClient) -> None:
    app, events = traced
    fake_client.end = None
    response = app.test_client().post("/chat/mock", json={"text": "x"}, buffered=False)
    next(response.iter_encoded())
    response.close()
    assert (events()[-1]["reason"], events()[-1]["abandoned"]) == (None, True)
