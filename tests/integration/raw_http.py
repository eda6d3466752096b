"""Speak HTTP over a plain socket, for tests that look at chunks, arrival times, broken ends, FIN and RST.

Client side only. Parses what a response's head says of its body (RFC 9112 section 6) and keeps every chunk as it came,
so that a stream that was cut can be told from one that ended.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

TIMEOUT_SECONDS = 60.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: close(2) sends RST (socket(7))."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of a body, and when it had arrived (monotonic seconds)."""

    data: bytes
    at: float


class RawStream:
    """One POST of a JSON body over a connection of its own, sent at once and read as the test likes."""

    def __init__(
        self,
        port: int,
        path: str,
        body: object,
        headers: Mapping[str, str] | None = None,
        *,
        version: str = "HTTP/1.1",
        receive_bytes: int | None = None,
    ) -> None:
        """Connect and send the request; `receive_bytes` bounds the kernel's buffer for a client that does not read."""
        self.sock = socket.socket()
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.connect(("127.0.0.1", port))
        self._buffer = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self.chunks: list[Chunk] = []
        self.whole = False
        self.sent_at = 0.0
        self.send(path, body, headers, version=version)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, path: str, body: object, headers: Mapping[str, str] | None = None, *, version: str) -> None:
        """Send a request; a second one on the same connection may follow the first's whole answer."""
        content = json.dumps(body).encode()
        lines = [f"POST {path} {version}", "Host: 127.0.0.1", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self._status, self._headers, self.chunks, self.whole = 0, {}, [], False
        self.sent_at = time.monotonic()
        self.sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    @property
    def status(self) -> int:
        """The status code; blocks for the head."""
        self._read_head()
        return self._status

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, names in lower case; blocks for the head."""
        self._read_head()
        return self._headers

    @property
    def body(self) -> bytes:
        """The body so far."""
        return b"".join(chunk.data for chunk in self.chunks)

    def read_chunk(self) -> bytes | None:
        """Block for the next chunk of a chunked body; None at its end: `whole` tells an honest end from a cut."""
        self._read_head()
        size_line = self._take_line()
        if size_line is None:
            return None
        size = int(size_line, 16)
        data = self._take(size + 2)
        if data is None:
            return None
        if size == 0:
            self.whole = True
            return None
        self.chunks.append(Chunk(data[:-2], time.monotonic()))
        return data[:-2]

    def read_all(self) -> bytes:
        """Read to the end of the body, whole or cut, and return it."""
        if self.headers.get("transfer-encoding") == "chunked":
            while self.read_chunk() is not None:
                continue
            return self.body
        data = self._take(int(self.headers["content-length"]))
        self.whole = data is not None
        self.chunks.append(Chunk(data or b"", time.monotonic()))
        return self.body

    def read_to_end_of_file(self) -> bytes:
        """Return every byte up to the server's FIN or RST, parsed or not."""
        while self._fill():
            continue
        return self._buffer

    def half_close(self) -> None:
        """Send FIN and go on listening."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Close the connection with RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.sock.close()

    def close(self) -> None:
        """Close the connection with FIN."""
        self.sock.close()

    def _read_head(self) -> None:
        if self._status:
            return
        status_line = self._take_line()
        if status_line is None:
            raise ConnectionError("the connection ended before the response's head")
        self._status = int(status_line.split()[1])
        while line := self._take_line():
            name, _, value = line.decode().partition(":")
            self._headers[name.lower()] = value.strip()

    def _take_line(self) -> bytes | None:
        while b"\r\n" not in self._buffer:
            if not self._fill():
                return None
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _take(self, size: int) -> bytes | None:
        while len(self._buffer) < size:
            if not self._fill():
                return None
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _fill(self) -> bool:
        try:
            part = self.sock.recv(65536)
        except ConnectionResetError:
            return False
        self._buffer += part
        return bool(part)
