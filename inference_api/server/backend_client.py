"""Own a worker's connection to the decode backend: submits, aborts, pings and queries, and one reader thread.

Runs in PROCESS 1. Keeps each Submit with its stream until the terminal event; when the connection breaks it ends every
open stream with an error, so that each session has exactly one end. The supervisor holds the listening socket: to
connect is to wait in its backlog for the next backend, and nothing here polls. Knows no text and no HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inference_api.errors import (
    BackendLostError,
    DrainingError,
    InvalidRequestError,
    KeyReusedError,
    OverloadedError,
    PromptTooLongError,
    WarmingError,
)
from inference_api.messages import (
    NO_TIMING,
    WIRE_VERSION,
    Abort,
    Accepted,
    BackendMessage,
    Dropped,
    ErrorInfo,
    Failed,
    Finished,
    FinishReason,
    Hello,
    Message,
    Ping,
    Pong,
    Query,
    QueryKind,
    Ready,
    RefusalReason,
    Refused,
    SequenceOutput,
    Snapshot,
    StepOutput,
    Submit,
)
from inference_api.queues import Connection, ConnectionLostError, Wakeup
from inference_api.server.output_router import OutputRouter, SessionStream
from inference_api.threads import vital_thread

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.25
"""Wait after a refused connection: the supervisor itself is gone then, or not there yet."""

ANSWER_SECONDS = 15.0
"""Longest wait for an answer of the intake: above the watchdog, which ends a hung backend, and above twice what
INFERENCE_API_GRAMMAR_SECONDS may be."""

_LOST_TEXT = "The decode backend was lost while the request ran; send it again."


@dataclasses.dataclass(slots=True)
class OpenRequest:
    """A Submit on its way: its stream, and the intake's answer when it comes."""

    submit: Submit
    stream: SessionStream
    answer: queue.SimpleQueue[Accepted | Refused | Failed]


class BackendClient:
    """Talk to the backend. Any request thread may call; `start` and `stop` frame the worker's life."""

    def __init__(self, socket_path: Path, router: OutputRouter, on_death: Callable[[], None]) -> None:
        """`on_death` is called if the reader thread dies by surprise: nothing would be answered any more."""
        self._socket_path = socket_path
        self._router = router
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._ready: Ready | None = None
        self._has_been_ready = threading.Event()
        self._open: dict[str, OpenRequest] = {}
        self._asked: dict[int, queue.SimpleQueue[Pong | Snapshot | None]] = {}
        self._ask_ids = itertools.count(1)
        self._closing = threading.Event()
        self._reported = (0, 0)
        self._thread = vital_thread("backend-client", self._run, on_death)

    def start(self) -> None:
        """Start the reader thread, which connects."""
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and end the reader thread; open streams end with an error."""
        self._closing.set()
        self._wakeup.wake()
        self._thread.join()
        self._wakeup.close()

    def wait_for_ready(self, timeout_seconds: float) -> bool:
        """Block until the backend has greeted this client for the first time; return whether it has in time."""
        return self._has_been_ready.wait(timeout_seconds)

    @property
    def ready(self) -> Ready | None:
        """The backend's greeting while it serves, None while there is none."""
        return self._ready

    def submit(self, submit: Submit, on_news: Callable[[], None] | None = None) -> tuple[SessionStream, Accepted]:
        """Open a session, send its Submit and wait for the intake's answer; `on_news` as for `SessionStream`.

        Raises WarmingError without a backend, OverloadedError or DrainingError when refused, BackendLostError when the
        backend dies first.
        """
        stream = self._router.open(submit.session_id, on_news)
        request = OpenRequest(submit, stream, queue.SimpleQueue())
        try:
            with self._lock:
                if self._ready is None:
                    raise WarmingError("The model is not ready yet, try again later.", 1.0)
                self._open[submit.session_id] = request
            self._send(submit)
            return request.stream, self._await_answer(request)
        except BaseException as error:
            self._forget(submit.session_id)
            if isinstance(error, BackendLostError):
                # The Submit may have reached the next backend all the same: nobody waits for it there.
                self.abort(submit.request_id, submit.tenant, submit.call_id)
            raise

    def abort(self, request_id: str, tenant: str, call_id: str = "") -> None:
        """End every session of a request, or of one call that shares it; never blocks; nothing without a backend."""
        with contextlib.suppress(BackendLostError):
            self._send(Abort(request_id, tenant, call_id))

    def ping(self, timeout_seconds: float) -> Pong | None:
        """Return the intake's Pong, or None if none came in time."""
        answer = self._ask(lambda ask_id: Ping(ask_id), timeout_seconds)
        return answer if isinstance(answer, Pong) else None

    def query(self, kind: QueryKind, tenant: str, request_id: str, timeout_seconds: float) -> Snapshot | None:
        """Return the decode thread's Snapshot, or None if none came in time."""
        answer = self._ask(lambda ask_id: Query(ask_id, kind, tenant, request_id), timeout_seconds)
        return answer if isinstance(answer, Snapshot) else None

    def _await_answer(self, request: OpenRequest) -> Accepted:
        try:
            answer = request.answer.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise BackendLostError("The decode backend did not answer.", 1.0) from None
        match answer:
            case Accepted():
                return answer
            case Failed():
                raise BackendLostError(answer.error.message, 1.0)
            case Refused():
                raise _refusal(answer, request.submit)

    def _ask(self, make: Any, timeout_seconds: float) -> Pong | Snapshot | None:
        ask_id = next(self._ask_ids)
        answer: queue.SimpleQueue[Pong | Snapshot | None] = queue.SimpleQueue()
        self._asked[ask_id] = answer
        try:
            self._send(make(ask_id))
            return answer.get(timeout=timeout_seconds)
        except (BackendLostError, queue.Empty):
            return None
        finally:
            self._asked.pop(ask_id, None)

    def _send(self, message: Message) -> None:
        connection = self._connection
        if connection is None:
            raise BackendLostError(_LOST_TEXT, 1.0)
        try:
            connection.send(message)
        except ConnectionLostError:
            connection.shutdown()
            raise BackendLostError(_LOST_TEXT, 1.0) from None

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection = self._connect()
            except OSError:
                self._closing.wait(RECONNECT_SECONDS)
                continue
            try:
                self._connection = connection
                connection.send(Hello(f"pid-{os.getpid()}", WIRE_VERSION))
                self._read(connection)
            except ConnectionLostError as error:
                # At an ordinary stop too; of a death the supervisor tells, of a cut connection the backend.
                logger.info("backend connection lost: %s", error)
            finally:
                self._lose(connection)

    def _connect(self) -> Connection:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._socket_path))
        except OSError:
            sock.close()
            raise
        return Connection(sock, BackendMessage, self._wakeup.wake)

    def _read(self, connection: Connection) -> None:
        """Take messages until the connection is lost or the client stops."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            watched = selectors.EVENT_READ
            while not self._closing.is_set():
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_backlog else 0)
                if events != watched:
                    selector.modify(connection, events)
                    watched = events
                for key, ready_events in selector.select():
                    if key.fileobj is self._wakeup:
                        self._wakeup.clear()
                        continue
                    if ready_events & selectors.EVENT_WRITE:
                        connection.flush()
                    for message in connection.receive():
                        self._take(message)
                    self._router.pass_on()

    def _take(self, message: Any) -> None:
        match message:
            case StepOutput():
                for output in message.outputs:
                    self._deliver(output)
                self._report_dropped()
            case Accepted() | Refused():
                request = self._open.get(message.session_id)
                if request is not None:
                    request.answer.put(message)
            case Pong():
                self._answer(message.ping_id, message)
            case Snapshot():
                self._answer(message.query_id, message)
            case Ready():
                self._ready = message
                self._has_been_ready.set()
                logger.debug("backend %s serves %d rows", message.incarnation, message.num_rows)
            case Failed():
                logger.error("backend failed: %s", message.error.message)

    def _deliver(self, output: SequenceOutput) -> None:
        request = self._open.get(output.session_id)
        fits = self._router.deliver(output)
        if output.finished is not None or not fits:
            self._open.pop(output.session_id, None)
        if not fits and request is not None:
            submit = request.submit
            self.abort(submit.request_id, submit.tenant, submit.call_id)

    def _report_dropped(self) -> None:
        """Tell the backend how many ids belonged to nobody, if there are new ones."""
        dropped = (self._router.late_tokens, self._router.foreign_tokens)
        if dropped != self._reported:
            late_tokens, foreign_tokens = (now - before for now, before in zip(dropped, self._reported, strict=True))
            self._reported = dropped
            with contextlib.suppress(BackendLostError):
                self._send(Dropped(late_tokens, foreign_tokens))

    def _answer(self, ask_id: int, message: Pong | Snapshot) -> None:
        waiting = self._asked.get(ask_id)
        if waiting is not None:
            waiting.put(message)

    def _lose(self, connection: Connection) -> None:
        """End everything that the lost backend held: each open session gets its one terminal event here."""
        with self._lock:
            self._connection = self._ready = None
            requests, self._open = list(self._open.values()), {}
        connection.close()
        error = ErrorInfo(BackendLostError.code, _LOST_TEXT)
        for request in requests:
            request.answer.put(Failed(error))
            finished = Finished(FinishReason.ERROR, len(request.stream.token_ids), NO_TIMING, error=error)
            self._router.close(request.submit.session_id, finished)
        for waiting in list(self._asked.values()):
            waiting.put(None)

    def _forget(self, session_id: str) -> None:
        with self._lock:
            self._open.pop(session_id, None)
        self._router.close(session_id)


def _refusal(refused: Refused, submit: Submit) -> Exception:
    """Turn a Refused into the error that the edge answers with."""
    match refused.reason:
        case RefusalReason.QUEUE_FULL:
            return OverloadedError("Service overloaded, try again later.", refused.retry_after_seconds)
        case RefusalReason.DRAINING:
            return DrainingError("The service is stopping, try again later.", refused.retry_after_seconds)
        case RefusalReason.WARMING:
            return WarmingError("The model is not ready yet, try again later.", refused.retry_after_seconds)
        case RefusalReason.BAD_GRAMMAR:
            field = submit.grammar.field if submit.grammar is not None else ""
            return InvalidRequestError(f"{field}: {refused.message}", field)
        case RefusalReason.KEY_REUSED:
            return KeyReusedError(
                "Idempotency-Key: was sent with another method, route or body before; another call needs another key."
            )
        case RefusalReason.NO_EMBEDDINGS:
            return InvalidRequestError("model: makes no embeddings on this engine.", "model")
        case _:
            return PromptTooLongError(f"The backend holds no prompt of {len(submit.token_ids)} tokens.")
