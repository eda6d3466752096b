"""Deliver the backend's outputs to open sessions, by session id; drop and count what belongs to nobody.

Runs in PROCESS 1: the backend client's reader thread delivers, one request thread reads each stream. A stream's ids
are buffered whole (at most a context of them): a row is never paused for a slow reader. Knows ids and ends, no text,
no HTTP.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable

from inference_api.messages import NO_TIMING, ErrorInfo, Finished, FinishReason, SequenceOutput
from inference_api.sampling_params import TokenLogprobs

MAX_ENDED_SESSIONS = 4096
"""Sessions remembered after their end, to tell late ids from foreign ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    """What a stream has for its reader: ids in order, their logprobs if they were asked for, and the end.

    The prompt's logprobs come with the first one, all of them.
    """

    token_ids: tuple[int, ...]
    finished: Finished | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


_BROKEN = Finished(
    reason=FinishReason.ERROR,
    num_completion_tokens=0,
    timing=NO_TIMING,
    error=ErrorInfo("generation_failed", "An output did not fit its stream."),
)


class SessionStream:
    """One session's ids, from the reader thread to the request thread that sends them on."""

    def __init__(self, session_id: str, on_news: Callable[[], None] | None = None) -> None:
        """`on_news` is called by the delivering thread, under the stream's lock, when there is something to read."""
        self.session_id = session_id
        self._on_news = on_news
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._relay: Callable[[tuple[int, ...]], bool] | None = None
        self._relay_error: Exception | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_read = 0
        self._only_end = False
        self._finished: Finished | None = None
        self._epoch: int | None = None
        self.row: int | None = None
        """The row that the session has, once it has one."""
        self.mu: float | None = None
        """Mirostat's state after the ids that have come."""

    def read(self, timeout_seconds: float | None = None, *, one_by_one: bool = False) -> Delivery | None:
        """Return everything that has come since the last call; block for the first id or the end.

        The very first id is returned alone, so that it leaves at once, and with `one_by_one` so are all. Returns None
        if nothing came in time.
        """
        with self._lock:
            if not self._condition.wait_for(self._has_news, timeout_seconds):
                return None
            num_news = len(self._token_ids) - self._num_read
            end = self._num_read + (min(1, num_news) if one_by_one or self._num_read == 0 else num_news)
            token_ids = tuple(self._token_ids[self._num_read : end])
            logprobs = tuple(self._logprobs[self._num_read : end])
            prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
            self._num_read += len(token_ids)
            is_read_up = self._num_read == len(self._token_ids)
            return Delivery(token_ids, self._finished if is_read_up else None, logprobs, prompt_logprobs)

    def relay(self, take: Callable[[tuple[int, ...]], bool]) -> None:
        """Let the delivering thread hand ids to `take` as they come, instead of waking this one for each of them.

        Blocks until there is something that only `read` returns: the first id, the end, or what came once `take` had
        returned False. `take` runs under the stream's lock and must not block; what it raises is raised here.
        """
        with self._lock:
            if self._num_read == 0 or self._has_news():
                return
            self._relay = take
            while self._relay is not None:
                self._condition.wait()
            error, self._relay_error = self._relay_error, None
        if error is not None:
            raise error

    def pass_on(self) -> None:
        """Hand what has come to a relay, if there is one; called by the delivering thread after its deliveries."""
        with self._lock:
            if self._relay is None or self._num_read == len(self._token_ids):
                return
            token_ids = tuple(self._token_ids[self._num_read :])
            self._num_read += len(token_ids)
            try:
                if self._relay(token_ids):
                    return
            except Exception as error:  # the request's own, not this thread's: it is raised where the request runs
                self._relay_error = error
            self._wake_reader()

    def only_end(self) -> None:
        """Wake the reader for the end alone from now on: it wants the whole."""
        with self._lock:
            self._only_end = True

    def wait_finished(self, timeout_seconds: float) -> Finished | None:
        """Block for the terminal event, which `read` may not have returned yet; None if it did not come in time."""
        with self._lock:
            self._condition.wait_for(lambda: self._finished is not None, timeout_seconds)
            return self._finished

    @property
    def token_ids(self) -> list[int]:
        """All ids delivered so far."""
        return self._token_ids

    @property
    def num_read(self) -> int:
        """Ids that its reader has."""
        return self._num_read

    def deliver(self, output: SequenceOutput) -> bool:
        """Take an output that fits (next index, same row owner); return False if it is not this stream's next one."""
        with self._lock:
            if self._epoch is None:
                self._epoch = output.epoch
                self.row = output.row if output.row >= 0 else None
            if output.index != len(self._token_ids) or self._epoch != output.epoch:
                return False
            self._token_ids.extend(output.token_ids)
            self._logprobs.extend(output.logprobs or ())
            self._prompt_logprobs.extend(output.prompt_logprobs or ())
            self._finished = output.finished
            self.mu = output.mu if output.mu is not None else self.mu
            # What a step has scored of a prompt waits for the first id: nobody is woken for it.
            is_wanted = self._relay is None and not self._only_end and bool(output.token_ids)
            if output.finished is not None or is_wanted:
                self._wake_reader()
            return True

    def end(self, finished: Finished) -> None:
        """End the stream for a reason of this worker's own."""
        with self._lock:
            self._finished = finished
            self._wake_reader()

    def _wake_reader(self) -> None:
        self._relay = None
        self._condition.notify()
        if self._on_news is not None:
            self._on_news()

    def _has_news(self) -> bool:
        return len(self._token_ids) > self._num_read or self._finished is not None


class OutputRouter:
    """Hold the open sessions. Invariant: a session that has its terminal event is not open any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, SessionStream] = {}
        self._delivered: set[SessionStream] = set()
        self._ended: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.late_tokens = 0
        self.foreign_tokens = 0

    def open(self, session_id: str, on_news: Callable[[], None] | None = None) -> SessionStream:
        """Open a session before its Submit crosses."""
        stream = SessionStream(session_id, on_news)
        with self._lock:
            self._streams[session_id] = stream
        return stream

    def deliver(self, output: SequenceOutput) -> bool:
        """Hand an output to its session, or count its ids as late or foreign.

        Returns False if it broke an open stream, which then ends with an error: its row should be given back.
        """
        with self._lock:
            stream = self._streams.get(output.session_id)
            if stream is None:
                if output.session_id in self._ended:
                    self.late_tokens += len(output.token_ids)
                else:
                    self.foreign_tokens += len(output.token_ids)
                return True
            if output.finished is not None:
                self._close(output.session_id)
        if stream.deliver(output):
            self._delivered.add(stream)
            return True
        self.foreign_tokens += len(output.token_ids)
        self.close(output.session_id)
        stream.end(_BROKEN)
        return False

    def pass_on(self) -> None:
        """Let the streams with a relay send what has been delivered since the last call; for the delivering thread.

        Called once for all messages that arrived together, so that ids which queued up join one chunk.
        """
        delivered, self._delivered = self._delivered, set()
        for stream in delivered:
            stream.pass_on()

    def close(self, session_id: str, finished: Finished | None = None) -> None:
        """Close a session; its reader gets `finished` if it is given."""
        with self._lock:
            stream = self._streams.get(session_id)
            self._close(session_id)
        if stream is not None and finished is not None:
            stream.end(finished)

    @property
    def num_open(self) -> int:
        """Sessions that have no terminal event yet."""
        return len(self._streams)

    def _close(self, session_id: str) -> None:
        if self._streams.pop(session_id, None) is not None:
            self._ended[session_id] = None
            if len(self._ended) > MAX_ENDED_SESSIONS:
                self._ended.popitem(last=False)
