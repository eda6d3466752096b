"""Stand in for what a worker talks to: a client that answers from a script, and a backend at the end of a socket."""

from __future__ import annotations

import queue
import select
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from inference_api.messages import (
    NO_TIMING,
    Accepted,
    ErrorInfo,
    Finished,
    FinishReason,
    Message,
    Ping,
    Pong,
    QueryKind,
    Ready,
    SequenceOutput,
    Snapshot,
    Submit,
    WorkerMessage,
)
from inference_api.queues import Connection, ConnectionLostError, listen
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.output_router import SessionStream

WAIT_SECONDS = 10.0
READY = Ready("incarnation-1", "digest-1", "mock", "mock", "none", 4, 64, True)
STOPPED = FinishReason.STOP


def finished(
    reason: FinishReason = FinishReason.LENGTH, num_tokens: int = 0, stop: bytes | None = None, error: str = ""
) -> Finished:
    """Return a terminal event; `error` is the code of one, whose text is 'it broke'."""
    info = ErrorInfo(error, "it broke") if error else None
    return Finished(FinishReason.ERROR if error else reason, num_tokens, NO_TIMING, stop, info)


def logprobs_of(token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Return logprobs that tell ids apart: minus a hundredth of the id, and of the next ids for the likeliest."""
    return [
        TokenLogprobs(-token_id / 100, [(other, -other / 100) for other in range(token_id, token_id + num_top)])
        for token_id in token_ids
    ]


def embedding_of(token_ids: Sequence[int]) -> bytes:
    """Return an embedding that tells prompts apart: their length and their ids' sum, in the two numbers there are."""
    return struct.pack("<2f", len(token_ids), sum(token_ids))


class FakeClient:
    """Answer like a BackendClient, from what the test has set: `text` in pieces, then `end`."""

    def __init__(self) -> None:
        self.ready: Ready | None = READY
        self.pieces: Sequence[Sequence[int]] = [b"Hel", b"lo"]
        self.answers: list[list[bytes]] = []
        """The pieces of each Submit in turn, instead of the same `pieces` for all."""
        self.end: Finished | None = finished()
        self.refusal: Exception | None = None
        self.repeated_created = 0
        """Time of the call that the next one repeats; 0: none."""
        self.pong: Pong | None = Pong(1, 0.1, False, 0, 0)
        self.snapshot: Snapshot | None = Snapshot(1, 2, 4, 1)
        self.submits: list[Submit] = []
        self.aborts: list[tuple[str, str]] = []
        self.aborted_calls: list[str] = []
        self.queries: list[tuple[QueryKind, str, str]] = []
        self.streams: list[SessionStream] = []

    def submit(self, submit: Submit, on_news: Callable[[], None] | None = None) -> tuple[SessionStream, Accepted]:
        self.submits.append(submit)
        if self.refusal is not None:
            raise self.refusal
        pieces = self.answers[(len(self.submits) - 1) % len(self.answers)] if self.answers else self.pieces
        pieces = pieces if submit.max_tokens else []
        stream = SessionStream(submit.session_id, on_news)
        self.streams.append(stream)
        index = 0
        if submit.prompt_logprobs is not None:
            scores = logprobs_of(submit.token_ids[1:], submit.prompt_logprobs)
            for score in scores:
                stream.deliver(SequenceOutput(submit.session_id, 0, 1, 0, [], prompt_logprobs=[score]))
        for piece in pieces:
            logprobs = None if submit.sampling.logprobs is None else logprobs_of(piece, submit.sampling.logprobs)
            stream.deliver(SequenceOutput(submit.session_id, 0, 1, index, list(piece), logprobs=logprobs))
            index += len(piece)
        if self.end is not None:
            embedding = embedding_of(submit.token_ids) if submit.pooling is not None else None
            end = msgspec.structs.replace(self.end, embedding=embedding)
            stream.deliver(SequenceOutput(submit.session_id, 0, 1, index, [], end))
        return stream, Accepted(submit.session_id, 0, 0.0, self.repeated_created)

    def abort(self, request_id: str, tenant: str, call_id: str = "") -> None:
        self.aborts.append((request_id, tenant))
        self.aborted_calls.append(call_id)

    def ping(self, timeout_seconds: float) -> Pong | None:
        return self.pong

    def query(self, kind: QueryKind, tenant: str, request_id: str, timeout_seconds: float) -> Snapshot | None:
        self.queries.append((kind, tenant, request_id))
        return self.snapshot

    @property
    def last(self) -> Submit:
        """The newest Submit."""
        return self.submits[-1]


class FakeBackend:
    """Listen where a backend would; `answer` maps what a worker sends to what it gets back."""

    def __init__(self, path: Path) -> None:
        self._listener = listen(path)
        self._listener.settimeout(WAIT_SECONDS)
        self._threads: list[threading.Thread] = []
        self._connections: list[Connection] = []
        self.received: queue.Queue[Message] = queue.Queue()
        self.answer: Callable[[Message], list[Message]] = answer_politely

    def accept(self, ready: Ready = READY) -> Connection:
        """Take the next connection, greet it, and answer what comes from it until it ends."""
        sock, _ = self._listener.accept()
        connection = Connection(sock, WorkerMessage)
        connection.send(ready)
        thread = threading.Thread(target=self._serve, args=(connection,), name="fake-backend")
        thread.start()
        self._threads.append(thread)
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        """End every connection and the listening socket."""
        for connection in self._connections:
            connection.shutdown()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                select.select([connection], [], [])
                for message in connection.receive():
                    self.received.put(message)
                    for answer in self.answer(message):
                        connection.send(answer)
        except ConnectionLostError:
            return


def tell_when_read(stream: SessionStream) -> threading.Event:
    """Return an event that is set once a thread waits for something to read: what comes then finds it waiting."""
    waits = threading.Event()
    wait = stream._condition.wait

    def announced_wait(timeout: float | None = None) -> bool:
        waits.set()
        return wait(timeout)

    stream._condition.wait = announced_wait  # type: ignore[method-assign]
    return waits


def answer_politely(message: Message) -> list[Message]:
    """Accept every Submit and answer every Ping."""
    match message:
        case Submit():
            return [Accepted(message.session_id, 0, 0.0)]
        case Ping():
            return [Pong(message.ping_id, 0.1, False, 0, 0)]
        case _:
            return []
