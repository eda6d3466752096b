"""Own the headers that every answer carries: whose call it was, how long it took, and the figures of a whole answer.

Runs in PROCESS 1, after a view and before the first byte of a stream: a stream's end is not known by then, so its
figures are in its last event or in `GET /v1/requests/<id>`. The figures are the backend's own. Knows no surface.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from flask import Response, g, request

from inference_api.messages import NO_TIMING
from inference_api.server.context import Call

CLIENT_ID_HEADER = "X-Request-Id"
REQUEST_ID_HEADER = "Request-Id"
PROCESSING_HEADER = "OpenAI-Processing-Ms"
"""OpenAI's name, which its clients log: API reference, "Debugging requests"."""


class AnswerHeaders:
    """Add the headers; `now` gives the monotonic seconds that `g.began_at` is of."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now

    def add(self, response: Response) -> Response:
        """Return the response with its headers; the time is up to the head of a stream, which waits for its news."""
        response.headers[PROCESSING_HEADER] = str(round((self._now() - g.began_at) * 1000))
        call: Call | None = g.get("call")
        if call is not None:
            response.headers[REQUEST_ID_HEADER] = call.request_id
            response.headers[CLIENT_ID_HEADER] = request.headers.get(CLIENT_ID_HEADER, call.request_id)
            response.headers.update(call.response_headers)
            if not response.is_streamed:
                response.headers.update(figure_headers(call))
        return response


def figure_headers(call: Call) -> dict[str, str]:
    """Return the figures of what a call has generated; none before its end, times of a single generation only."""
    generation = call.generation
    finished = generation.wait_finished(0.0) if generation is not None else None
    if generation is None or finished is None:
        return {}
    headers = {
        "X-Inference-Prompt-Tokens": str(generation.num_prompt_tokens),
        "X-Inference-Completion-Tokens": str(finished.num_completion_tokens),
    }
    if finished.timing != NO_TIMING:
        headers["X-Inference-Queue-Ms"] = _milliseconds(finished.timing.queue_seconds)
        headers["X-Inference-Prefill-Ms"] = _milliseconds(finished.timing.prefill_seconds)
        headers["X-Inference-Decode-Ms"] = _milliseconds(finished.timing.decode_seconds)
    return headers


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"
