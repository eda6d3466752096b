"""Run the real proxy as a process for a test, and talk to it over raw sockets.

`ProxyProcess` starts it on a port the kernel chooses and waits for the line that says it listens. `RawClient` sends
exactly the bytes it is given, in the pieces it is given, and reads answers without any HTTP library in between.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import jwt

ROOT = Path(__file__).resolve().parents[2]
JWT_SECRET = "a-secret-of-the-tests-that-is-long-enough"
INTERNAL_KEY = "an-internal-key-of-the-tests-0123456789"
TIMEOUT_SECONDS = 10.0
# As text or as a member of a JSON object.
_STARTING = re.compile(r"http server is starting on \S+ port (\d+)")


def bearer(**claims: object) -> str:
    """Sign a bearer for the tests' secret."""
    signed: str = jwt.encode({"team_id": "team-a", **claims}, JWT_SECRET, algorithm="HS256")
    return signed


AUTHORIZATION = f"Authorization: Bearer {bearer(jti='id-1')}"


class ProxyProcess:
    """Hold one running proxy; its output is collected line by line."""

    def __init__(
        self,
        upstream_port: int,
        *arguments: str,
        cwd: Path = ROOT,
        script: str = "proxy/proxy.py",
        start_new_session: bool = False,
        **settings: str,
    ):
        environment = {
            "PATH": os.environ["PATH"],
            "JWT_SECRET": JWT_SECRET,
            "INTERNAL_AUTH_KEY": INTERNAL_KEY,
            **settings,
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, script, "--port", "0", "--hostname", f"http://127.0.0.1:{upstream_port}", *arguments],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=start_new_session,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._collect, name="proxy-output")
        self._reader.start()
        if not self._ready.wait(TIMEOUT_SECONDS) or self.process.poll() is not None:
            self.stop()
            raise RuntimeError("the proxy did not start: " + "\n".join(self.lines))
        self.port = int(next(filter(None, map(_STARTING.search, self.lines)))[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit status; kill after the time-out."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the process and of its output."""
        try:
            status = self.process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = None
        self._reader.join(TIMEOUT_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert status is not None, "the proxy did not end in time and was killed"
        return status

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "http server is running as reverse proxy to " in line:
                self._ready.set()
        self._ready.set()


class RawClient:
    """Speak to a port byte by byte."""

    def __init__(self, port: int, *, receive_buffer_bytes: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.sock.connect(("127.0.0.1", port))
        except OSError:
            self.sock.close()
            raise
        self.buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sock.close()

    def send(self, data: bytes | str) -> None:
        """Send bytes at once."""
        self.sock.sendall(data.encode("latin-1") if isinstance(data, str) else data)

    def send_pieces(self, pieces: Iterable[bytes]) -> None:
        """Send pieces one by one; stop quietly when the proxy has already closed."""
        try:
            for piece in pieces:
                self.sock.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return

    def request(self, method: str, path: str, *headers: str, body: bytes = b"", version: str = "1.1") -> None:
        """Send a request with a bearer, a Host and a length where there is a body."""
        lines = [f"{method} {path} HTTP/{version}", "Host: proxy.test", AUTHORIZATION, *headers]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def read_until(self, mark: bytes) -> bytes:
        """Read up to and including a mark; what follows stays for the next read."""
        while mark not in self.buffer:
            piece = self.sock.recv(65536)
            assert piece, f"closed while waiting for {mark!r}, got {self.buffer!r}"
            self.buffer += piece
        part, _, self.buffer = self.buffer.partition(mark)
        return part + mark

    def read_head(self) -> tuple[int, dict[str, str]]:
        """Read an answer's head: status and headers by lower-case name."""
        status_line, *lines = self.read_until(b"\r\n\r\n").decode("latin-1").rstrip("\r\n").split("\r\n")
        return int(status_line.split(" ")[1]), {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }

    def read_chunk(self) -> bytes:
        """Read one chunk of a chunked body."""
        size = int(self.read_until(b"\r\n"), 16)
        while len(self.buffer) < size + 2:
            self.buffer += self.sock.recv(65536)
        chunk, self.buffer = self.buffer[:size], self.buffer[size + 2 :]
        return chunk

    def read_answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one whole answer, framed by its length or in chunks."""
        status, headers = self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            chunks = []
            while chunk := self.read_chunk():
                chunks.append(chunk)
            return status, headers, b"".join(chunks)
        length = int(headers["content-length"])
        while len(self.buffer) < length:
            piece = self.sock.recv(65536)
            assert piece, "answer is shorter than its length"
            self.buffer += piece
        body, self.buffer = self.buffer[:length], self.buffer[length:]
        return status, headers, body

    def read_to_end(self) -> bytes:
        """Read until the proxy closes."""
        try:
            while piece := self.sock.recv(65536):
                self.buffer += piece
        except ConnectionResetError:
            pass
        data, self.buffer = self.buffer, b""
        return data

    def reset(self) -> None:
        """Close with an RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def seconds_since(started: float) -> float:
    """Return the seconds since a `time.monotonic` reading."""
    return time.monotonic() - started
