"""Check the one line of a call: when it is written, what it tells of a good, a refused and an abandoned one."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import OverloadedError
from inference_api.logs import TextFormatter
from inference_api.messages import Finished, FinishReason, RequestView, Timing
from inference_api.server import generation as generation_module
from inference_api.server.identity import ASSERTION_HEADER
from inference_api.server.inspection import request_body
from inference_api.server.output_router import SessionStream
from tests.server.fakes import FakeClient, finished

TIMING = Timing(queue_seconds=0.0105, prefill_seconds=0.25, decode_seconds=0.5, batch_size=3, context_tokens=16)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
LOGGER = "inference_api.server.request_log"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """Return the fields of the lines written so far, at `info`."""
    caplog.set_level(logging.INFO, LOGGER)

    def fields() -> list[dict[str, Any]]:
        return [record.fields for record in caplog.records if record.name == LOGGER]  # type: ignore[attr-defined]

    return fields


def ask(app: Flask, path: str, method: str = "POST", **options: Any) -> TestResponse:
    """Make a call and close its response, as gunicorn does after the last byte."""
    return app.test_client().open(path, method=method, buffered=True, **options)


def only(fields: list[dict[str, Any]]) -> dict[str, Any]:
    (line,) = fields
    assert line.pop("duration_ms") >= 0
    assert re.fullmatch(r"[0-9a-f]{32}", line["trace_id"])
    return line


def test_a_line_tells_the_figures_that_the_requests_view_tells(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.end = Finished(FinishReason.STOP, 6, TIMING)
    headers = {"Traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01", "X-Request-Id": "their-own"}
    response = ask(make_app(), "/inference/mock?text=hidden", json={"text": "0123456789"}, headers=headers)
    assert response.status_code == 200
    line = only(lines())
    view = RequestView("r", "finished", 10, 6, row=0, finish_reason=FinishReason.STOP, timing=TIMING)
    stats: Any = request_body(view)["stats"]
    assert line == {
        "method": "POST",
        "path": "/inference/mock",
        "status": 200,
        "tenant": "local",
        "request_id": response.headers["Request-Id"],
        "client_request_id": "their-own",
        "trace_id": TRACE_ID,
        "row": 0,
        "queue_ms": 10.5,
        "ttft_ms": stats["user_ttft_e2e_ms"],
        "prompt_tokens": stats["prefill"]["tokens_prefilled"],
        "completion_tokens": stats["decode"]["tokens_decoded"],
        "tokens_per_second": stats["user_tps"],
        "finish": "stop",
    }
    assert (line["ttft_ms"], line["tokens_per_second"]) == (260.5, 10.0)


def test_the_line_comes_after_the_last_byte_and_not_before(make_app, fake_client: FakeClient, lines) -> None:
    response = make_app().test_client().post("/chat/mock", json={"text": "x"}, buffered=False)
    body = response.iter_encoded()
    next(body)
    assert lines() == []
    assert b"event: close" in b"".join(body)
    response.close()
    assert only(lines())["finish"] == "length"


def test_nothing_is_said_of_a_request_at_the_default_level(make_app, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    ask(make_app(), "/inference/mock", json={"text": "x"})
    ask(make_app(), "/inference/mock", json={})
    assert caplog.records == []


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "finish", "tenant"),
    [
        ("POST", "/inference/mock", {"json": {}}, 400, "invalid_request", "local"),
        ("POST", "/inference/mock", {"json": {"text": "x" * 3000}}, 413, "body_too_large", "local"),
        ("POST", "/inference/other", {"json": {"text": "x"}}, 404, "model_not_found", "local"),
        ("GET", "/chat/mock", {}, 405, "method_not_allowed", None),
        ("GET", "/rows", {"headers": {ASSERTION_HEADER: "forged"}}, 401, "unauthenticated", None),
        ("GET", "/rows", {}, 200, None, "local"),
    ],
)
def test_a_refusal_has_its_line_with_status_and_code(
    make_app,
    lines,
    method: str,
    path: str,
    options: dict[str, Any],
    status: int,
    finish: str | None,
    tenant: str | None,
) -> None:
    ask(make_app(), path, method, **options)
    line = only(lines())
    assert (line["method"], line["path"], line["status"], line["finish"]) == (method, path, status, finish)
    assert line["tenant"] == tenant
    assert {line[name] for name in ("row", "queue_ms", "ttft_ms", "tokens_per_second", "completion_tokens")} == {None}


def test_an_overloaded_service_says_so_in_the_line(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.refusal = OverloadedError("full", 1.0)
    ask(make_app(), "/inference/mock", json={"text": "x"})
    line = only(lines())
    assert (line["status"], line["finish"], line["row"], line["prompt_tokens"]) == (503, "overloaded", None, 1)


def test_a_defect_of_ours_is_an_internal_error_in_the_line(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.refusal = ZeroDivisionError("inner")
    ask(make_app(), "/inference/mock", json={"text": "x"})
    line = only(lines())
    assert (line["status"], line["finish"]) == (500, "internal_error")


def test_a_failure_in_the_middle_keeps_the_status_that_was_sent(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.end = finished(error="backend_lost", num_tokens=5)
    ask(make_app(), "/chat/mock", json={"text": "x"})
    line = only(lines())
    assert (line["status"], line["finish"], line["completion_tokens"]) == (200, "backend_lost", 5)
    assert (line["queue_ms"], line["ttft_ms"], line["tokens_per_second"]) == (None, None, None)


def test_a_response_that_is_closed_before_its_end_is_a_499(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.end = None
    response = make_app().test_client().post("/chat/mock", json={"text": "x"}, buffered=False)
    next(response.iter_encoded())
    stream = fake_client.streams[0]
    stream.end(Finished(FinishReason.ABORT, 5, TIMING))  # the answer to the Abort, which nobody reads any more
    response.close()
    line = only(lines())
    assert (line["status"], line["finish"]) == (499, "abort")
    assert (line["row"], line["completion_tokens"], line["queue_ms"]) == (0, 5, 10.5)


def test_the_line_of_one_who_left_waits_for_the_backends_count(
    make_app, fake_client: FakeClient, lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_client.end = None
    waits = threading.Event()
    wait_finished = SessionStream.wait_finished

    def wait_and_tell(stream: SessionStream, timeout_seconds: float) -> Finished | None:
        waits.set()
        return wait_finished(stream, timeout_seconds)

    monkeypatch.setattr(SessionStream, "wait_finished", wait_and_tell)
    response = make_app().test_client().post("/chat/mock", json={"text": "x"}, buffered=False)
    next(response.iter_encoded())

    def end_late() -> None:
        waits.wait(10.0)
        fake_client.streams[0].end(Finished(FinishReason.ABORT, 7, TIMING))

    backend = threading.Thread(target=end_late)
    backend.start()
    response.close()
    backend.join()
    assert (only(lines())["completion_tokens"], fake_client.aborts != []) == (7, True)


def test_a_request_without_a_token_has_no_time_to_the_first_one(make_app, fake_client: FakeClient, lines) -> None:
    fake_client.pieces = []
    fake_client.end = Finished(FinishReason.ABORT, 0, TIMING)
    ask(make_app(), "/inference/mock", json={"text": "x"})
    line = only(lines())
    assert (line["status"], line["finish"]) == (409, "abort")
    assert (line["queue_ms"], line["ttft_ms"], line["tokens_per_second"]) == (10.5, None, None)


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready", "/metrics"])
def test_a_probe_has_its_line_at_debug_alone(make_app, caplog: pytest.LogCaptureFixture, path: str) -> None:
    app = make_app()
    caplog.set_level(logging.INFO, LOGGER)
    ask(app, path, "GET")
    assert caplog.records == []
    caplog.set_level(logging.DEBUG, LOGGER)
    ask(app, path, "GET")
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_a_path_cannot_forge_a_line(make_app, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    ask(make_app(), "/x%0A2026-01-01T00:00:00.000Z%20ERROR%20status%3D200%1B[2J" + "y" * 600, "GET")
    (record,) = caplog.records
    line = TextFormatter("server", quote_errors=False, colours=False).format(record)
    assert "\n" not in line and "\x1b" not in line and " status=404" in line and " status=200" not in line
    assert len(line) < 1024


def test_no_part_of_prompt_answer_or_query_is_in_the_line(
    make_app, fake_client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    fake_client.pieces = [b"answer-canary"]
    fake_client.end = finished(num_tokens=13)
    body = {"text": "prompt-canary", "stop_sequence": "stop-canary", "session_id": "id-canary"}
    app = make_app()
    assert b"answer-canary" in ask(app, "/inference/mock?q=query-canary", json=body).data
    ask(app, "/inference/mock", json={**body, "top_k": "field-canary"})
    said = "".join(TextFormatter("server", quote_errors=False, colours=False).format(r) for r in caplog.records)
    assert said.count("request method=POST") == 2 and "canary" not in said


def test_a_generation_never_started_has_no_figures() -> None:
    generation = generation_module.Generation(None, None, None, None)  # type: ignore[arg-type]
    assert generation.wait_finished(0.0) is None
    assert (generation.row, generation.num_prompt_tokens, generation.abandoned) == (None, 0, False)
