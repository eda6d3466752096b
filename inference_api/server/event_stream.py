"""Answer a call with server-sent events in a surface's own words: hold the head, ping, end, or break with an error.

Runs in PROCESS 1, in the request's own thread. The head is held until the first text or a few seconds, so that a
refusal keeps its status; after it an error is an event of the surface's own form, and a client that leaves is noticed
there too. Knows no surface: an EventWriter writes what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from flask import Response, request

from inference_api.config import Settings
from inference_api.errors import InferenceApiError
from inference_api.server.choices import ChoicePiece, Choices
from inference_api.server.responses import stream_response


class EventWriter(Protocol):
    """Write one answer's events; called in this order: begin, piece or ping any number of times, end or error."""

    def begin(self) -> Iterable[bytes]:
        """Return what comes before any text."""
        ...

    def piece(self, choice: ChoicePiece) -> Iterable[bytes]:
        """Return what a piece is sent as; nothing for one without text that ends nothing."""
        ...

    def ping(self) -> bytes:
        """Return what keeps a silent connection open and is no news."""
        ...

    def end(self) -> Iterable[bytes]:
        """Return what comes after all answers have ended."""
        ...

    def error(self, error: InferenceApiError) -> Iterable[bytes]:
        """Return what ends a stream that cannot go on."""
        ...


def event_response(choices: Choices, writer: EventWriter, settings: Settings) -> Response:
    """Return the streamed response of running choices, which it closes; raises what ends them before the head."""
    buffered = request.environ["SERVER_PROTOCOL"] == "HTTP/1.0"
    try:
        first = choices.next_piece(None if buffered else settings.sse_hold_seconds)
    except BaseException:
        choices.close()
        raise
    chunks = _events(choices, first, writer, settings.sse_ping_seconds, buffered=buffered)
    return stream_response(chunks, choices.close, buffered=buffered)


def _events(
    choices: Choices, first: ChoicePiece | None, writer: EventWriter, ping_seconds: float, *, buffered: bool
) -> Iterator[bytes]:
    yield from writer.begin()
    choice = first
    try:
        while True:
            if choice is None:
                yield writer.ping()
            else:
                yield from writer.piece(choice)
                if not choices.is_running:
                    break
            choice = choices.next_piece(ping_seconds)
    except InferenceApiError as error:
        if buffered:
            raise
        yield from writer.error(error)
        return
    yield from writer.end()
