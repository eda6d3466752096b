"""Own the backend's end of every connection: one intake thread, a selector over the workers and the supervisor.

Runs in PROCESS 2 beside the decode thread. Decodes frames, takes the place in the queue, answers Accepted or Refused
and Pong at once, hands the rest to the decode thread's inbox, and writes what slow sockets left over. A Submit with a
grammar is answered once that is compiled. Never waits for the decode thread and knows nothing of rows, engines or ids.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from inference_api.backend.admission import Admission
from inference_api.backend.decode_loop import Inbox
from inference_api.backend.grammar_queue import Compilation, GrammarQueue, Outcome, Overdue
from inference_api.backend.grammars import GrammarError
from inference_api.backend.idempotency import IdempotencyRecords
from inference_api.backend.inbox_messages import KeyedSubmit, MaskedSubmit, WorkerGone
from inference_api.backend.mask_lanes import FormMask
from inference_api.backend.readers import Readers
from inference_api.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    Drain,
    Dropped,
    Hello,
    Message,
    Ping,
    Pong,
    Query,
    Ready,
    RefusalReason,
    Refused,
    Stop,
    Submit,
    SupervisorMessage,
    WorkerMessage,
)
from inference_api.queues import MAX_BUFFERED_BYTES, Connection, ConnectionLostError, Wakeup, peer_uid
from inference_api.threads import vital_thread

logger = logging.getLogger(__name__)

MAX_BACKLOG_BYTES = MAX_BUFFERED_BYTES // 4
"""A worker with so much left to read is told no repetitions: over MAX_BUFFERED_BYTES it would be cut off."""


class Intake:
    """Serve the workers' connections. `send` and `start_serving` may be called from any thread."""

    def __init__(
        self,
        listener: socket.socket,
        control: socket.socket,
        admission: Admission,
        inbox: Inbox,
        heartbeat_age: Callable[[], float],
        on_stop: Callable[[int], None],
    ) -> None:
        """`on_stop` takes an exit status: 0 if the supervisor says so or is gone, 1 if the thread dies by surprise."""
        self._admission = admission
        self._inbox = inbox
        self._heartbeat_age = heartbeat_age
        self._on_stop = on_stop
        self._listener = listener
        self._listener.setblocking(False)
        self._wakeup = Wakeup()
        self._control = Connection(control, SupervisorMessage, self._wakeup.wake)
        self._workers: dict[str, Connection] = {}
        self._introduced: set[str] = set()
        self._greeted: set[str] = set()
        self._num_accepted = 0
        self._ready: Ready | None = None
        self._grammars: GrammarQueue | None = None
        self._keys = IdempotencyRecords(0.0)
        self._closing = False
        self._selector = selectors.DefaultSelector()
        self._thread = vital_thread("intake", self._run, lambda: on_stop(1))

    def start(self) -> None:
        """Start the intake thread."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._wakeup.clear)
        self._selector.register(self._control, selectors.EVENT_READ, self._read_control)
        self._thread.start()

    def start_serving(
        self, ready: Ready, grammars: GrammarQueue | None = None, keys: IdempotencyRecords | None = None
    ) -> None:
        """Greet every worker with `ready`, those that wait and those to come, and tell the supervisor.

        `grammars`, whose `wake` is ours, compiles from now on; without it every grammar is refused. `keys` records the
        calls that have one; without it nothing is remembered after its end.
        """
        self._grammars = grammars
        self._keys = keys if keys is not None else self._keys
        self._ready = ready
        self.report(ready)
        self.wake()

    def wake(self) -> None:
        """Let the intake thread look for news."""
        self._wakeup.wake()

    def report(self, message: Message) -> None:
        """Send a status message to the supervisor; a supervisor that is gone ends this process."""
        try:
            self._control.send(message)
        except ConnectionLostError:
            self._on_stop(0)

    def send(self, worker: str, message: Message) -> None:
        """Send to a worker without blocking. One that is gone is ignored: the intake thread notices that itself."""
        connection = self._workers.get(worker)
        if connection is None:
            return
        try:
            connection.send(message)
        except ConnectionLostError as error:
            logger.warning("%s is cut off: %s", worker, error)
            connection.shutdown()

    def broadcast(self, message: Message) -> None:
        """Send to every worker."""
        for worker in list(self._workers):
            self.send(worker, message)

    def close(self) -> None:
        """End the intake thread and close every connection."""
        self._closing = True
        self._wakeup.wake()
        self._thread.join()
        if self._grammars is not None:
            self._grammars.close()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._grammars.next_wake() if self._grammars else None):
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.fileobj)
                    if events & selectors.EVENT_READ:
                        key.data()
                for compilation, outcome in self._grammars.take_settled() if self._grammars else ():
                    self._settle(compilation, outcome)
                self._greet_new_workers()
                self._select_for_writing()
        finally:
            for worker in list(self._workers):
                self._forget(worker)
            self._selector.close()
            self._control.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: the worker waits in the backlog
            logger.error("cannot take a connection: %s", error)
            return
        if peer_uid(sock) not in (os.getuid(), 0):
            logger.error("refused a connection of user %d", peer_uid(sock))
            sock.close()
            return
        self._num_accepted += 1
        worker = f"worker-{self._num_accepted}"
        connection = Connection(sock, WorkerMessage, self._wakeup.wake)
        self._workers[worker] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read_worker(worker))

    def _read_worker(self, worker: str) -> None:
        connection = self._workers[worker]
        try:
            for message in connection.receive():
                self._take(worker, message)
        except ConnectionLostError as error:
            logger.debug("%s: %s", worker, error)
            self._forget(worker)

    def _take(self, worker: str, message: Any) -> None:
        match message:
            case Hello():
                if message.version != WIRE_VERSION:
                    raise ConnectionLostError(f"speaks version {message.version}")
                logger.debug("%s is %s", worker, message.worker)
                self._introduced.add(worker)
            case Submit(idempotency=None):
                self._submit(worker, message)
            case Submit():
                self._submit_keyed(worker, message)
            case Abort() | Query() | Dropped():
                self._inbox.put(worker, message)
            case Ping():
                self.send(worker, self._pong(message.ping_id))

    def _submit_keyed(self, worker: str, submit: Submit, mask: FormMask | None = None) -> None:
        """Let a repeated call follow the first one, without a place of its own; take a place for any other.

        With a grammar it comes here twice: the second time with the mask, and with no place.
        """
        # What is on record is told at once, and may be long: a worker that has much to read yet gets no more of it.
        may_follow = self._workers[worker].backlog_bytes <= MAX_BACKLOG_BYTES
        verdict = self._keys.claim(submit, time.monotonic(), may_follow=may_follow)
        if verdict.recording is None:
            self._refuse(worker, submit, verdict.reason, 1.0 if verdict.reason is RefusalReason.QUEUE_FULL else 0.0)
            return
        readers = Readers(self._keys, verdict.recording)
        readers.add(submit, worker)
        if verdict.is_repeat:
            self.send(worker, Accepted(submit.session_id, 0, 0.0, verdict.recording.created))
            self._inbox.put(worker, KeyedSubmit(submit, readers, follows=True))
        elif submit.grammar is not None and mask is None:
            self._submit(worker, submit)
        else:
            self._submit(worker, KeyedSubmit(verdict.recording.continued(submit), readers, mask))

    def _submit(self, worker: str, message: Submit | KeyedSubmit) -> None:
        submit = message if isinstance(message, Submit) else message.submit
        place = self._admission.take(len(submit.token_ids))
        ready = self._ready
        if isinstance(place, RefusalReason):
            self._refuse(worker, submit, place, max(1.0, self._admission.eta_seconds(1)))
        elif ready is None:
            self._give_back(submit)
            self._refuse(worker, submit, RefusalReason.WARMING, 1.0)
        elif len(submit.token_ids) > ready.context_tokens or not submit.token_ids:
            self._give_back(submit)
            self._refuse(worker, submit, RefusalReason.TOO_LONG)
        elif submit.pooling is not None and not ready.embedding_size:
            self._give_back(submit)
            self._refuse(worker, submit, RefusalReason.NO_EMBEDDINGS)
        elif submit.grammar is None or isinstance(message, KeyedSubmit):
            self._accept_submit(worker, message, place)
        elif self._grammars is None:
            self._refuse_grammar(worker, submit, "cannot be kept to by this backend.")
        else:
            self._grammars.put(worker, submit, submit.grammar, place)

    def _accept_submit(self, worker: str, message: Submit | MaskedSubmit | KeyedSubmit, place: int) -> None:
        submit = message if isinstance(message, Submit) else message.submit
        created = message.readers.begin() if isinstance(message, KeyedSubmit) else 0
        self.send(worker, Accepted(submit.session_id, place, self._admission.eta_seconds(place), created))
        self._inbox.put(worker, message)

    def _settle(self, compilation: Compilation, outcome: Outcome) -> None:
        """Answer a Submit whose grammar has been compiled or given up."""
        worker, submit = compilation.worker, compilation.submit
        match outcome:
            case GrammarError():
                self._refuse_grammar(worker, submit, str(outcome))
            case Overdue(has_begun=True):
                self._refuse_grammar(worker, submit, "takes too long to compile: make it simpler.")
            case Overdue():
                self._give_back(submit)
                self._refuse(worker, submit, RefusalReason.QUEUE_FULL, 1.0)
            case _ if submit.idempotency is not None:
                # Another call may have come by the same key meanwhile: the one place is not enough to know what to do.
                self._give_back(submit)
                self._submit_keyed(worker, submit, outcome)
            case _:
                self._accept_submit(worker, MaskedSubmit(submit, outcome), compilation.place)

    def _refuse_grammar(self, worker: str, submit: Submit, message: str) -> None:
        self._give_back(submit)
        self._refuse(worker, submit, RefusalReason.BAD_GRAMMAR, message=message)

    def _refuse(
        self,
        worker: str,
        submit: Submit,
        reason: RefusalReason,
        retry_after_seconds: float = 0.0,
        message: str = "",
    ) -> None:
        """Refuse a Submit, and with it the record of its call's other generations: a refused call leaves none."""
        self._keys.withdraw(submit)
        self.send(worker, Refused(submit.session_id, reason, retry_after_seconds, message))

    def _give_back(self, submit: Submit) -> None:
        """Give a place back that was taken for nothing."""
        self._admission.start(len(submit.token_ids))
        self._admission.release(None)

    def _pong(self, ping_id: int) -> Pong:
        num_requests = self._admission.num_requests
        num_rows = self._ready.num_rows if self._ready is not None else 0
        return Pong(
            ping_id=ping_id,
            heartbeat_seconds=self._heartbeat_age(),
            draining=self._admission.draining,
            num_waiting=max(0, num_requests - num_rows),
            num_rows_in_use=min(num_requests, num_rows),
        )

    def _read_control(self) -> None:
        try:
            for message in self._control.receive():
                if isinstance(message, Drain):
                    self._admission.drain()
                    self._inbox.wake()
                elif isinstance(message, Stop):
                    self._on_stop(0)
        except ConnectionLostError:
            self._selector.unregister(self._control)
            self._on_stop(0)

    def _greet_new_workers(self) -> None:
        if self._ready is None:
            return
        for worker in self._introduced - self._greeted:
            self._greeted.add(worker)
            self.send(worker, self._ready)

    def _select_for_writing(self) -> None:
        for worker, connection in self._workers.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_backlog else 0)
            key = self._selector.get_key(connection)
            if key.events != events:
                self._selector.modify(connection, events, lambda worker=worker: self._read_worker(worker))

    def _flush(self, connection: Any) -> None:
        try:
            connection.flush()
        except ConnectionLostError:
            connection.shutdown()

    def _forget(self, worker: str) -> None:
        connection = self._workers.pop(worker)
        for submit in self._grammars.forget(worker) if self._grammars else ():
            self._give_back(submit)
        self._greeted.discard(worker)
        self._introduced.discard(worker)
        self._selector.unregister(connection)
        connection.close()
        self._inbox.put(worker, WorkerGone(worker))
