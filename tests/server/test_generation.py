"""Check how one session's ids become text, and what happens when its client leaves or its response is closed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from inference_api.errors import (
    AbortedError,
    BackendLostError,
    ClientLeftError,
    DeadlineError,
    GenerationError,
    InferenceApiError,
    OverloadedError,
)
from inference_api.messages import FinishReason, SequenceOutput, Submit
from inference_api.server.chunk_sender import ChunkSender
from inference_api.server.context import ServerContext
from inference_api.server.generation import Generation, Piece, is_retryable
from tests.backend.factories import make_submit
from tests.server.fakes import WAIT_SECONDS, FakeClient, finished, tell_when_read

SUBMIT = make_submit("s0")


@pytest.fixture
def start(context: ServerContext) -> Callable[..., Generation]:
    def start(*stops: str, client_socket: socket.socket | None = None) -> Generation:
        generation = context.make_generation(list(b"hello"), stops)
        generation.start(SUBMIT, client_socket)
        return generation

    return start


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    yield client, server
    client.close()
    server.close()


def test_pieces_join_to_the_text_and_end_with_the_reason(start, fake_client: FakeClient) -> None:
    fake_client.pieces = ["h\u00e9".encode(), "\U0001f642!".encode()]
    pieces = list(start().pieces())
    assert "".join(piece.text for piece in pieces) == "h\u00e9\U0001f642!"
    assert [piece.finished for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finished == finished()


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, "x"), (2, "x"), (3, "xabcx"), (4, "xabcx"), (9, "xabcxabc"), (10, "xabcxabcabc")]
)
@pytest.mark.parametrize("size", [1, 2, 4, 11])
def test_a_stop_that_is_complete_within_min_tokens_is_text(
    context: ServerContext, fake_client: FakeClient, min_tokens: int, text: str, size: int
) -> None:
    fake_client.pieces = [b"xabcxabcabc"[first : first + size] for first in range(0, 11, size)]
    generation = context.make_generation(list(b"hello"), ["ab"])
    generation.start(msgspec.structs.replace(SUBMIT, min_tokens=min_tokens), None)
    assert "".join(piece.text for piece in generation.pieces()) == text


def test_a_character_is_never_sent_in_halves(start, fake_client: FakeClient) -> None:
    text = "\U0001f642"
    fake_client.pieces = [text.encode()[:2]]
    fake_client.end = None
    generation = start()
    assert [generation.next_piece(0.0).text for _ in range(2)] == ["", ""]
    fake_client.streams[0].deliver(SequenceOutput("s0", 0, 1, 2, list(text.encode()[2:]), finished()))
    assert generation.next_piece(0.0).text == text
    generation.close()


def test_a_dangling_half_character_ends_as_a_replacement(start, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"ok\xf0\x9f"]
    assert "".join(piece.text for piece in start().pieces()) == "ok\ufffd"


def test_a_generation_that_fails_inside_a_character_ends_before_it(start, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"a\xc3"]
    fake_client.end = finished(error="backend_lost")
    texts: list[str] = []
    with pytest.raises(BackendLostError):
        texts.extend(piece.text for piece in start().pieces())
    assert "".join(texts) == "a"


def test_nothing_of_a_stop_sequence_is_sent(start, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"one ST", b"OP"]
    fake_client.end = finished(FinishReason.STOP, stop=b"STOP")
    assert "".join(piece.text for piece in start("STOP").pieces()) == "one "


def test_text_held_back_for_a_stop_that_never_comes_is_sent_at_the_end(start, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"one ST", b"O"]
    assert "".join(piece.text for piece in start("STOP").pieces()) == "one STO"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("backend_lost", BackendLostError),
        ("deadline_exceeded", DeadlineError),
        ("generation_failed", GenerationError),
        ("something_new", GenerationError),
    ],
)
def test_each_failed_end_raises_its_own_error_after_the_text_before_it(
    start, fake_client: FakeClient, code: str, error: type[InferenceApiError]
) -> None:
    fake_client.end = finished(error=code)
    texts: list[str] = []
    with pytest.raises(error, match="it broke"):
        texts.extend(piece.text for piece in start().pieces())
    assert "".join(texts) == "Hello"


def test_an_end_by_abort_is_an_error_for_whoever_still_reads(start, fake_client: FakeClient) -> None:
    fake_client.end = finished(FinishReason.ABORT)
    with pytest.raises(AbortedError):
        list(start().pieces())


def test_closing_before_the_end_aborts_and_after_it_does_not(start, fake_client: FakeClient) -> None:
    generation = start()
    list(generation.pieces())
    generation.close()
    assert fake_client.aborts == []
    generation = start()
    generation.next_piece()
    generation.close()
    assert fake_client.aborts == [("req-s0", "alpha")]


def test_a_client_that_leaves_aborts_its_request_at_once(start, pair, fake_client: FakeClient) -> None:
    client, server = pair
    fake_client.end = None
    aborted = threading.Event()
    fake_client.abort = lambda *_call: aborted.set()
    generation = start(client_socket=server)
    client.close()
    assert aborted.wait(WAIT_SECONDS)
    generation.close()


def test_the_abort_of_a_client_that_left_before_its_submit_comes_after_the_submit(
    context: ServerContext, pair, fake_client: FakeClient
) -> None:
    client, server = pair
    client.close()
    events: list[str] = []
    early, last = threading.Event(), threading.Event()
    real_submit = fake_client.submit

    def submit(submit: Submit, on_news: Callable[[], None] | None = None):
        early.wait(1.0)
        events.append("submit")
        return real_submit(submit, on_news)

    def abort(request_id: str, tenant: str, _call_id: str = "") -> None:
        events.append("abort")
        early.set()
        if "submit" in events:
            last.set()

    fake_client.submit, fake_client.abort = submit, abort
    generation = context.make_generation(list(b"hello"), [])
    generation.start(SUBMIT, server)
    assert last.wait(WAIT_SECONDS), "the request would run on with nobody to read it"
    generation.close()


def test_the_end_of_a_client_that_left_is_told_apart_from_an_abort(start, pair, fake_client: FakeClient) -> None:
    client, server = pair
    fake_client.end = None
    ended = threading.Event()

    def abort(request_id: str, tenant: str, _call_id: str = "") -> None:
        fake_client.streams[0].end(finished(FinishReason.ABORT))
        ended.set()

    fake_client.abort = abort
    generation = start(client_socket=server)
    client.close()
    assert ended.wait(WAIT_SECONDS)
    with pytest.raises(ClientLeftError):
        list(generation.pieces())
    generation.close()


def test_a_refused_submit_leaves_no_socket_watched(context: ServerContext, pair, fake_client: FakeClient) -> None:
    fake_client.refusal = OverloadedError("Service overloaded, try again later.")
    generation = context.make_generation(list(b"hello"), [])
    with pytest.raises(OverloadedError):
        generation.start(SUBMIT, pair[1])
    assert context.watcher.num_watched == 0


def test_only_the_services_own_passing_faults_are_worth_a_retry() -> None:
    assert (
        is_retryable(OverloadedError("x")) and is_retryable(BackendLostError("x")) and is_retryable(DeadlineError("x"))
    )
    assert not is_retryable(GenerationError("x"))
    assert not is_retryable(AbortedError("x"))


def test_a_relay_sends_whole_characters_and_nothing_of_a_stop_from_the_delivering_thread(
    start: Callable[..., Generation], fake_client: FakeClient, pair: tuple[socket.socket, socket.socket]
) -> None:
    client, server = pair
    fake_client.pieces, fake_client.end = [b"a"], None
    generation = start("STOP")
    assert generation.next_piece(0.0) == Piece("a", None)
    stream = fake_client.streams[0]
    waits = tell_when_read(stream)
    reader = threading.Thread(target=generation.relay, args=(ChunkSender(server),))
    reader.start()
    assert waits.wait(WAIT_SECONDS)
    for index, text in ((1, b"\xc3"), (2, b"\xa9ST"), (5, b"AR ST"), (10, b"OP")):
        end = finished(FinishReason.STOP, stop=b"STOP") if text == b"OP" else None
        stream.deliver(SequenceOutput("s0", 0, 1, index, list(text), end))
        stream.pass_on()
    reader.join(WAIT_SECONDS)
    assert client.recv(100) == b"2\r\n\xc3\xa9\r\n5\r\nSTAR \r\n"
    assert generation.next_piece(0.0) == Piece("", finished(FinishReason.STOP, stop=b"STOP"))
    generation.close()


def test_a_relay_to_a_client_that_is_gone_raises_in_the_requests_thread(
    start: Callable[..., Generation], fake_client: FakeClient, pair: tuple[socket.socket, socket.socket]
) -> None:
    client, server = pair
    fake_client.pieces, fake_client.end = [b"a"], None
    generation = start()
    generation.next_piece(0.0)
    stream = fake_client.streams[0]
    waits = tell_when_read(stream)
    errors: list[type[BaseException]] = []

    def relay() -> None:
        with pytest.raises(OSError) as caught:  # noqa: PT011 - whatever the system says
            generation.relay(ChunkSender(server))
        errors.append(caught.type)

    reader = threading.Thread(target=relay)
    reader.start()
    assert waits.wait(WAIT_SECONDS)
    client.close()
    stream.deliver(SequenceOutput("s0", 0, 1, 1, [98]))
    stream.pass_on()
    reader.join(WAIT_SECONDS)
    assert errors == [BrokenPipeError]
    generation.close()
    assert len(fake_client.aborts) == 1
