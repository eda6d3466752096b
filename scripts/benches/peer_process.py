"""Own a contender's processes: start, wait until it answers, hold still and let go on, weigh, end.

A contender's tree ends with the bench: its first process through the parent-death signal, the rest by id when its block
ends. What is held still (SIGSTOP) takes no processor time from whose turn it is. Knows nothing of models or requests.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benches.figures import ROOT
from benches.service import POLL_SECONDS, STOP_SECONDS, BenchError, service_environ

LAST_LINES = 5
"""So many lines of a log stand in the reason why a contender did not come up."""


@contextlib.contextmanager
def running_tree(
    command: Sequence[str], log: Path, environ: Mapping[str, str], *, piped: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a command and whatever it starts until the block ends, with nothing in its environment but `environ`.

    stderr goes to `log`, and stdout too unless it is `piped`, as stdin then is.
    """
    pipe = subprocess.PIPE if piped else None
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "inference_api.child", str(os.getpid()), *command],
            cwd=ROOT,
            env=dict(environ),
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or out,
            stderr=out,
            text=True,
            process_group=0,
        )
    try:
        yield process
    finally:
        _end(process)


def peer_environ(settings: Mapping[str, str]) -> dict[str, str]:
    """Return a peer's environment: `settings` over the caller's own, without the service's.

    How a peer's threads wait is left to the peer: nobody else runs in its turn, and the passive waiting that the
    service chooses makes llama.cpp three times slower at one user.
    """
    environ = service_environ(settings)
    environ.pop("OMP_WAIT_POLICY", None)
    return environ


def _end(process: subprocess.Popen[str]) -> None:
    pids = tree(process.pid)
    let_go_on(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=STOP_SECONDS)
    process.kill()
    process.wait()
    for pid in pids[1:]:
        _signal(pid, signal.SIGKILL)


def wait_until_ready(process: subprocess.Popen[str], port: int, log: Path, start_seconds: float) -> None:
    """Ask /health until it answers 200; raise BenchError with the log's end if it never does."""
    deadline = time.monotonic() + start_seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"not up within {start_seconds:g} s: {last_lines(log)}")


def last_lines(log: Path) -> str:
    """Return the end of a log in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:]) or "its log is empty"


def tree(pid: int) -> list[int]:
    """Return a process and all that descends from it, parents first (proc(5), task/<tid>/children)."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def hold_still(pid: int) -> None:
    """Stop every process of a tree until `let_go_on`."""
    for member in tree(pid):
        _signal(member, signal.SIGSTOP)


def let_go_on(pid: int) -> None:
    """Undo `hold_still`."""
    for member in tree(pid):
        _signal(member, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def memory_mib(pid: int) -> float:
    """Return what a tree holds in memory, pages that processes share counted once (proc(5), smaps_rollup, Pss)."""
    kib = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
    return round(kib / 1024, 1)


def busy_seconds() -> float:
    """Return the processor time that the whole machine has spent on programs so far (proc(5), /proc/stat)."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def tree_seconds(pid: int) -> float:
    """Return the processor time that the living processes of a tree have used (proc_pid_stat(5), fields 14 and 15)."""
    ticks = 0
    for member in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
