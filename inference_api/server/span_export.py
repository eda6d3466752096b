"""Send spans to an OpenTelemetry collector: OTLP over HTTP, in batches, from a thread of its own.

Runs in PROCESS 1, made after the fork, and only where a collector is set: the one module that imports opentelemetry.
A collector that refuses or never answers costs a call nothing: spans that do not fit are dropped and counted, and the
log tells when that begins and ends. Knows no calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from inference_api import __version__
from inference_api.server.spans import Span

logger = logging.getLogger(__name__)

MAX_PENDING_SPANS = 4096
"""Spans that may wait, those on their way included; a call's spans beyond are dropped, all of them."""

DELAY_SECONDS = 1.0
"""Longest that an ended call's spans wait for others: what ended before a Ctrl-C is gone before the processes are."""

FLUSH_SECONDS = 0.75
"""Longest wait for the last batch when the worker ends; the supervisor gives gunicorn two seconds."""

TRACES_PATH = "/v1/traces"
"""What OTLP/HTTP adds to a collector's base URL (specification, "Endpoint URLs for OTLP/HTTP")."""

_SCOPE = InstrumentationScope("inference_api.server", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class SpanExport:
    """Take spans from any thread; close it once, at the worker's end."""

    def __init__(self, endpoint: str) -> None:
        """Start the thread. `endpoint` is the collector's base URL; the SDK reads its other variables itself."""
        # Its own lines would come with every batch that fails; `Outage` tells of the first one.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # What the operator says (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) wins over our own words.
        own = Resource.create({"service.name": "inference_api", "service.version": __version__})
        self._resource = own.merge(OTELResourceDetector().detect())
        self._outage = Outage(endpoint)
        self._exporter = _ToldExporter(OTLPSpanExporter(endpoint.rstrip("/") + TRACES_PATH), self._outage)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=MAX_PENDING_SPANS, schedule_delay_millis=DELAY_SECONDS * 1000
        )

    @property
    def num_dropped(self) -> int:
        """Spans that never arrived, as far as is known."""
        return self._outage.num_dropped

    def send(self, spans: Sequence[Span]) -> None:
        """Have spans sent later; never blocks."""
        if self._outage.take(len(spans)):
            for span in spans:
                self._processor.on_end(self._readable(span))

    def close(self) -> None:
        """Send what waits, if the collector takes it at once; blocks for FLUSH_SECONDS at most."""
        # The SDK's own wait is half a minute, without a way to say less.
        flush = threading.Thread(target=self._processor.shutdown, name="span-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_SECONDS)
        # First, so that a batch that is given up now is not counted twice.
        self._outage.close()
        if flush.is_alive():
            self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = int(span.trace_id, 16)
        parent = None
        if span.parent_id is not None:
            parent = SpanContext(trace_id, int(span.parent_id, 16), span.is_server, _SAMPLED)
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), False, _SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=_SCOPE,
        )


class Outage:
    """Count the spans that wait and those that are lost; say once that some are, and once that it is over."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._num_pending = 0
        self._num_lost = 0
        self._is_on = False
        self._is_closed = False
        self.num_dropped = 0

    def take(self, num_spans: int) -> bool:
        """Make room for spans; False, and they count as lost, if there is none."""
        with self._lock:
            if self._num_pending + num_spans <= MAX_PENDING_SPANS:
                self._num_pending += num_spans
                return True
            begins = self._lose(num_spans)
        if begins:
            self._tell_begin()
        return False

    def give_back(self, num_spans: int, *, arrived: bool) -> None:
        """Note what became of spans that had room."""
        num_lost = 0
        with self._lock:
            if self._is_closed:
                return
            self._num_pending -= num_spans
            begins = not arrived and self._lose(num_spans)
            if arrived and self._is_on:
                num_lost, self._num_lost, self._is_on = self._num_lost, 0, False
        if begins:
            self._tell_begin()
        if num_lost:
            logger.warning("spans are taken again", extra={"fields": {"num_dropped": num_lost}})

    def close(self) -> None:
        """Count what still waits as lost, for good, and say how many are."""
        with self._lock:
            self._is_closed = True
            self._lose(self._num_pending)
            num_lost = self._num_lost
        if num_lost:
            logger.warning("spans were dropped", extra={"fields": {"num_dropped": num_lost}})

    def _lose(self, num_spans: int) -> bool:
        """Count lost spans; True if they are the first of an outage. Called with the lock."""
        begins = not self._is_on and num_spans > 0
        self._is_on = self._is_on or begins
        self._num_lost += num_spans
        self.num_dropped += num_spans
        return begins

    def _tell_begin(self) -> None:
        logger.warning("%s does not take spans: they are dropped until it does", self._endpoint)


class _ToldExporter(SpanExporter):
    """An exporter whose results are told to an Outage."""

    def __init__(self, exporter: SpanExporter, outage: Outage) -> None:
        self._exporter = exporter
        self._outage = outage

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch; blocks as long as the collector lets it, in the batch thread."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self._outage.give_back(len(spans), arrived=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Give up what is under way."""
        self._exporter.shutdown()
