"""Own one client's socket in the proxy: read deadlines, write stalls, the late 100 Continue, and noticing that it left.

Runs in the gevent worker of PROCESS 3; every wait gives way to the other greenlets. It stands where gunicorn expects a
socket. It does not know routes, bearers or the upstream: what must end when the client leaves is a greenlet that gets
`ClientLeft` thrown into it. Why the proxy cut a client, if it did, is in `cut_reason`, for the log.

# design: a FIN counts as "left", nobody can tell close from half-close. It is seen by a second greenlet that reads
ahead while a request waits for its upstream; what it reads is a pipelined request and is served later.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.socket import wait_read, wait_write
from gunicorn import util
from gunicorn.http.body import ChunkedReader, LengthReader
from gunicorn.http.errors import (
    ChunkMissingTerminator,
    InvalidChunkExtension,
    InvalidChunkSize,
    NoMoreData,
    ParseException,
)

from proxy.answers import Refusal
from proxy.pace import Pace, PaceRule

# A client may pipeline behind a running request, but not use the proxy as storage; least of all without a bearer.
_MAX_READ_AHEAD_BYTES = 65536
_MAX_STRANGERS_READ_AHEAD_BYTES = 8192
_LINGER_SECONDS = 1.0
_GIVE_WAY_BYTES = 262144
# Any time: a sleep of none only goes behind what is ready to run, and the loop looks at its sockets once in fifty of
# these (gevent's _ffi/loop.py, CALLBACK_CHECK_COUNT). A timer it comes to after it has looked.
_SOON_SECONDS = 1e-6
# What the kernel keeps of an answer for a client that does not read; it doubles the number (socket(7)). Left alone, the
# buffer grows to megabytes a connection, which thousands of such clients could take from everybody.
_SEND_BUFFER_BYTES = 65536
_RETRY_AFTER_SECONDS = "1"


class ClientLeft(BaseException):
    """End a request whose client is gone; not an Exception, so that no layer between turns it into an answer."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Say how slow a client may be."""

    head: PaceRule
    body: PaceRule
    write_stall_seconds: float


class ClientConnection:
    """Stand in for the client's socket in gunicorn and offer the app what a socket cannot."""

    def __init__(
        self,
        sock: Any,
        deadlines: Deadlines,
        now: Callable[[], float] = time.monotonic,
        *,
        keep: Callable[[ClientConnection], bool] = lambda _connection: True,
    ) -> None:
        """Take over a gevent socket; the first head is due from now on. `keep` says whether it may stay (places.py)."""
        self._sock = sock
        self._deadlines = deadlines
        self._now = now
        self._keep = keep
        self._ahead = bytearray()
        self._at_end = False
        self._num_bytes_in_a_row = 0
        self._has_waited = False
        self._request: Any = None
        self._continue_due = False
        self._body_open = False
        self._max_read_ahead = _MAX_STRANGERS_READ_AHEAD_BYTES
        self._watcher: gevent.Greenlet | None = None
        self._watched: gevent.Greenlet | None = None
        self._endings: list[Callable[[], None]] = []
        self._running: gevent.Greenlet | None = None
        self._cut_by: Refusal | None = None
        self._answer_due = math.inf
        self.answer_started = False
        self.left = False
        self.cut_reason: str | None = None
        """Why the proxy itself ended the connection under a request; None where the client did, or nobody."""
        self.linger = False
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self.begin_head()

    # What gunicorn calls.

    def recv(self, size: int) -> bytes:
        """Read at most `size` bytes within the pace of the current phase; raise Refusal 408 when it is missed.

        A connection that is idle between requests ends with b"" instead.
        """
        self._has_waited = False
        if self._ahead:
            data = bytes(self._ahead[:size])
            del self._ahead[:size]
        else:
            data = b"" if self._at_end else self._read_in_time(size)
        if self._pace.num_bytes and not self._has_waited:
            # A client that sends as fast as it is read never makes this greenlet wait, and a body in small chunks takes
            # a thousand times longer to read than to receive. Not after the first: a head that is there is a request.
            give_way()
        self._pace.num_bytes += len(data)
        return data

    def sendall(self, data: bytes) -> None:
        """Write everything; raise ClientLeft when the client is gone, stalls or is overdue."""
        self.answer_started = True
        self._send(data)

    def send(self, data: bytes) -> int:
        """Write everything and return its length."""
        self.sendall(data)
        return len(data)

    def setblocking(self, _flag: bool) -> None:
        """Stay as we are: waits are explicit here, whatever mode gunicorn wants."""

    def shutdown(self, how: int) -> None:
        """Shut down the socket."""
        self._sock.shutdown(how)

    def getsockname(self) -> Any:
        """Name the local end."""
        return self._sock.getsockname()

    def close(self) -> None:
        """Close; when request bytes were left unread, let the client read the answer first (RFC 9112 section 9.6)."""
        if self.linger and not self.left:
            util.close_graceful(self._sock, timeout=_LINGER_SECONDS)
        self._sock.close()
        # Both know this connection: without the cycles all go at once, not when garbage is collected.
        self._forget_request()
        self._cut_by = None

    # What the worker calls.

    def begin_head(self) -> None:
        """Expect the next request's head from now on."""
        self.answer_started = False
        self._answer_due = math.inf
        self.error_headers: list[tuple[str, str]] = []
        """What the app wants on the answer that the worker gives when the app cannot."""
        self._pace = Pace(self._deadlines.head, self._now())

    def begin_request(self, request: Any) -> None:
        """Take over a parsed request; its 100 Continue is sent when its body is read, not before it was admitted."""
        self._forget_request()
        self._request = request
        # What came while a request with a bearer ran is there already.
        self._max_read_ahead = max(_MAX_STRANGERS_READ_AHEAD_BYTES, len(self._ahead))
        self._running = gevent.getcurrent()
        self._cut_by = None
        self._continue_due = request._expected_100_continue
        request._expected_100_continue = False
        reader = request.body.reader
        self._body_open = not (isinstance(reader, LengthReader) and reader.length == 0)

    def _forget_request(self) -> None:
        """Let go of the last request; gunicorn's reader of chunks is in a cycle with it and with this connection."""
        if self._request is not None and isinstance(self._request.body.reader, ChunkedReader):
            self._request.body.reader.req = self._request.body.reader.parser = None
        self._request = None

    def end_request(self) -> None:
        """Stop watching, then run what was registered with `on_end`, last first.

        All of it runs, whatever some of it raises; then the first exception goes on.
        """
        self._running = None
        self._unwatch()
        first_fault: BaseException | None = None
        while self._endings:
            try:
                self._endings.pop()()
            except BaseException as fault:
                first_fault = first_fault or fault
        if first_fault is not None:
            raise first_fault

    @property
    def idle(self) -> bool:
        """Say whether no request is running."""
        return self._request is None or (not self._endings and self._watched is None)

    @property
    def fresh(self) -> bool:
        """Say whether no request has come yet."""
        return self._request is None

    def came_after(self, moment: float) -> bool:
        """Say whether it was opened after a moment of the monotonic clock and no request has come yet."""
        return self.fresh and self._pace.started > moment

    def give_up(self) -> None:
        """End the connection for a newcomer's sake, in whatever it is."""
        self.cut_reason = "made_room"
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        # It may wait for a turn, where it does not see its socket.
        gevent.get_hub().loop.run_callback(self._leave, self._request)

    # What the app calls.

    def cut(self, refusal: Refusal) -> None:
        """Raise `refusal` in the greenlet of the request that runs now, wherever it waits; called from any other."""
        # Only the hub may throw into a greenlet; it does so only if the same request still runs by then.
        gevent.get_hub().loop.run_callback(self._throw, self._request, refusal)

    def take_place(self) -> None:
        """Stay, now that a good bearer has been shown; raise Refusal 503 when all places are taken by such ones."""
        self._max_read_ahead = _MAX_READ_AHEAD_BYTES
        if not self._keep(self):
            self._request.force_close()
            raise Refusal(
                503,
                "connections_exhausted",
                "All connections of this service are in use, try again later.",
                {"Retry-After": _RETRY_AFTER_SECONDS},
            )

    def on_end(self, ending: Callable[[], None]) -> None:
        """Register what must happen when the request ends, however it ends."""
        self._endings.append(ending)

    def read_body(self, max_bytes: int) -> bytes:
        """Read the whole request body; raise Refusal 400, 408 or 413, or ClientLeft when the client ends too early."""
        if self._continue_due:
            self._continue_due = False
            self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        reader = self._request.body.reader
        declared = reader.length if isinstance(reader, LengthReader) else None
        self._pace = Pace(self._deadlines.body, self._now())
        try:
            body: bytes = self._request.body.read(max_bytes + 1)
        except (ParseException, NoMoreData, ChunkMissingTerminator, InvalidChunkSize, InvalidChunkExtension):
            raise Refusal(400, "body_malformed", "Request body is not framed correctly.") from None
        except OSError:
            self.left = True
            raise ClientLeft from None
        if len(body) > max_bytes:
            raise Refusal(413, "body_too_large", f"Request body is larger than {max_bytes} bytes.")
        if declared is not None and len(body) < declared:
            self.left = True
            raise ClientLeft
        self._body_open = False
        return body

    def refuse(self, *, malformed: bool) -> None:
        """Make this answer the connection's last if nobody can tell where or what the next request is.

        So it is when the body was not read, or when this request had no one meaning.
        """
        if self._body_open or malformed:
            self._request.force_close()
            self.linger = True

    def watch(self) -> None:
        """Throw ClientLeft into this greenlet once the client closes, resets or floods, until the request ends."""
        if self._cut_by is not None:
            # It came while the request waited for something that took it for a fault of its own.
            raise self._cut_by
        if self._watcher is not None:
            return
        self._watched = gevent.getcurrent()
        self._watcher = gevent.spawn(self._read_ahead)

    def bound_answer(self) -> None:
        """Give the answer of the request that runs now as long in all, from now on, as a request body may take."""
        self._answer_due = self._now() + self._deadlines.body.total_seconds

    def reset(self) -> None:
        """Make the next close send an RST, so that the kernel keeps nothing for a client that does not read."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _read_in_time(self, size: int) -> bytes:
        while True:
            try:
                return bytes(self._sock.recv(size))
            except BlockingIOError:
                remaining = self._pace.remaining(self._now())
            if remaining > 0:
                self._has_waited = True
                self._wait(wait_read, remaining)
            elif self._pace.rule is self._deadlines.head and self._pace.num_bytes == 0:
                return b""
            else:
                raise Refusal(408, "client_too_slow", "Request was not sent in time.")

    def _send(self, data: bytes) -> None:
        rest: bytes | memoryview = data  # nearly always gone with the first send
        stalled_since = None
        try:
            while rest:
                try:
                    num_sent = self._sock.send(rest)
                except BlockingIOError:
                    stalled_since = self._now() if stalled_since is None else stalled_since
                    stall_due = stalled_since + self._deadlines.write_stall_seconds
                    remaining = min(stall_due, self._answer_due) - self._now()
                    if remaining <= 0:
                        self.cut_reason = "write_stalled" if stall_due <= self._answer_due else "write_overdue"
                        self.reset()
                        raise
                    self._wait(wait_write, remaining)
                else:
                    stalled_since = None
                    rest = memoryview(rest)[num_sent:]
                    self._give_way(num_sent)
        except OSError:
            self.left = True
            raise ClientLeft from None

    def _wait(self, wait: Callable[..., None], seconds: float) -> None:
        # The event loop's timers count from a time it read before the last greenlets ran, so they may ring early: the
        # callers decide by their own clock and wait again.
        with contextlib.suppress(TimeoutError):
            wait(self._sock.fileno(), timeout=seconds)

    def _give_way(self, num_sent: int) -> None:
        # A fast upstream and a fast client never make this greenlet wait; the others must run all the same.
        self._num_bytes_in_a_row += num_sent
        if self._num_bytes_in_a_row >= _GIVE_WAY_BYTES:
            self._num_bytes_in_a_row = 0
            give_way()

    def _read_ahead(self) -> None:
        try:
            while (num_free := self._max_read_ahead - len(self._ahead)) >= 0:
                try:
                    data = self._sock.recv(num_free + 1)
                except BlockingIOError:
                    wait_read(self._sock.fileno())
                    continue
                if not data:
                    break
                self._ahead += data
            else:
                self.cut_reason = "pipelined_too_much"
        except OSError:
            pass
        self._at_end = True
        # Only the hub may throw into a greenlet; it does so only if the request is still the watched one by then.
        gevent.get_hub().loop.run_callback(self._interrupt)

    def _interrupt(self) -> None:
        watched, self._watched = self._watched, None
        if watched is not None:
            self.left = True
            watched.throw(ClientLeft())

    def _take_running(self, request: Any) -> gevent.Greenlet | None:
        """Return the greenlet of a request, which nobody may interrupt again; None once it has ended."""
        if request is not self._request or self._running is None:
            return None
        running, self._running, self._watched = self._running, None, None
        return running

    def _leave(self, request: Any) -> None:
        if (running := self._take_running(request)) is not None:
            self.left = True
            running.throw(ClientLeft())

    def _throw(self, request: Any, refusal: Refusal) -> None:
        if (running := self._take_running(request)) is not None:
            self._cut_by = refusal
            if self.answer_started:
                self.cut_reason = refusal.code
            running.throw(refusal)

    def _unwatch(self) -> None:
        self._watched = None
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher = None


def give_way() -> None:
    """Let the greenlets run whose sockets are ready, then go on."""
    gevent.sleep(_SOON_SECONDS)
