"""Record a call's spans at its end, if its trace is sampled and a collector is set; without one this is never made.

Runs in PROCESS 1, in the call's own thread, after the last byte: nothing of it is on a call's path. The caller's flag
decides; of traces that begin here a share is sampled. Probes have no spans, for they come every few seconds. What the
spans hold is in spans.py, how they leave in span_export.py, which is imported here alone and late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from flask import Response, g, request

from inference_api.config import Settings
from inference_api.server.generation import Generation
from inference_api.server.request_log import CLIENT_LEFT_STATUS, END_SECONDS, PROBES, Entry, make_entry
from inference_api.server.spans import EndedCall, Run, Span, spans_of
from inference_api.server.trace_context import Trace

CLIENT_LEFT = "client_left"


class SpanSink(Protocol):
    """Where spans go; `send` does not block."""

    def send(self, spans: Sequence[Span]) -> None:
        """Take spans."""

    def close(self) -> None:
        """Send what waits."""


class Tracing:
    """Turn calls into spans; `sample_ratio` is the share, 0 to 1, of the traces that begin here."""

    def __init__(
        self,
        sink: SpanSink,
        model_name: str,
        sample_ratio: float,
        now: Callable[[], float] = time.monotonic,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`model_name` is what a call that names none has asked for; `now` is the clock of the request log."""
        self._sink = sink
        self._model_name = model_name
        self._sample_ratio = sample_ratio
        self._now = now
        self._unix_ns = unix_ns

    def watch(self, response: Response) -> Response:
        """Have the spans sent when the response is closed, which is after its last byte, however it ends."""
        if request.endpoint not in PROBES and self.is_sampled(g.trace):
            entry = make_entry(response)
            response.call_on_close(lambda: self._record(entry))
        return response

    def is_sampled(self, trace: Trace) -> bool:
        """Tell whether a trace is recorded: its caller decides, or for one that begins here its id."""
        if trace.parent_id is not None:
            return trace.is_sampled
        # As OpenTelemetry's TraceIdRatioBased: the lowest 64 bits, so that all who use a ratio choose alike.
        return int(trace.trace_id[16:], 16) < self._sample_ratio * 2**64

    def close(self) -> None:
        """Send what waits; blocks for a moment at most."""
        self._sink.close()

    def _record(self, entry: Entry) -> None:
        runs = _runs_of(entry)
        self._sink.send(spans_of(self._ended(entry, runs), self._unix_ns()))

    def _ended(self, entry: Entry, runs: Sequence[Run]) -> EndedCall:
        call = entry.call
        generation = call.generation if call is not None else None
        failure = next((run.finished.error for run in runs if run.finished is not None and run.finished.error), None)
        code = entry.error_code or (failure.code if failure is not None else None)
        left = code is None and generation is not None and generation.abandoned
        status = CLIENT_LEFT_STATUS if left else entry.status
        return EndedCall(
            trace=entry.trace,
            method=entry.method,
            route=entry.route,
            endpoint=entry.endpoint,
            status=status,
            began_at=entry.began_at,
            ended_at=self._now(),
            error_code=CLIENT_LEFT if left else code,
            failed=failure is not None or status >= 500,
            tenant=call.claims.tenant if call is not None else None,
            request_id=call.request_id if call is not None else None,
            model=(call.model or self._model_name) if call is not None else None,
            runs=runs,
        )


def make_tracing(settings: Settings, model_name: str) -> Tracing | None:
    """Return what records this worker's spans; None without a collector. Call it after the fork: it starts a thread."""
    if not settings.otlp_endpoint:
        return None
    from inference_api.server.span_export import SpanExport

    return Tracing(SpanExport(settings.otlp_endpoint), model_name, settings.trace_sample_ratio)


def _runs_of(entry: Entry) -> list[Run]:
    """Return what a call has submitted; blocks for a moment if an end is still to come, as for a client that left."""
    generation = entry.call.generation if entry.call is not None else None
    if generation is None:
        return []
    generation.wait_finished(END_SECONDS)
    return [run for one in generation.generations if (run := _run_of(one)) is not None]


def _run_of(generation: Generation) -> Run | None:
    if generation.submitted is None:
        return None
    return Run(generation.submitted, generation.submitted_at, generation.wait_finished(0.0))
