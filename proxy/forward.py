"""Own the exchange with the inference server: send one request, read the answer's bytes as they come.

Runs in the proxy's worker; blocks the calling greenlet only. Speaks through `requests`' adapter and not its Session:
no cookies kept, no redirects followed, no .netrc and no proxy variables read. It does not know who calls or what a
client gets to see; faults leave as `Refusal` before the head and as `AnswerTruncated` after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from typing import Any

import gevent
import requests
import urllib3
from requests.adapters import HTTPAdapter

from proxy.answers import Refusal
from proxy.chunks import ChunkFault, ChunkRelay, FramedBytes

_READ_BYTES = 65536
_EVENT_READ = 1  # libev's EV_READ
_RETRY_AFTER_SECONDS = "1"
_PLAIN_CODINGS = frozenset({"", "identity"})
_BODILESS_STATUSES = frozenset({204, 304})
# RFC 9112 sections 4 and 5, RFC 9110 sections 5.1 and 5.5: a status line, a field, or the end; no fold, no lone LF.
_HEAD_LINE = re.compile(rb"(?:(?:HTTP/1\.[01] |[!#$%&'*+.^_`|~0-9A-Za-z-]+:)[\t\x20-\x7e\x80-\xff]*)?\r\n|")
# An answer of more is none of ours, and Python refuses to read a number of thousands of digits.
_MAX_LENGTH_DIGITS = 15


class AnswerTruncated(Exception):
    """Tell that the upstream stopped in the middle of its answer."""


class UpstreamAnswer:
    """Hold one answer whose head has arrived; `length` is None for a chunked one."""

    def __init__(self, response: requests.Response, adapter: HTTPAdapter, method: str, *, read_timeout: float) -> None:
        """Take over the response; raise Refusal 502 when its end could not be told from a broken connection."""
        self._raw: urllib3.HTTPResponse = response.raw
        self._adapter = adapter
        self._read_timeout = read_timeout
        self.status: int = response.status_code
        self.headers: list[tuple[str, str]] = list(self._raw.headers.iteritems())
        self.bodiless = method == "HEAD" or self.status in _BODILESS_STATUSES
        self.chunked = chunked = self._raw.headers.get("Transfer-Encoding", "").lower() == "chunked"
        self.length = None if chunked else _parse_length(self._raw.headers.get("Content-Length", ""))
        if not self.bodiless and not chunked and self.length is None:
            self.close()
            raise Refusal(502, "upstream_framing", "Inference server sent an answer without a length.")
        # RFC 9112 section 6.3: two framings are an error. A coding nobody asked for would reach the client unnamed.
        has_two = bool(self.header("Transfer-Encoding") and self.header("Content-Length"))
        if has_two or self.header("Content-Encoding").lower() not in _PLAIN_CODINGS:
            self.close()
            raise Refusal(502, "upstream_framing", "Inference server sent an answer that cannot be passed on.")

    def header(self, name: str) -> str:
        """Return one header's value or an empty string."""
        return self._raw.headers.get(name, "")

    def read_some(self) -> bytes:
        """Wait for the next bytes and return what is there, b"" at the end; raise AnswerTruncated."""
        if self.bodiless:
            return b""
        try:
            return self._raw.read1(_READ_BYTES, decode_content=False) or b""
        except (urllib3.exceptions.HTTPError, HTTPException, OSError, ValueError) as fault:
            raise AnswerTruncated(type(fault).__name__) from None

    def read_chunks(self) -> Iterator[FramedBytes]:
        """Yield the chunks of a chunked answer with their framing, as they come; raise AnswerTruncated.

        The last chunk, which has no data, is left out. Reads the socket itself: http.client and the cooperative socket
        under it cost several times what an id's chunk takes to check and to send.
        """
        relay = ChunkRelay()
        try:
            data = self._take_read_ahead()
            with contextlib.closing(ReadWait(self._raw.fileno(), self._read_timeout)) as wait:
                while True:
                    whole = relay.feed(data)
                    if whole:
                        yield whole
                    if relay.ended:
                        return
                    data = wait.read()
                    if not data:
                        raise AnswerTruncated("end of file")
        except (OSError, ChunkFault) as fault:
            raise AnswerTruncated(type(fault).__name__) from None

    def _take_read_ahead(self) -> bytes:
        """Return the bytes behind the head that http.client has read along with it; never waits for more.

        Raises OSError when the connection has been reset since.
        """
        raw: Any = self._raw
        stream = raw._original_response.fp
        # Without time to wait, peek reads what is there; ReadWait does the waiting from here on.
        stream.raw._sock.settimeout(0.0)
        held: bytes = stream.peek()
        return bytes(stream.read(len(held))) if held else b""

    def read_all(self, max_bytes: int) -> bytes:
        """Read the whole body; raise Refusal 502 when it breaks off or is longer than `max_bytes`."""
        body = bytearray()
        try:
            while chunk := self.read_some():
                body += chunk
                if len(body) > max_bytes:
                    raise Refusal(502, "upstream_too_large", "Answer is too large to be sent in one piece.")
        except AnswerTruncated:
            raise Refusal(502, "upstream_broken", "Inference server broke off its answer.") from None
        return bytes(body)

    def close(self) -> None:
        """Close the upstream connection, which tells the server to stop if it has not ended."""
        self._raw.close()
        # What has been read to its end is back in its pool by now, which urllib3 closes only when nobody refers to it.
        pool: Any = self._raw._pool
        if pool is not None:
            pool.close()
        self._adapter.close()


class ReadWait:
    """Wait for the bytes of one descriptor at the least cost a wait: what watches it is made once."""

    def __init__(self, descriptor: int, timeout_seconds: float) -> None:
        """Watch a descriptor that does not block, for the greenlet that makes this; the time is for each wait."""
        self._descriptor = descriptor
        self._timeout_seconds = timeout_seconds
        self._hub = gevent.get_hub()
        self._reader = gevent.getcurrent()
        self._waiting_since: float | None = None
        self._readable = self._hub.loop.io(descriptor, _EVENT_READ)
        self._timer = self._start_timer(timeout_seconds)

    def read(self) -> bytes:
        """Return the next bytes, b"" at the end of file; raise TimeoutError or another OSError."""
        self._waiting_since = time.monotonic()
        try:
            while True:
                self._hub.wait(self._readable)
                try:
                    return os.read(self._descriptor, _READ_BYTES)
                except BlockingIOError:  # readiness is a hint: select(2), BUGS
                    continue
        finally:
            self._waiting_since = None

    def close(self) -> None:
        """Stop watching."""
        for watcher in (self._readable, self._timer):
            watcher.stop()
            watcher.close()

    def _start_timer(self, seconds: float) -> Any:
        timer = self._hub.loop.timer(seconds)
        timer.start(self._check_time)
        return timer

    def _check_time(self) -> None:
        # One timer an answer, set anew when it rings: to set one for each wait would cost as much as the wait.
        now = time.monotonic()
        since = now if self._waiting_since is None else self._waiting_since
        remaining = since + self._timeout_seconds - now
        if remaining <= 0:
            self._reader.throw(TimeoutError("no bytes in time"))
        else:
            self._timer.close()
            self._timer = self._start_timer(remaining)


class _HeadReader:
    """Hand out the lines of a head and refuse those that Python's parser would read as something else.

    It ends a line at a lone CR as well, so that a value with one would become another field.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._stream.readline(limit)
        if _HEAD_LINE.fullmatch(line) is None:
            raise HTTPException("not a line of a head")
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _StrictResponse(HTTPResponse):
    """Read a head line by line through a `_HeadReader`."""

    def begin(self) -> None:
        stream, self.fp = self.fp, _HeadReader(self.fp)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = stream


class _Connection(urllib3.connection.HTTPConnection):
    response_class = _StrictResponse


class _Pool(urllib3.connectionpool.HTTPConnectionPool):
    ConnectionCls = _Connection


class Upstream:
    """Send requests to one inference server."""

    def __init__(self, base_url: str, *, connect_timeout: float, read_timeout: float) -> None:
        """Take the address; timeouts in seconds, `read_timeout` for each wait for bytes."""
        self._base_url = base_url
        self._timeout = (connect_timeout, read_timeout)

    def send(
        self,
        method: str,
        path_and_query: str,
        headers: dict[str, str],
        body: bytes | None,
        *,
        most_seconds: float | None = None,
    ) -> UpstreamAnswer:
        """Send a request and wait for the answer's head; never repeated.

        `most_seconds` bounds each wait for bytes of this answer below what is set for all. Raises Refusal: 503 when the
        connection is refused, 504 without an answer in time, 502 when it breaks.
        """
        prepared = requests.PreparedRequest()
        prepared.prepare(method=method, url=self._base_url + path_and_query, headers=headers, data=body)
        # An adapter a request, so a connection a request: a pooled one may be closed by the server at the very moment a
        # POST goes out on it, and that error must not be retried.
        adapter = HTTPAdapter(pool_connections=1, pool_maxsize=1, max_retries=0)
        adapter.poolmanager.pool_classes_by_scheme = {"http": _Pool}
        connect_timeout, read_timeout = self._timeout
        read_timeout = read_timeout if most_seconds is None else min(read_timeout, most_seconds)
        try:
            response = adapter.send(prepared, stream=True, timeout=(connect_timeout, read_timeout))
        except (requests.RequestException, urllib3.exceptions.HTTPError, HTTPException, OSError, ValueError) as fault:
            _forget_frames(fault)
            raise _refusal_for(fault) from None
        return UpstreamAnswer(response, adapter, method, read_timeout=read_timeout)


def _parse_length(text: str) -> int | None:
    valid = text.isascii() and text.isdigit() and len(text) <= _MAX_LENGTH_DIGITS
    return int(text) if valid else None


def _forget_frames(fault: BaseException | None) -> None:
    """Take the locals from the frames of a fault and its causes.

    urllib3 keeps a fault in a frame that its own traceback names: a cycle, which would hold the request's body as well.
    """
    while fault is not None:
        traceback.clear_frames(fault.__traceback__)
        fault = fault.__context__


def _refusal_for(fault: Exception) -> Refusal:
    if isinstance(fault, requests.Timeout):
        return Refusal(504, "upstream_timeout", "Inference server did not answer in time.")
    cause = getattr(fault.args[0] if fault.args else None, "reason", None)
    if isinstance(cause, urllib3.exceptions.NewConnectionError):
        return Refusal(
            503,
            "upstream_down",
            "Inference server is not reachable, try again later.",
            {"Retry-After": _RETRY_AFTER_SECONDS},
        )
    if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
        return Refusal(504, "upstream_timeout", "Inference server did not answer in time.")
    return Refusal(502, "upstream_broken", "Inference server gave no valid answer.")
