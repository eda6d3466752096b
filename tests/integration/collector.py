"""Stand in for an OpenTelemetry collector: take OTLP over HTTP, decode it, and hold what came for the test to read.

Real sockets, the exporter's own protobuf. `MuteCollector` takes connections and never says a word; one that refuses is
a port that nobody listens on.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.integration.service import wait_for

WAIT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class TakenSpan:
    """A span as it arrived; ids in hexadecimal, times in Unix nanoseconds."""

    name: str
    is_server: bool
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


class Collector:
    """Listen on a port of its own; answer each batch with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.num_batches = 0
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self._spans: list[TakenSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            """Take one batch."""

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(self.path, dict(self.headers), body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="collector")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        """What a service is told."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def spans(self, trace_id: str | None = None) -> list[TakenSpan]:
        """Return the spans that have come, of one trace or all."""
        return [span for span in list(self._spans) if trace_id in (None, span.trace_id)]

    def wait_for_trace(self, trace_id: str, num_spans: int) -> tuple[TakenSpan, list[TakenSpan]]:
        """Wait for a trace's spans; return the server's own and the others, in the order of their starts."""
        wait_for(lambda: len(self.spans(trace_id)) >= num_spans, WAIT_SECONDS, f"{num_spans} spans")
        spans = self.spans(trace_id)
        assert len(spans) == num_spans, [span.name for span in spans]
        [server] = [span for span in spans if span.is_server]
        return server, sorted((span for span in spans if not span.is_server), key=lambda span: span.start_ns)

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        assert path == "/v1/traces"
        self.num_batches += 1
        self.headers.append({name.lower(): value for name, value in headers.items()})
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self._spans += [_taken(span, resource) for span in scope.spans]


class MuteCollector:
    """Take connections into the kernel's queue and never answer."""

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    @property
    def url(self) -> str:
        """What a service is told."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"


def _taken(span: Span, resource: dict[str, Any]) -> TakenSpan:
    return TakenSpan(
        name=span.name,
        is_server=span.kind == Span.SPAN_KIND_SERVER,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
        resource=resource,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)
