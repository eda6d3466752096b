"""Fill the disk under a running service: the part `faults_disk`.

A file system of one MiB in memory holds all that the service writes: its log, its run folder, its cache, its debug
logs. It is filled to the last byte while clients call. Serving goes on, `/health/ready` warns, and a backend, server or
proxy that dies is started again; with room again the warning goes and the log goes on. Mounting needs root; elsewhere
the part is not run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from campaigns.faults_fronts import PROXY, SERVER, answers
from campaigns.faults_run import Run, checked, is_ready
from campaigns.faults_streams import ECHO, Outcome, join_all, open_witnesses
from campaigns.part import Context
from tests.integration.service import bearer, running_service, wait_for

DISK = "size=1m,mode=700"
NUM_STREAMS = 14
NUM_LETTERS = 60
READY_SECONDS = 5.0
SETTLED_SECONDS = 6.0
"""So long after a start the supervisor writes into the run folder once more."""

WARNING = "Warning: the disk of the run folder is full."


def run(context: Context) -> dict[str, int]:
    """Fill and empty the disk as often as the counts say; return how many streams ran meanwhile."""
    totals = {"disks": 0, "streams": 0}
    for number in range(context.counts["disks"]):
        with _small_disk() as disk:
            if disk is None:
                context.count_not_run("a full disk", "a file system can be mounted by root alone")
                return totals
            _fill(context, disk, totals, f"disk {number}")
    return totals


def _fill(context: Context, disk: Path, totals: dict[str, int], name: str) -> None:
    """Run a service whose files are all on the disk, and take the room away under it."""
    settings: dict[str, Any] = {
        "INFERENCE_API_LOG_LEVEL": "info",
        "BACKEND_DEBUG_MODE": "1",
        "FRONTEND_DEBUG_MODE": "1",
        **ECHO,
    }
    with running_service(proxy=True, parent=disk, **settings) as service:
        this = Run(context, service, totals)
        filler = disk / "filler"
        _take_all_room(filler)
        began = time.monotonic()
        _count_streams(this, f"{name}, full")
        told = service.get("/health/ready").text
        context.count(f"{name}: readiness warns", None if WARNING in told else f"it says {told!r}")
        os.kill(service.backend_pid, signal.SIGKILL)
        with checked(context, f"{name}: another backend"):
            wait_for(lambda: not is_ready(service), READY_SECONDS, "readiness red")
            wait_for(lambda: is_ready(service), READY_SECONDS, "ready again")
        _count_streams(this, f"{name}, with another backend")
        for front in (PROXY, SERVER):
            _kill_front(this, name, front)
        time.sleep(max(0.0, began + SETTLED_SECONDS - time.monotonic()))
        status = service.process.poll()
        context.count(f"{name}: the supervisor lives", None if status is None else f"it ended with {status}")
        filler.unlink()
        size = service.log.stat().st_size
        _count_streams(this, f"{name}, with room again")
        told = service.get("/health/ready").text
        context.count(f"{name}: the warning is gone", None if told == "OK\n" else f"it says {told!r}")
        grown = service.log.stat().st_size - size
        context.count(f"{name}: the log goes on", None if grown > 0 else f"it grew by {grown} bytes")
        status = service.stop(signal.SIGTERM)
        context.count(f"{name}: it ends with 0", None if status == 0 else f"it ended with {status}")
    totals["disks"] += 1
    context.log(f"{name}: done")


def _kill_front(run: Run, name: str, front: str) -> None:
    """End a front with SIGKILL: another one must start though it cannot write a line."""
    killed = run.service.arbiter_pid(front)
    os.kill(killed, signal.SIGKILL)
    with checked(run.context, f"{name}: another {front}"):
        wait_for(lambda: killed not in run.service.pids_of(front), READY_SECONDS, "its end")
        wait_for(lambda: is_ready(run.service) and answers(run), READY_SECONDS, "an answer")


def _count_streams(run: Run, name: str) -> None:
    witnesses = open_witnesses(run.port, run.random(name), NUM_STREAMS, NUM_LETTERS, bearer())
    join_all(witnesses)
    for witness in witnesses:
        fault = witness.fault() or (None if witness.outcome is Outcome.WHOLE else f"{witness.surface}: not whole")
        run.context.count(f"{name}: stream", fault)
    run.totals["streams"] += len(witnesses)


def _take_all_room(filler: Path) -> None:
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for size in (65536, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, b"\0" * size)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _small_disk() -> Iterator[Path | None]:
    """Mount a file system of one MiB for the block; None where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
