"""Turn results and errors of the native routes into Flask responses: JSON errors, raw text streams, event streams.

Runs in PROCESS 1. One handler a surface: inner code raises, `error_response` converts. A stream that breaks is never
made to look complete: raw routes break the connection, event routes send an error event.
"""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Iterator

import msgspec
from flask import Response

from inference_api.errors import InferenceApiError, UnavailableError

STREAM_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
"""Ask middle boxes not to buffer or rewrite a stream (nginx's proxy module; RFC 9111 section 5.2.2.6)."""

PING = b": ping\n\n"
"""Keeps a silent event stream open: a comment, which every parser skips (WHATWG HTML, section 9.2.6)."""


def json_response(status: int, body: object) -> Response:
    """Return a JSON response."""
    return Response(json.dumps(body), status, content_type="application/json")


def large_json_response(status: int, body: object) -> Response:
    """Return a JSON response of a body of many numbers, which may be tens of megabytes.

    Nothing else of this worker runs while it is encoded: json.dumps would take ten times as long, seconds at that size.
    Raises ValueError for half a surrogate pair, and writes null for what is no number.
    """
    return Response(msgspec.json.encode(body), status, content_type="application/json")


def error_response(error: InferenceApiError) -> Response:
    """Return an error in the one body of the native routes, `{"status_code": n, "message": text}`."""
    return coded_response(error, error.status, {"status_code": error.status, "message": str(error)})


def coded_response(error: InferenceApiError, status: int, body: object) -> Response:
    """Return `body`, a surface's own words for an error, with what any client may read in headers: code, retry."""
    response = json_response(status, body)
    response.headers["X-Error-Code"] = error.code
    if isinstance(error, UnavailableError) and error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    return response


def stream_response(chunks: Iterator[bytes], close: Callable[[], None], *, buffered: bool) -> Response:
    """Return a chunked 200; `close` runs when the response is done, however it ends.

    `buffered` collects the chunks first, for HTTP/1.0, which cannot tell a truncated body from a whole one; an error of
    the stream is then raised here, while the status can still tell it.
    """
    if buffered:
        try:
            body = b"".join(chunks)
        finally:
            close()
        return Response(body, content_type="text/event-stream", headers=STREAM_HEADERS)
    response = Response(_break_on_error(chunks), content_type="text/event-stream", headers=STREAM_HEADERS)
    response.call_on_close(close)
    return response


def _break_on_error(chunks: Iterator[bytes]) -> Iterator[bytes]:
    try:
        yield from chunks
    except InferenceApiError as error:
        raise break_connection(error) from None


def break_connection(error: InferenceApiError) -> BrokenPipeError:
    """Return the exception that makes gunicorn drop the connection without the last chunk and without a traceback."""
    return BrokenPipeError(errno.EPIPE, f"stream broken: {error.code}")


def unwritten_response(error: InferenceApiError) -> Response:
    """Return a response of which not even the head is sent, for a client that has left."""

    def chunks() -> Iterator[bytes]:
        raise break_connection(error)
        yield b""

    return Response(chunks())


def data_event(data: object) -> bytes:
    """Return one server-sent event without a name, of a JSON data line (WHATWG HTML, section 9.2)."""
    return f"data: {json.dumps(data)}\n\n".encode()


def event(name: str, data: object) -> bytes:
    """Return one server-sent event with a JSON data line (WHATWG HTML, section 9.2)."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
