"""Attack with slow and silent connections, and be those who suffer from it: timed first tokens, and probes.

The attackers run in a process of their own, edge_attackers; it shares the cores with what it attacks, so that the times
are too high rather than too low. Knows HTTP/1.1 as bytes and the routes that it asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from benches import edge_attackers
from benches.edge_attackers import Orders, Standing
from benches.service import BenchError, Target

_LARGE_PUBLIC_PATH = "/openapi.json"
_SCRIPTS = Path(__file__).parents[1]
_SETTLING_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
_PROBE_PAUSE_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """One way to be slow: what is sent at once, what drips, and how small a buffer a slow reader has."""

    name: str
    opening: str
    drip: str = ""
    reads_slowly: bool = False
    needs_bearer: bool = False
    asks_again: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("header_drip", "GET /health HTTP/1.1\r\nHost: x\r\nX: ", drip="x"),
        Kind(
            "body_drip",
            "POST /inference/m HTTP/1.1\r\nHost: x\r\n{bearer}Content-Length: 200000\r\n\r\n",
            drip=" ",
            needs_bearer=True,
        ),
        Kind("slow_read", f"GET {_LARGE_PUBLIC_PATH} HTTP/1.1\r\nHost: x\r\n\r\n", reads_slowly=True),
        Kind("flood", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n", asks_again=True),
        Kind("flood_refused", "GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n", asks_again=True),
        Kind("half_request", "GET /health HT"),
        Kind("idle", ""),
    )
}


class Attack:
    """Hold so many connections of a kind against a target until stopped."""

    def __init__(self, target: Target, kind: Kind, num_connections: int, opening_seconds: float) -> None:
        """Prepare; `running` begins it, and opens the connections evenly over `opening_seconds`."""
        self.num_open = 0
        """Once all had come; the other two are of the end."""
        self.num_ended = 0
        self.longest_seconds = 0.0
        bearer = f"Authorization: Bearer {target.bearer}\r\n" if kind.needs_bearer else ""
        opening = kind.opening.replace("{bearer}", bearer)
        self._orders = Orders(
            target.port, num_connections, opening_seconds, opening, kind.drip, kind.reads_slowly, kind.asks_again
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open all connections, go on in the background, and close them at the end of the block."""
        environ = {**os.environ, "PYTHONPATH": str(_SCRIPTS)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", edge_attackers.__name__, env=environ, stdin=PIPE, stdout=PIPE
        )
        try:
            await _say(process, json.dumps(dataclasses.asdict(self._orders)))
            await asyncio.sleep(self._orders.opening_seconds + _SETTLING_SECONDS)
            self.num_open = (await _ask_standing(process)).num_open
            yield
            standing = await _ask_standing(process)
            self.num_ended, self.longest_seconds = standing.num_ended, standing.longest_seconds
        finally:
            process.stdin.close()  # type: ignore[union-attr]  # it has a pipe
            await process.wait()


async def _say(process: Process, line: str) -> None:
    process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]  # it has a pipe
    await process.stdin.drain()  # type: ignore[union-attr]


async def _ask_standing(process: Process) -> Standing:
    await _say(process, "")
    if not (line := await process.stdout.readline()):  # type: ignore[union-attr]  # it has a pipe
        raise BenchError("the attackers have ended")
    return Standing(**json.loads(line))


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
