"""Check how spans leave: whole to a collector that takes them, and never in the way of one that does not."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from inference_api.server.span_export import FLUSH_SECONDS, MAX_PENDING_SPANS, Outage, SpanExport
from inference_api.server.spans import Span
from tests.integration.collector import Collector, MuteCollector

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def span(number: int = 1, **changes: object) -> Span:
    told = {"text": "é", "count": 3, "share": 0.5, "words": ["a", "b"]}
    span_id = f"{number:016x}"
    return Span("POST /x", TRACE_ID, span_id, PARENT_ID, 1_000, 3_000, told, is_server=True, **changes)  # type: ignore[arg-type]


def refusing_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    return [(record.getMessage(), getattr(record, "fields", None)) for record in caplog.records]


def test_a_span_arrives_as_it_was_told_with_the_operators_words() -> None:
    with Collector() as collector:
        export = SpanExport(collector.url + "/")
        export.send([span(failed=True)])
        export.close()
        [taken] = collector.spans()
    assert (taken.name, taken.is_server, taken.failed) == ("POST /x", True, True)
    assert (taken.trace_id, taken.span_id, taken.parent_id) == (TRACE_ID, f"{1:016x}", PARENT_ID)
    assert (taken.start_ns, taken.end_ns) == (1_000, 3_000)
    assert taken.attributes == {"text": "é", "count": 3, "share": 0.5, "words": ["a", "b"]}
    assert taken.resource["service.name"] == "inference_api"
    assert taken.resource["deployment.environment.name"] == "test"
    assert collector.headers[0]["x-collector-key"] == "abc"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


def test_the_operators_name_for_the_service_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    with Collector() as collector:
        export = SpanExport(collector.url)
        export.send([span()])
        export.close()
        assert collector.spans()[0].resource["service.name"] == "chat-eu"


def test_a_collector_that_refuses_costs_a_call_nothing_and_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    url = refusing_url()
    export = SpanExport(url)
    began = time.monotonic()
    for number in range(1, 201):
        export.send([span(number)])
    assert time.monotonic() - began < 0.5
    export.close()
    assert export.num_dropped == 200
    assert told(caplog) == [("spans were dropped", {"num_dropped": 200})]


def test_a_collector_that_never_answers_fills_a_bounded_room_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with MuteCollector() as collector:
        export = SpanExport(collector.url)
        began = time.monotonic()
        for number in range(1, MAX_PENDING_SPANS + 101):
            export.send([span(number)])
        assert time.monotonic() - began < 2.0
        assert export.num_dropped == 100
        began = time.monotonic()
        export.close()
        assert time.monotonic() - began < FLUSH_SECONDS + 1.0
    lines = told(caplog)
    assert [text for text, _fields in lines] == [
        f"{collector_url(lines)} does not take spans: they are dropped until it does",
        "spans were dropped",
    ]
    assert lines[-1][1] == {"num_dropped": MAX_PENDING_SPANS + 100}


def collector_url(lines: list[tuple[str, object]]) -> str:
    return lines[0][0].split(" ", 1)[0]


def test_a_collector_that_says_no_loses_the_batch_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with Collector(status=400) as collector:
        export = SpanExport(collector.url)
        export.send([span(1)])
        export._processor.force_flush()
        collector.status = 200
        export.send([span(2)])
        export.close()
    assert export.num_dropped == 1
    assert told(caplog) == [
        (f"{collector.url} does not take spans: they are dropped until it does", None),
        ("spans are taken again", {"num_dropped": 1}),
    ]


def test_an_outage_is_told_at_its_beginning_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    outage = Outage("http://c")
    assert outage.take(MAX_PENDING_SPANS) and not outage.take(1) and not outage.take(2)
    outage.give_back(MAX_PENDING_SPANS, arrived=False)
    assert outage.take(5)
    outage.give_back(5, arrived=True)
    assert outage.num_dropped == MAX_PENDING_SPANS + 3
    assert told(caplog) == [
        ("http://c does not take spans: they are dropped until it does", None),
        ("spans are taken again", {"num_dropped": MAX_PENDING_SPANS + 3}),
    ]
    outage.close()
    assert len(caplog.records) == 2


def test_what_waits_at_the_end_is_lost_once(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("http://c")
    assert outage.take(3)
    outage.close()
    outage.give_back(3, arrived=False)
    assert outage.num_dropped == 3 and told(caplog) == [("spans were dropped", {"num_dropped": 3})]


def test_the_spans_of_one_call_are_taken_together_or_not_at_all() -> None:
    outage = Outage("http://c")
    assert outage.take(MAX_PENDING_SPANS - 2)
    assert not outage.take(3)
    assert outage.take(2)
