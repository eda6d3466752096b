"""Own the one log line of a call, written at its end: after the last byte of a stream, or once its client has left.

Runs in PROCESS 1, in the call's own thread. The figures are the backend's own, those that `GET /v1/requests/<id>`
tells. Knows what may be logged: never a prompt, an answer, a query, a bearer, nor a header but the caller's own id of
the call. Probes of health and metrics come every few seconds and have their line at `debug` only.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from http import HTTPStatus

from flask import Response, g, request

from inference_api.logs import MAX_WORD_CHARACTERS, Value
from inference_api.messages import NO_TIMING, Finished
from inference_api.server.answer_headers import CLIENT_ID_HEADER
from inference_api.server.choices import Choices
from inference_api.server.context import Call
from inference_api.server.generation import Generation
from inference_api.server.inspection import tokens_per_second
from inference_api.server.trace_context import TRACEPARENT_HEADER, Trace, read_trace

logger = logging.getLogger(__name__)

CLIENT_LEFT_STATUS = 499
"""nginx's number for "client closed request"; it never goes on the wire."""

END_SECONDS = 1.0
"""Longest wait for the end of a generation whose client has left: the backend tells it within a step."""

PROBES = frozenset({"health.root", "health.health", "health.live", "health.ready", "inspection.metrics"})


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a call when its response is made; the rest is its generation's end."""

    method: str
    path: str
    endpoint: str | None
    route: str | None
    """The rule that the path fits, its ids left open; None if it fits none."""
    status: int
    error_code: str | None
    client_request_id: str | None
    """The caller's own name for the call: told back and logged, never a key."""
    trace: Trace
    call: Call | None
    began_at: float


class RequestLog:
    """Write the line of each call; `now` gives monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def begin(self) -> None:
        """Start the clock of a call, and find its trace, before anything else is done for it."""
        g.began_at = self._now()
        g.trace = read_trace(request.headers.get(TRACEPARENT_HEADER))

    def watch(self, response: Response) -> Response:
        """Have the line written when the response is closed, which is after its last byte, however it ends."""
        level = logging.DEBUG if request.endpoint in PROBES else logging.INFO
        if logger.isEnabledFor(level):
            entry = make_entry(response)
            response.call_on_close(lambda: self._write(level, entry))
        return response

    def _write(self, level: int, entry: Entry) -> None:
        duration_ms = round((self._now() - entry.began_at) * 1000, 3)
        fields = request_fields(entry, entry.call.generation if entry.call is not None else None)
        logger.log(level, "request", extra={"fields": {**fields, "duration_ms": duration_ms}})


def make_entry(response: Response) -> Entry:
    """Return what is known of the call that this thread answers."""
    status = response.status_code
    return Entry(
        method=request.method,
        path=request.path,
        endpoint=request.endpoint,
        route=request.url_rule.rule if request.url_rule is not None else None,
        status=status,
        error_code=(
            None if status < HTTPStatus.BAD_REQUEST else response.headers.get("X-Error-Code") or _code_of(status)
        ),
        client_request_id=request.headers.get(CLIENT_ID_HEADER),
        trace=g.trace,
        call=g.get("call"),
        began_at=g.began_at,
    )


def request_fields(entry: Entry, generation: Generation | Choices | None) -> dict[str, Value]:
    """Return the line's names and values; blocks for a moment if the generation has not ended yet.

    What a call has not, and what a lost backend could not tell, is None.
    """
    finished = generation.wait_finished(END_SECONDS) if generation is not None else None
    left = generation is not None and generation.abandoned and entry.error_code is None
    call = entry.call
    return {
        "method": entry.method,
        "path": entry.path[:MAX_WORD_CHARACTERS],
        "status": CLIENT_LEFT_STATUS if left else entry.status,
        "tenant": call.claims.tenant if call is not None else None,
        "request_id": call.request_id if call is not None else None,
        "client_request_id": (entry.client_request_id or "")[:MAX_WORD_CHARACTERS] or None,
        "trace_id": entry.trace.trace_id,
        **_figures(generation, finished),
        "finish": _finish(finished) or entry.error_code or ("abort" if left else None),
    }


def _figures(generation: Generation | Choices | None, finished: Finished | None) -> dict[str, Value]:
    """Return row, waits and counts of a generation that took a place in the queue."""
    timing = finished.timing if finished is not None and finished.timing != NO_TIMING else None
    num_tokens = finished.num_completion_tokens if finished is not None else None
    has_token = timing is not None and bool(num_tokens)
    return {
        "row": generation.row if generation is not None else None,
        "queue_ms": _milliseconds(timing.queue_seconds) if timing is not None else None,
        "ttft_ms": _milliseconds(timing.queue_seconds + timing.prefill_seconds) if timing and has_token else None,
        "prompt_tokens": generation.num_prompt_tokens if generation is not None else None,
        "completion_tokens": num_tokens,
        "tokens_per_second": (
            tokens_per_second((num_tokens or 0) - 1, timing.decode_seconds) if timing and has_token else None
        ),
    }


def _finish(finished: Finished | None) -> str | None:
    if finished is None:
        return None
    return finished.reason.value if finished.error is None else finished.error.code


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _code_of(status: int) -> str:
    """Return the name of a status that has no code of ours, such as `method_not_allowed`."""
    return "internal_error" if status == HTTPStatus.INTERNAL_SERVER_ERROR else HTTPStatus(status).name.lower()
