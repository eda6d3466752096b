"""Check which calls have spans, when they are sent, and what a good, a failed, a refused and an abandoned one tell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from flask import Flask

from inference_api.config import Settings
from inference_api.errors import OverloadedError, SettingError
from inference_api.messages import Finished, FinishReason, Timing
from inference_api.server.app import create_app
from inference_api.server.context import ServerContext
from inference_api.server.identity import Identity
from inference_api.server.spans import Span
from inference_api.server.trace_context import Trace
from inference_api.server.tracing import Tracing, make_tracing
from inference_api.server.worker import AT_WORKER_END
from tests.server.fakes import FakeClient, finished

TIMING = Timing(queue_seconds=0.01, prefill_seconds=0.25, decode_seconds=0.5, batch_size=3, context_tokens=16)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SAMPLED = {"Traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


class Sink:
    def __init__(self) -> None:
        self.calls: list[list[Span]] = []
        self.closed = False

    def send(self, spans: Sequence[Span]) -> None:
        self.calls.append(list(spans))

    def close(self) -> None:
        self.closed = True

    @property
    def last(self) -> Span:
        return self.calls[-1][0]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def app(context: ServerContext, sink: Sink) -> Flask:
    identity = Identity(b"k" * 32, lambda: 0.0, allow_anonymous=True)
    return create_app(context, identity, Tracing(sink, "mock", sample_ratio=1.0))


def ask(app: Flask, path: str, method: str = "POST", headers: dict[str, str] = SAMPLED, **options: Any) -> Any:
    return app.test_client().open(path, method=method, headers=headers, buffered=True, **options)


def test_a_whole_call_tells_its_route_its_model_and_its_figures(
    app: Flask, sink: Sink, fake_client: FakeClient
) -> None:
    fake_client.end = Finished(FinishReason.STOP, 6, TIMING)
    response = ask(app, "/inference/mock?text=canary", json={"text": "0123456789"})
    [spans] = sink.calls
    assert [span.name for span in spans] == ["POST /inference/<model>", "queue", "prefill", "decode"]
    told = spans[0].attributes
    assert (spans[0].trace_id, spans[0].parent_id) == (TRACE_ID, PARENT_ID)
    assert (told["http.response.status_code"], told["gen_ai.request.model"]) == (200, "mock")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (10, 6)
    assert told["inference_api.request_id"] == response.headers["Request-Id"]
    assert spans[0].start_ns <= spans[1].start_ns and "canary" not in repr(spans)


def test_the_model_is_the_one_that_the_call_names(app: Flask, sink: Sink) -> None:
    body = {"model": "alias", "messages": [{"role": "user", "content": "x"}]}
    assert ask(app, "/v1/chat/completions", json=body).status_code == 200
    told = sink.last.attributes
    assert (told["gen_ai.request.model"], told["gen_ai.operation.name"]) == ("alias", "chat")


def test_the_spans_are_sent_after_the_last_byte(app: Flask, sink: Sink) -> None:
    response = app.test_client().post("/chat/mock", json={"text": "x"}, headers=SAMPLED, buffered=False)
    body = response.iter_encoded()
    next(body)
    assert sink.calls == []
    b"".join(body)
    response.close()
    assert sink.last.attributes["gen_ai.response.finish_reasons"] == ["length"]


def test_a_client_that_left_is_no_fault_of_ours(app: Flask, sink: Sink, fake_client: FakeClient) -> None:
    fake_client.end = None
    response = app.test_client().post("/chat/mock", json={"text": "x"}, headers=SAMPLED, buffered=False)
    next(response.iter_encoded())
    fake_client.streams[0].end(Finished(FinishReason.ABORT, 5, TIMING))
    response.close()
    told = sink.last.attributes
    assert (told["error.type"], told["http.response.status_code"], sink.last.failed) == ("client_left", 499, False)
    assert (told["gen_ai.response.finish_reasons"], told["gen_ai.usage.output_tokens"]) == (["abort"], 5)


def test_a_failure_in_the_middle_is_one_although_its_status_was_sent(
    app: Flask, sink: Sink, fake_client: FakeClient
) -> None:
    fake_client.end = finished(error="backend_lost", num_tokens=5)
    ask(app, "/chat/mock", json={"text": "x"})
    told = sink.last.attributes
    assert (told["http.response.status_code"], told["error.type"], sink.last.failed) == (200, "backend_lost", True)


def test_a_refusal_by_the_backend_tells_its_code(app: Flask, sink: Sink, fake_client: FakeClient) -> None:
    fake_client.refusal = OverloadedError("full", 1.0)
    ask(app, "/inference/mock", json={"text": "x"})
    assert len(sink.calls[-1]) == 1
    told = sink.last.attributes
    assert (told["http.response.status_code"], told["error.type"], sink.last.failed) == (503, "overloaded", True)


@pytest.mark.parametrize(
    ("path", "options", "name", "code"),
    [
        ("/inference/mock", {"json": {}}, "POST /inference/<model>", "invalid_request"),
        ("/inference/other", {"json": {"text": "x"}}, "POST /inference/<model>", "model_not_found"),
        ("/secret-words", {}, "POST", "not_found"),
    ],
)
def test_a_callers_fault_is_told_and_is_no_failure(
    app: Flask, sink: Sink, path: str, options: dict[str, Any], name: str, code: str
) -> None:
    ask(app, path, **options)
    assert (sink.last.name, sink.last.attributes["error.type"], sink.last.failed) == (name, code, False)
    assert "secret" not in repr(sink.calls)


@pytest.mark.parametrize("path", ["/", "/health", "/health/live", "/health/ready", "/metrics"])
def test_a_probe_has_no_span(app: Flask, sink: Sink, path: str) -> None:
    ask(app, path, "GET")
    assert sink.calls == []


def test_a_trace_that_its_caller_does_not_record_has_no_span(app: Flask, sink: Sink) -> None:
    ask(app, "/inference/mock", json={"text": "x"}, headers={"Traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"})
    assert sink.calls == []


def test_a_call_without_a_trace_begins_one(app: Flask, sink: Sink) -> None:
    ask(app, "/inference/mock", json={"text": "x"}, headers={})
    assert sink.last.parent_id is None and sink.last.trace_id != TRACE_ID


@pytest.mark.parametrize(
    ("ratio", "trace_id", "is_sampled"),
    [
        (0.0, "0" * 31 + "1", False),
        (1.0, "f" * 32, True),
        (0.5, "f" * 16 + "7" + "f" * 15, True),
        (0.5, "0" * 16 + "8" + "0" * 15, False),
    ],
)
def test_the_ratio_is_of_traces_that_begin_here(sink: Sink, ratio: float, trace_id: str, is_sampled: bool) -> None:
    tracing = Tracing(sink, "mock", ratio)
    assert tracing.is_sampled(Trace(trace_id)) is is_sampled
    assert tracing.is_sampled(Trace(trace_id, PARENT_ID, True))
    assert not tracing.is_sampled(Trace(trace_id, PARENT_ID, False))


def test_the_worker_closes_what_it_records_with(app: Flask, sink: Sink) -> None:
    [ending] = app.extensions[AT_WORKER_END]
    ending()
    assert sink.closed


def test_without_a_collector_nothing_is_recorded(make_app: Callable[..., Flask]) -> None:
    assert make_tracing(Settings(), "mock") is None
    assert AT_WORKER_END not in make_app().extensions


def test_without_a_collector_opentelemetry_is_never_imported() -> None:
    code = (
        "import sys, inference_api.supervisor, inference_api.server.app, proxy.app\n"
        "from inference_api.config import Settings\n"
        "from inference_api.server.tracing import make_tracing\n"
        "assert make_tracing(Settings(), 'mock') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "endpoint",
    [
        *("collector:4318", "grpc://c:4317", "http://", "http://c/?a=1", "http://c/#a"),
        *("http://u:p@c:4318", "http://:p@c:4318", "http://@c:4318"),
    ],
)
def test_what_is_no_collector_stops_the_start_by_name(endpoint: str) -> None:
    with pytest.raises(SettingError, match=r"INFERENCE_API_OTLP_ENDPOINT .* must be a collector"):
        Settings.from_environ({"INFERENCE_API_OTLP_ENDPOINT": endpoint})


def test_a_collector_without_the_extra_stops_the_start_and_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_api.config._OTLP_EXPORTER", "opentelemetry_that_is_not_installed.exporter")
    with pytest.raises(SettingError, match=r"opentelemetry-exporter-otlp-proto-http: install the extra 'otel'"):
        Settings.from_environ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
