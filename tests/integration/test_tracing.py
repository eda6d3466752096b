"""Check on the whole service that calls arrive at a collector as spans, and that a dead collector costs nothing."""

from __future__ import annotations

import secrets
import signal
import statistics
import time
from collections.abc import Iterator

import pytest
import requests

from tests.integration.collector import Collector, MuteCollector
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, running_service, wait_for

SOON = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
PARENT_ID = "00f067aa0ba902b7"
CANARIES = ("prompt-canary", "stop-canary", "system-canary")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def service(collector: Collector) -> Iterator[Service]:
    settings = {"INFERENCE_API_WORKERS": "2", "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "400", **SOON}
    with running_service(proxy=True, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, **settings) as running:
        yield running


def new_trace(flags: str = "01") -> tuple[str, dict[str, str]]:
    """Return a trace's id, and the headers of a call in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, {**bearer(), "traceparent": f"00-{trace_id}-{PARENT_ID}-{flags}"}


def chat(service: Service, headers: dict[str, str], **members: object) -> requests.Response:
    """Ask through the proxy."""
    body = {
        "model": "mock",
        "messages": [{"role": "system", "content": CANARIES[2]}, {"role": "user", "content": CANARIES[0]}],
        "stop": [CANARIES[1]],
        "max_tokens": 8,
        **members,
    }
    return requests.post(f"{service.proxy_url}/v1/chat/completions", json=body, headers=headers, timeout=30)


def test_a_whole_answer_is_a_span_with_its_phases_in_the_callers_trace(service: Service, collector: Collector) -> None:
    trace_id, headers = new_trace()
    began_ns = time.time_ns()
    answer = chat(service, headers)
    ended_ns = time.time_ns()
    server, phases = collector.wait_for_trace(trace_id, 4)
    usage = answer.json()["usage"]
    assert server.name == "POST /v1/chat/completions" and server.parent_id == PARENT_ID
    assert server.attributes["gen_ai.request.model"] == "mock"
    assert server.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert server.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert server.attributes["inference_api.request_id"] == answer.headers["Request-Id"]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.parent_id for span in phases} == {server.span_id}
    told = [float(answer.headers[f"X-Inference-{name}-Ms"]) for name in ("Queue", "Prefill", "Decode")]
    assert [span.seconds * 1000 for span in phases] == pytest.approx(told, abs=0.002)
    times = [server.start_ns, *(span.start_ns for span in phases), phases[-1].end_ns, server.end_ns]
    assert times == sorted(times) and began_ns <= times[0] and times[-1] <= ended_ns + 1_000_000_000


def test_a_stream_is_a_span_up_to_its_last_byte(service: Service, collector: Collector) -> None:
    trace_id, headers = new_trace()
    assert "[DONE]" in chat(service, headers, stream=True, max_tokens=20).text
    server, phases = collector.wait_for_trace(trace_id, 4)
    assert server.attributes["gen_ai.usage.output_tokens"] == 20
    assert server.seconds >= phases[2].seconds > 0.02


def test_several_answers_have_their_phases_each(service: Service, collector: Collector) -> None:
    trace_id, headers = new_trace()
    assert len(chat(service, headers, n=3).json()["choices"]) == 3
    server, phases = collector.wait_for_trace(trace_id, 10)
    assert server.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert sorted(span.attributes["inference_api.choice"] for span in phases) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_an_error_is_told_by_its_code_and_is_not_a_failure_of_ours(service: Service, collector: Collector) -> None:
    trace_id, headers = new_trace()
    assert chat(service, headers, model="other").status_code == 404
    server, phases = collector.wait_for_trace(trace_id, 1)
    assert (server.attributes["http.response.status_code"], server.failed, phases) == (404, False, [])
    assert server.attributes["error.type"] in ("not_found", "model_not_found")


def test_a_client_that_leaves_is_told_as_one(service: Service, collector: Collector) -> None:
    trace_id, headers = new_trace()
    body = {"model": "mock", "prompt": CANARIES[0], "max_tokens": 1500, "stream": True}
    assert service.proxy_port is not None
    with RawStream(service.proxy_port, "/v1/completions", body, headers) as stream:
        assert stream.read_chunk()
    server, phases = collector.wait_for_trace(trace_id, 4)
    assert (server.attributes["error.type"], server.attributes["http.response.status_code"]) == ("client_left", 499)
    assert server.attributes["gen_ai.response.finish_reasons"] == ["abort"] and not server.failed
    assert 0 < server.attributes["gen_ai.usage.output_tokens"] < 1500
    assert phases[2].end_ns <= server.end_ns


def test_a_trace_that_its_caller_does_not_record_is_left_alone_and_one_of_nobody_is_recorded(
    service: Service, collector: Collector
) -> None:
    hidden, headers = new_trace("00")
    known = {span.trace_id for span in collector.spans()}
    assert chat(service, headers).status_code == 200
    answer = chat(service, bearer())
    wanted = answer.headers["Request-Id"]
    wait_for(
        lambda: wanted in [span.attributes.get("inference_api.request_id") for span in collector.spans()], 10, "a span"
    )
    # Two workers export by themselves: a look at the one's batch proves nothing of the other's.
    traces = {span.trace_id for span in collector.spans()} - known
    assert len(traces) == 1 and hidden not in traces


def test_both_workers_export_and_no_text_and_no_bearer_has_arrived(service: Service, collector: Collector) -> None:
    trace_ids = []
    for _ in range(24):
        trace_id, headers = new_trace()
        assert chat(service, headers).status_code == 200
        trace_ids.append(trace_id)
    for trace_id in trace_ids:
        collector.wait_for_trace(trace_id, 4)
    assert len({span.resource["service.instance.id"] for span in collector.spans()}) == 2
    said = b"".join(collector.bodies)
    assert not [word for word in (*CANARIES, "Bearer", "eyJ") if word.encode() in said]


def test_what_waits_is_sent_when_the_service_ends(collector: Collector) -> None:
    with running_service(INFERENCE_API_OTLP_ENDPOINT=collector.url) as service:
        answer = service.post("/v1/completions", {"model": "mock", "prompt": "x", "max_tokens": 4})
        assert service.stop(signal.SIGTERM) == 0
    assert answer.headers["Request-Id"] in [
        span.attributes.get("inference_api.request_id") for span in collector.spans()
    ]


def test_a_collector_that_never_answers_costs_a_call_nothing_and_the_end_little() -> None:
    with MuteCollector() as mute, running_service(INFERENCE_API_OTLP_ENDPOINT=mute.url, **SOON) as service:
        body = {"model": "mock", "prompt": "x", "max_tokens": 2}
        seconds = []
        for _ in range(40):
            began = time.monotonic()
            assert service.post("/v1/completions", body).status_code == 200
            seconds.append(time.monotonic() - began)
        # An export is under way for a second; the calls that waited for one would take that long.
        assert statistics.median(seconds) < 0.25
        wait_for(lambda: "does not take spans" in service.log.read_text(), 10, "the line of the outage")
        began = time.monotonic()
        assert service.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began < 6.0
        log = service.log.read_text()
    assert log.count("does not take spans") == 1 and "spans were dropped num_dropped=" in log
    assert "opentelemetry" not in log and "Traceback" not in log
