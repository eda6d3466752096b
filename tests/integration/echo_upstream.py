"""Stand in for the inference server behind a real proxy process: plain sockets, driven by the test or by itself.

`ScriptedUpstream` does nothing until the test tells it to, so that a test can say "this piece is made now" and look
what the client has by then. `EchoUpstream` answers every request by itself, in one thread, and records what it got.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

TIMEOUT_SECONDS = 10.0


@dataclass
class Exchange:
    """Hold one request as it came off the wire, and the socket to answer on."""

    sock: socket.socket
    request_line: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        """Return the only value of a header; None when absent."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        self.sock.sendall(data)

    def start_stream(self, content_type: str = "text/event-stream", *extra: str) -> None:
        """Send the head of a chunked 200."""
        lines = ["HTTP/1.1 200 OK", f"Content-Type: {content_type}", "Transfer-Encoding: chunked", *extra, "", ""]
        self.send("\r\n".join(lines).encode())

    def send_chunk(self, data: bytes) -> None:
        """Send one chunk; an empty one ends the body."""
        self.send(b"%x\r\n%s\r\n" % (len(data), data))

    def answer(
        self, body: bytes, *, status: str = "200 OK", content_type: str = "application/json", extra: str = ""
    ) -> None:
        """Send a whole answer with a length, then close."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
        self.send(head.encode("latin-1") + body)
        self.close()

    def seconds_until_closed(self) -> float:
        """Wait until the proxy closes its side; return how long that took."""
        started = time.monotonic()
        self.sock.settimeout(TIMEOUT_SECONDS)
        with contextlib.suppress(ConnectionResetError):
            assert self.sock.recv(1) == b""
        return time.monotonic() - started

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class ScriptedUpstream:
    """Listen; the test accepts and answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(TIMEOUT_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._exchanges: list[Exchange] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_exchanges()
        self._listener.close()

    def close_exchanges(self) -> None:
        """Close the sockets of all requests accepted so far."""
        while self._exchanges:
            self._exchanges.pop().close()

    def accept(self) -> Exchange:
        """Wait for the next request and read it whole."""
        sock, _address = self._listener.accept()
        sock.settimeout(TIMEOUT_SECONDS)
        exchange = read_request(sock)
        self._exchanges.append(exchange)
        return exchange

    def has_caller(self) -> bool:
        """Say whether a connection waits to be accepted."""
        self._listener.setblocking(False)
        try:
            sock, _address = self._listener.accept()
        except BlockingIOError:
            return False
        else:
            sock.close()
            return True
        finally:
            self._listener.settimeout(TIMEOUT_SECONDS)


class EchoUpstream(ScriptedUpstream):
    """Answer every request with what it was, and keep a record."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Exchange] = []
        self._thread = threading.Thread(target=self._serve, name="echo-upstream")
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        # A connection of our own wakes the accept.
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(TIMEOUT_SECONDS)
        super().__exit__(kind, fault, trace)

    _stopped = False

    def _serve(self) -> None:
        while not self._stopped:
            try:
                sock, _address = self._listener.accept()
            except TimeoutError:
                continue
            with sock:
                sock.settimeout(TIMEOUT_SECONDS)
                try:
                    exchange = read_request(sock)
                except ConnectionError:
                    continue
                self.seen.append(exchange)
                described = {"line": exchange.request_line, "headers": exchange.headers, "size": len(exchange.body)}
                exchange.answer(json.dumps(described).encode())


def read_request(sock: socket.socket) -> Exchange:
    """Read one request with a Content-Length or no body."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError("closed before the head was whole")
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    request_line, *lines = head.decode("latin-1").split("\r\n")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    while len(body) < length:
        body += sock.recv(65536)
    return Exchange(sock, request_line, headers, body)
