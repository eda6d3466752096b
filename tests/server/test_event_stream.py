"""Check how a call is answered with events, whatever its surface: the held head, pings, errors, an early end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from flask import Flask, Response

from inference_api.errors import AbortedError, BackendLostError, InferenceApiError
from inference_api.messages import Finished, FinishReason, SequenceOutput
from inference_api.server.choices import ChoicePiece, Choices
from inference_api.server.context import ServerContext
from inference_api.server.event_stream import event_response
from tests.backend.factories import make_submit
from tests.server.fakes import FakeClient, finished


class Letters:
    """An EventWriter whose events can be read at a glance."""

    def begin(self) -> Iterator[bytes]:
        yield b"<"

    def piece(self, choice: ChoicePiece) -> Iterator[bytes]:
        if choice.piece.text:
            yield f"{choice.index}{choice.piece.text}".encode()
        if choice.piece.finished is not None:
            yield b"."

    def ping(self) -> bytes:
        return b"~"

    def end(self) -> Iterator[bytes]:
        yield b">"

    def error(self, error: InferenceApiError) -> Iterator[bytes]:
        yield f"!{error.code}".encode()


@pytest.fixture
def respond(context: ServerContext, fake_client: FakeClient) -> Callable[..., Response]:
    """Return what starts a call of `count` answers and responds to it, within a request of `protocol`."""

    def respond(count: int = 1, protocol: str = "HTTP/1.1", **settings: float) -> Response:
        changed = dataclasses.replace(context.settings, **{"sse_hold_seconds": 5.0, **settings})
        choices = Choices([context.make_generation(list(b"hello"), []) for _ in range(count)])
        choices.start([make_submit(f"s{index}", request_id="req") for index in range(count)], None)
        with Flask(__name__).test_request_context(environ_overrides={"SERVER_PROTOCOL": protocol}):
            return event_response(choices, Letters(), changed)

    return respond


def deliver(client: FakeClient, choice: int, text: bytes, end: Finished | None = None) -> None:
    stream = client.streams[choice]
    assert stream.deliver(SequenceOutput(f"s{choice}", 0, 1, len(stream.token_ids), list(text), end))


def test_an_answer_begins_has_its_text_and_ends(respond, fake_client: FakeClient) -> None:
    response = respond()
    assert response.status_code == 200 and response.content_type == "text/event-stream"
    assert response.get_data() == b"<0H0ello.>"
    response.close()
    assert fake_client.aborts == []


def test_the_end_comes_after_the_last_of_several_answers(respond, fake_client: FakeClient) -> None:
    fake_client.answers = [[b"a"], [b"b"]]
    response = respond(2)
    assert response.get_data() == b"<0a.1b.>"
    response.close()


@pytest.mark.parametrize(
    ("end", "error"),
    [(finished(error="backend_lost"), BackendLostError), (finished(FinishReason.ABORT), AbortedError)],
)
def test_a_failure_before_any_text_keeps_its_status_and_the_others_are_aborted(
    respond, fake_client: FakeClient, end: Finished, error: type[InferenceApiError]
) -> None:
    fake_client.pieces, fake_client.end = [], end
    with pytest.raises(error):
        respond(2)
    assert fake_client.aborts == [("req", "alpha")]


def test_a_failure_after_the_head_is_an_event_and_no_end_follows(respond, fake_client: FakeClient) -> None:
    fake_client.end = finished(error="backend_lost")
    response = respond()
    assert response.get_data() == b"<0H0ello!backend_lost"
    response.close()


def test_a_failure_of_one_of_several_ends_the_stream_and_aborts_the_rest(respond, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [b"a"], None
    response = respond(2)
    chunks = response.iter_encoded()
    assert [next(chunks) for _ in range(3)] == [b"<", b"0a", b"1a"]
    deliver(fake_client, 1, b"b", finished(error="deadline_exceeded"))
    assert list(chunks) == [b"1b", b"!deadline_exceeded"]
    response.close()
    assert fake_client.aborts == [("req", "alpha")]


def test_a_silent_answer_gets_its_head_after_the_hold_and_pings(respond, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [], None
    response = respond(sse_hold_seconds=0.0, sse_ping_seconds=0.01)
    chunks = response.iter_encoded()
    assert [next(chunks) for _ in range(4)] == [b"<", b"~", b"~", b"~"]
    deliver(fake_client, 0, b"a", finished(num_tokens=1))
    assert b"".join(chunks).lstrip(b"~") == b"0a.>"
    response.close()


def test_a_failure_after_the_hold_is_an_event_though_no_text_came(respond, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [], None
    response = respond(sse_hold_seconds=0.0, sse_ping_seconds=60.0)
    deliver(fake_client, 0, b"", finished(error="backend_lost"))
    assert response.get_data() == b"<~!backend_lost"
    response.close()


def test_an_answer_without_text_begins_and_ends(respond, fake_client: FakeClient) -> None:
    fake_client.pieces = []
    response = respond()
    assert response.get_data() == b"<.>"
    response.close()


def test_a_response_that_is_closed_early_aborts_its_call(respond, fake_client: FakeClient) -> None:
    fake_client.end = None
    response = respond(3)
    next(iter(response.iter_encoded()))
    response.close()
    assert set(fake_client.aborts) == {("req", "alpha")}


def test_an_old_client_gets_the_whole_stream_with_its_length(respond, fake_client: FakeClient) -> None:
    response = respond(protocol="HTTP/1.0", sse_hold_seconds=0.0, sse_ping_seconds=0.0)
    assert response.is_sequence and response.get_data() == b"<0H0ello.>"
    assert response.headers["Content-Length"] == "10"


def test_an_old_client_gets_the_status_of_an_answer_that_breaks_in_the_middle(respond, fake_client) -> None:
    fake_client.end = finished(error="backend_lost")
    with pytest.raises(BackendLostError, match="it broke"):
        respond(protocol="HTTP/1.0")
