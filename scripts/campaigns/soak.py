"""Keep the service busy and look whether anything of it grows: the part `soak`.

Streams of every surface, good calls and bad ones, and clients that leave, from clients that never pause. Meanwhile the
memory of every process is read from /proc; its descriptors and threads, and the service's rows, are compared between
two quiet moments. A process that keeps a few bytes of every call runs beside them, is measured as they are, and must be
flagged: else nothing that was found means anything. Through the proxy, on the mock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.faults_run import Run
from campaigns.faults_streams import ECHO, SURFACES, Outcome, Witness, draw_prompt
from campaigns.part import Context
from campaigns.soak_trend import Sample, fault_of_growth, growth_bytes
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, command_line, resident_bytes, running_service, wait_for

NUM_CLIENTS = 8
NUM_LETTERS = 12
TOKENS_PER_SECOND = "20000"
WARM_SHARE = 0.4
"""Of the time: by then caches and pools have their size."""

SAMPLE_SECONDS = 0.5
QUIET_SECONDS = 15.0
BURST_SECONDS = 3.0
SPARE = 5
"""Descriptors and threads that a process may have more of than before."""

LEAK = """
import os, sys
kept = []
while data := os.read(0, 65536):
    kept += [os.urandom(int(sys.argv[1])) for _ in data]
"""
"""The planted leak: it is told of each call by a byte, and keeps so many bytes of it."""

LEAK_BYTES = 64
LONG_SECONDS = 1800
SHORT_LEAK_BYTES = 12800
"""What the leak keeps of each call where there are too few of them for LEAK_BYTES to show."""

LEAKING = "the planted leak"


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the processes of a service hold besides memory, by process."""

    descriptors: dict[str, int]
    threads: dict[str, int]


class Load:
    """Clients that call without a pause until they are stopped."""

    def __init__(self, run: Run, leak: subprocess.Popen[bytes]) -> None:
        """Start them; each call that has ended is told to the leak."""
        self.num_calls = 0
        self.faults: list[str] = []
        self._run = run
        self._leak = leak
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._call_on, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the calls under way end."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _call_on(self, number: int) -> None:
        rng = self._run.random(f"client {number}")
        while not self._stopped.is_set():
            fault = _call(self._run.port, rng)
            with self._lock:
                self.num_calls += 1
                self.faults += [fault] if fault else []
                os.write(self._leak.stdin.fileno(), b".")  # type: ignore[union-attr]  # it has a pipe


def run(context: Context) -> dict[str, int]:
    """Call for as many seconds as the counts say; return how many calls there were, and how much memory grew."""
    settings: dict[str, Any] = {**ECHO, "INFERENCE_API_MOCK_TOKENS_PER_SECOND": TOKENS_PER_SECOND}
    with running_service(proxy=True, **settings) as service:
        this = Run(context, service, {"calls": 0})
        processes = _processes(service)
        with _planted_leak(LEAK_BYTES if context.counts["seconds"] >= LONG_SECONDS else SHORT_LEAK_BYTES) as leak:
            _load(this, leak, BURST_SECONDS)
            before = _wait_quiet(this, processes)
            samples = _load(this, leak, context.counts["seconds"], {**processes, LEAKING: leak.pid})
        _judge(this, samples)
        after = _wait_quiet(this, processes, before)
        for name in processes:
            for what in ("descriptors", "threads"):
                had, has = getattr(before, what)[name], getattr(after, what)[name]
                context.count(f"{name}: {what}", f"{has} after {had}" if has > had + SPARE else None)
    return this.totals


def _load(
    run: Run, leak: subprocess.Popen[bytes], seconds: float, processes: dict[str, int] | None = None
) -> dict[str, list[Sample]]:
    """Keep all clients calling; return the samples of each process once it is warm. A wrong answer fails a check."""
    samples: dict[str, list[Sample]] = {name: [] for name in processes or ()}
    load, began = Load(run, leak), time.monotonic()
    try:
        while (now := time.monotonic() - began) < seconds:
            if now > WARM_SHARE * seconds:
                for name, pid in (processes or {}).items():
                    samples[name].append(Sample(now, resident_bytes(pid)))
            time.sleep(SAMPLE_SECONDS)
    finally:
        load.stop()
    run.totals["calls"] += load.num_calls
    faults = load.faults
    run.context.count(f"{load.num_calls} calls", f"{len(faults)} failed, such as {faults[0]}" if faults else None)
    return samples


def _judge(run: Run, samples: dict[str, list[Sample]]) -> None:
    """Count one check for each process: the service's must not have grown, and the planted leak must."""
    for name, found in samples.items():
        fault = fault_of_growth(found)
        grown = growth_bytes(found)
        run.context.log(f"{name}: {found[-1].resident_bytes / (1 << 20):.1f} MiB, grew by {grown / 1024:.0f} KiB")
        run.totals[f"{name.replace(' ', '_')}_kib"] = round(grown / 1024)
        if name == LEAKING:
            fault = None if fault else f"it was not found: {grown:.0f} bytes"
        run.context.count(f"{name}: memory", fault)


def _call(port: int, rng: random.Random) -> str | None:
    """Make one call of a kind drawn at random; return what was wrong with it."""
    kind = rng.random()
    surface = rng.choice(list(SURFACES))
    prompt = draw_prompt(rng, NUM_LETTERS)
    if kind < 0.1:
        return _leave(port, surface, prompt, rng)
    if kind < 0.2:
        return _refused(port, surface, rng)
    witness = Witness(port, surface, prompt, bearer())
    witness.join()
    return witness.fault() or (None if witness.outcome is Outcome.WHOLE else f"{surface}: {witness.outcome.value}")


def _leave(port: int, surface: str, prompt: str, rng: random.Random) -> str | None:
    with RawStream(port, SURFACES[surface].path, SURFACES[surface].body(prompt, 2000), bearer()) as stream:
        if rng.random() < 0.5:
            stream.read_chunk()
        if rng.random() < 0.5:
            stream.reset()
    return None


def _refused(port: int, surface: str, rng: random.Random) -> str | None:
    """Send a call that has to be refused: without a bearer, or with a member of a wrong type."""
    is_anonymous = rng.random() < 0.5
    body = SURFACES[surface].body("x", 5)
    headers = {} if is_anonymous else bearer()
    with RawStream(port, SURFACES[surface].path, body if is_anonymous else {**body, "wrong": [1]}, headers) as stream:
        expected = (401,) if is_anonymous else (400, 422)
        status = stream.status
        stream.read_all()
    return None if status in expected else f"{surface}: status {status}"


def _processes(service: Service) -> dict[str, int]:
    """Return the processes of the service by what they do."""
    found: dict[str, int] = {}
    parts = {
        "backend": "backend.main",
        "server": "gunicorn_settings",
        "proxy": "proxy.proxy",
        "supervisor": "supervisor",
    }
    for pid in sorted(service.pids()):
        name = next((name for name, part in parts.items() if part in command_line(pid)), "process")
        found[name if name not in found else f"{name} worker"] = pid
    return found


def _wait_quiet(run: Run, processes: dict[str, int], before: Held | None = None) -> Held:
    """Wait until nothing runs, and descriptors are as few as `before`; return what is held then."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: run.service.num_rows_in_use() == 0, QUIET_SECONDS, "free rows")
        if before is not None:
            wait_for(lambda: not _more(_held(processes), before), QUIET_SECONDS, "descriptors")
    rows = run.service.rows()
    left = {name: rows[name] for name in ("num_rows_in_use", "num_waiting") if rows[name]}
    run.context.count("rows and queue are empty", f"{left}" if left else None)
    return _held(processes)


def _more(now: Held, before: Held) -> bool:
    return any(number > before.descriptors[name] + SPARE for name, number in now.descriptors.items())


def _held(processes: dict[str, int]) -> Held:
    descriptors = {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in processes.items()}
    return Held(descriptors, {name: len(os.listdir(f"/proc/{pid}/task")) for name, pid in processes.items()})


@contextlib.contextmanager
def _planted_leak(bytes_a_call: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", LEAK, str(bytes_a_call)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parent) as leak:
        yield leak
        leak.stdin.close()  # type: ignore[union-attr]  # it has a pipe
