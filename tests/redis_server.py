"""Run a real Redis for a test on a port of its own, or something that answers in its place.

`running_redis` ends what it started, also one that was stopped by a signal; nothing is kept on disk. A test that needs
Redis takes `require_redis()` first: without the program it is listed as not run.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

START_SECONDS = 10.0


class RedisServer:
    """One Redis process after another on one port."""

    def __init__(self, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port: int = listener.getsockname()[1]
        self._folder = folder
        self.start()

    @property
    def url(self) -> str:
        """Its address, as REDIS_URL has it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it with nothing in it, and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, whatever state it is in."""
        self._process.kill()
        self._process.wait()

    def command(self, *words: str) -> bytes:
        """Send one command and return the answer's bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as sock:
            lines = [f"*{len(words)}", *(line for word in words for line in (f"${len(word.encode())}", word)), ""]
            sock.sendall("\r\n".join(lines).encode())
            return sock.recv(65536)

    def _answers(self) -> bool:
        try:
            return self.command("PING") == b"+PONG\r\n"
        except OSError:
            return False


def require_redis() -> None:
    """List the test as not run where Redis is not installed; in continuous integration that is a failure."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Run Redis until the block ends."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(folder)
        try:
            yield server
        finally:
            server.kill()


@contextlib.contextmanager
def answering(answer: bytes | None, port: int = 0, delay_seconds: float = 0.0) -> Iterator[int]:
    """Answer whatever comes with the same bytes, after a while; None: with silence, b"": by closing. Gives the port."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(
            target=_answer_all, args=(listener, answer, delay_seconds, stop), name="redis-stand-in"
        )
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def _answer_all(listener: socket.socket, answer: bytes | None, delay_seconds: float, stop: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        open_sockets: list[socket.socket] = []
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                open_sockets.append(stack.enter_context(listener.accept()[0]))
                open_sockets[-1].settimeout(0.001)
            for sock in list(open_sockets):
                with contextlib.suppress(OSError):
                    if sock.recv(65536) and answer is not None:
                        stop.wait(delay_seconds)
                        sock.sendall(answer)
                        if not answer:
                            open_sockets.remove(sock)
                            sock.close()
