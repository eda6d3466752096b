"""Deliver the backend's outputs to open sessions, by session id; drop and count what belongs to nobody.

Runs in PROCESS 1: the backend client's reader thread delivers, one request thread reads each stream. A stream's ids
are buffered whole (at most a context of them): a row is never paused for a slow reader. Their logprobs, a hundred times
as large, wait up to a bound, and a stream whose reader leaves more is cut. Knows ids and ends, no text, no HTTP.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable

from inference_api.errors import ReaderBehindError
from inference_api.messages import NO_TIMING, ErrorInfo, Finished, FinishReason, SequenceOutput
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.waiting_logprobs import WaitingLogprobs

MAX_ENDED_SESSIONS = 4096
"""Sessions remembered after their end, to tell late ids from foreign ones."""

MAX_WAITING_LOGPROB_BYTES = 256 << 10
"""Of one stream: some nine hundred ids with their twenty likeliest each, beside what the sockets hold of those sent."""

MAX_LAGGING_LOGPROB_BYTES = 8 * MAX_WAITING_LOGPROB_BYTES
"""Of one stream whose reader goes on, but takes less than comes: so many of them lag when this process is busy."""

MAX_READ_LOGPROBS = 32
"""Positions that one read hands out: what it returns is held unpacked for as long as the socket takes none of it."""


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
        self._logprobs = WaitingLogprobs()
        self._prompt_logprobs = WaitingLogprobs()
        self._first_logprob_bytes = 0
        self._logprob_bytes_since_read = 0
        self._num_read = 0
        self._only_end = False
        self._finished: Finished | None = None
        self._epoch: int | None = None
        self.row: int | None = None
        """The row that the session has, once it has one."""
        self.mu: float | None = None
        """Mirostat's state after the ids that have come."""

    def read(self, timeout_seconds: float | None = None, *, one_by_one: bool = False) -> Delivery | None:
        """Return what has come since the last call; block for the first id or the end.

        That is everything, but ids with logprobs come MAX_READ_LOGPROBS at a time. The very first id is returned alone,
        so that it leaves at once, and with `one_by_one` so are all. Returns None if nothing came in time.
        """
        with self._lock:
            if not self._condition.wait_for(self._has_news, timeout_seconds):
                return None
            num_ids = len(self._token_ids) - self._num_read
            if one_by_one or self._num_read == 0:
                num_ids = min(1, num_ids)
            elif self._logprobs:
                num_ids = min(MAX_READ_LOGPROBS, num_ids)
            token_ids = tuple(self._token_ids[self._num_read : self._num_read + num_ids])
            logprobs, prompt_logprobs = self._logprobs.take(num_ids), self._prompt_logprobs.take()
            self._first_logprob_bytes = min(self._first_logprob_bytes, self._logprobs.num_bytes)
            self._logprob_bytes_since_read = 0
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
            self._logprob_bytes_since_read += self._logprobs.extend(output.logprobs or ())
            if output.index == 0:
                # A repetition gets all that it missed in one output, which says nothing of how it reads.
                self._first_logprob_bytes = self._logprobs.num_bytes
                self._logprob_bytes_since_read = 0
            self._prompt_logprobs.extend(output.prompt_logprobs or ())
            self._finished = output.finished
            self.mu = output.mu if output.mu is not None else self.mu
            # What a step has scored of a prompt waits for the first id: nobody is woken for it.
            is_wanted = self._relay is None and not self._only_end and bool(output.token_ids)
            if output.finished is not None or is_wanted:
                self._wake_reader()
            return True

    @property
    def is_behind(self) -> bool:
        """Whether its reader has left more logprobs than may wait; never if it wants the whole, or the end has come.

        Who reads on, if slower than the rows are quick, may leave several times as many as who has stopped.
        """
        with self._lock:
            if self._only_end or self._finished is not None:
                return False
            num_waiting = self._logprobs.num_bytes - self._first_logprob_bytes
            has_stopped = self._logprob_bytes_since_read > MAX_WAITING_LOGPROB_BYTES
            return has_stopped or num_waiting > MAX_LAGGING_LOGPROB_BYTES

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

        Returns False if an open stream ended with an error, for it did not fit or its reader is too far behind: its row
        should be given back.
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
        end = _BROKEN
        if stream.deliver(output):
            if not stream.is_behind:
                self._delivered.add(stream)
                return True
            end = _end_of_reader_behind(len(stream.token_ids))
        else:
            self.foreign_tokens += len(output.token_ids)
        self.close(output.session_id)
        stream.end(end)
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


def _end_of_reader_behind(num_tokens: int) -> Finished:
    text = f"The reader left more than {MAX_WAITING_LOGPROB_BYTES >> 10} KiB of logprobs unread."
    return Finished(FinishReason.ERROR, num_tokens, NO_TIMING, error=ErrorInfo(ReaderBehindError.code, text))
