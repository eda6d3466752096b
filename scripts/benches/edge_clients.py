"""Be the clients of an attack, and those who suffer from it: slow and silent connections, timed first tokens, probes.

One asyncio loop for both: what the attackers cost this process is in the times that it measures, which so are too high
rather than too low. A connection that is cut is opened anew, so that the attack stays as large as it is. Knows HTTP/1.1
as bytes and the routes that it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benches.service import BenchError, Target

DRIP_SECONDS = 1.0
"""Between a dripping client's bytes, and a slow reader's."""

_LARGE_PUBLIC_PATH = "/openapi.json"
_SETTLING_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
_PROBE_PAUSE_SECONDS = 0.1
_SPARE_DESCRIPTORS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One way to be slow: what is sent at once, what drips, and how small a buffer a slow reader has."""

    name: str
    opening: str
    drip: bytes = b""
    reads_slowly: bool = False
    needs_bearer: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("header_drip", "GET /health HTTP/1.1\r\nHost: x\r\nX: ", drip=b"x"),
        Kind(
            "body_drip",
            "POST /inference/m HTTP/1.1\r\nHost: x\r\n{bearer}Content-Length: 200000\r\n\r\n",
            drip=b" ",
            needs_bearer=True,
        ),
        Kind("slow_read", f"GET {_LARGE_PUBLIC_PATH} HTTP/1.1\r\nHost: x\r\n\r\n", reads_slowly=True),
        Kind("half_request", "GET /health HT"),
        Kind("idle", ""),
    )
}


class Attack:
    """Hold so many connections of a kind against a target until stopped; count them, and how long each lasted."""

    def __init__(self, target: Target, kind: Kind, num_connections: int, opening_seconds: float) -> None:
        """Prepare; `running` begins it, and opens the connections evenly over `opening_seconds`.

        As many seconds as one lasts make an even attack: else all are cut, and come again, at the same moment.
        """
        self.num_open = 0
        self.num_ended = 0
        self.longest_seconds = 0.0
        self._target = target
        self._kind = kind
        self._num_connections = num_connections
        self._opening_seconds = opening_seconds
        bearer = f"Authorization: Bearer {target.bearer}\r\n" if kind.needs_bearer else ""
        self._opening = kind.opening.format(bearer=bearer).encode() if kind.needs_bearer else kind.opening.encode()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open all connections, go on in the background, and close them at the end of the block."""
        pause = self._opening_seconds / self._num_connections
        clients = [asyncio.create_task(self._be_slow(index * pause)) for index in range(self._num_connections)]
        try:
            await asyncio.sleep(self._opening_seconds + _SETTLING_SECONDS)
            yield
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def _be_slow(self, pause: float) -> None:
        await asyncio.sleep(pause)
        while True:
            with contextlib.closing(socket.socket()) as sock:
                if self._kind.reads_slowly:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                if not await self._open(sock):
                    await asyncio.sleep(DRIP_SECONDS)
                    continue
                began = time.monotonic()
                self.num_open += 1
                try:
                    await self._drip(sock)
                finally:
                    self.num_open -= 1
                lasted = time.monotonic() - began
                self.num_ended += 1
                self.longest_seconds = max(self.longest_seconds, lasted)
                # Many connections are the attack, not many new ones.
                await asyncio.sleep(max(0.0, DRIP_SECONDS - lasted))

    async def _open(self, sock: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, ("127.0.0.1", self._target.port))
            await loop.sock_sendall(sock, self._opening)
        except OSError:
            return False
        return True

    async def _drip(self, sock: socket.socket) -> None:
        """Send or read a byte a time until the other end closes."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            if not self._kind.drip and not self._kind.reads_slowly:
                await loop.sock_recv(sock, 1)
            while self._kind.drip:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(loop.sock_recv(sock, 1), DRIP_SECONDS)
                    return
                await loop.sock_sendall(sock, self._kind.drip)
            while self._kind.reads_slowly:
                await asyncio.sleep(DRIP_SECONDS)
                if not await loop.sock_recv(sock, 1):
                    return


async def first_tokens(target: Target, number: int, *, at_once: int = 2) -> list[float]:
    """Ask for a token so often, each over a connection of its own; return the seconds to each, connecting included.

    Raises BenchError for an answer that is not a 200 with a token.
    """
    body = json.dumps({"text": "count", "max_tokens": 1}).encode()
    head = [f"POST /inference/{_MODEL} HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    head += [f"{name}: {value}" for name, value in target.headers.items()] + [f"Content-Length: {len(body)}"]
    request = "\r\n".join([*head, "", ""]).encode() + body
    waiting = iter(range(number))
    seconds: list[float] = []

    async def ask() -> None:
        for _ in waiting:
            began = time.monotonic()
            answer = await asyncio.wait_for(_ask(target.port, request), _ANSWER_SECONDS)
            seconds.append(time.monotonic() - began)
            if not answer.startswith(b"HTTP/1.1 200 ") or not answer.endswith(b"0\r\n\r\n"):
                raise BenchError(f"no token: {answer[:200]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(ask())
    return seconds


_MODEL = "falcon40b"
"""A name that the native routes know whatever is served."""


class Probe:
    """Ask for /health all the time, each over a connection of its own; keep the seconds and what was not a 200."""

    def __init__(self, target: Target) -> None:
        """Prepare; `running` begins it."""
        self.seconds: list[float] = []
        self.faults: list[str] = []
        self._port = target.port

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe in the background until the end of the block."""
        task = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _probe(self) -> None:
        request = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        while True:
            began = time.monotonic()
            try:
                answer = await asyncio.wait_for(_ask(self._port, request), _ANSWER_SECONDS)
            except (OSError, TimeoutError) as fault:
                answer = type(fault).__name__.encode()
            self.seconds.append(time.monotonic() - began)
            if not answer.startswith(b"HTTP/1.1 200 "):
                self.faults.append(answer[:80].decode("latin-1"))
            await asyncio.sleep(_PROBE_PAUSE_SECONDS)


async def _ask(port: int, request: bytes) -> bytes:
    """Send a request that ends its connection and return what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read(-1)
    finally:
        writer.close()


def allow_descriptors(number: int) -> int:
    """Raise the limit of open files for so many connections; return how many of them fit."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _SPARE_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, _soft), hard))
    return min(number, allowed - _SPARE_DESCRIPTORS)


def num_descriptors(pid: int) -> int:
    """Return how many descriptors a process has open (proc_pid_fd(5))."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident_mib(pid: int) -> float:
    """Return the memory that a process holds, in MiB (proc_pid_statm(5), field 2)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


async def seconds_until_back(pid: int, baseline: int, longest_seconds: float) -> float | None:
    """Wait until a process has at most `baseline` descriptors; return how long it took, None if it took too long."""
    began = time.monotonic()
    while num_descriptors(pid) > baseline:
        if time.monotonic() - began > longest_seconds:
            return None
        await asyncio.sleep(0.1)
    return round(time.monotonic() - began, 2)


def worst(values: Sequence[float]) -> float:
    """Return the largest in milliseconds; 0 without any."""
    return round(1000 * max(values, default=0.0), 1)
