"""Start the real service for a test: supervisor, backend with the mock engine, gunicorn, and the proxy if asked.

A test uses `running_service` as a context manager; it takes free ports and a run folder of its own, and leaving it
proves that every process has ended and no lock or socket is left, however the service was stopped. Processes are found
by the run folder in their environment, so that an orphan is found too. Knows nothing of HTTP beyond a URL; what needs
bytes, times and FINs is in raw_http.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jwt
import requests

ROOT = Path(__file__).resolve().parent.parent.parent
SECRET = "a-secret-for-tests-of-at-least-32-bytes"
START_SECONDS = {True: 60.0, False: 120.0}
"""Longest wait for the ready card, with the mock and with the real model."""

_OWN_PORTS = 10_000, 32_768
"""Below Linux's ephemeral ports: another process's client would take one of those (ip(7), ip_local_port_range)."""

SLOW_START: dict[str, Any] = {"INFERENCE_API_ROWS": "2", "INFERENCE_API_PREFILL_CHUNK_TOKENS": "512"}
"""For a service of a slow rate: the fewer rows and chunk sizes, the shorter its warm-up at that rate."""

Result = TypeVar("Result")


def bearer(tenant: str = "alpha", scope: str = "inference") -> dict[str, str]:
    """Return the header of a bearer of `tenant`."""
    claims = {"team_id": tenant, "token_id": f"{tenant}-1", "scope": scope}
    return {"Authorization": f"Bearer {jwt.encode(claims, SECRET, 'HS256')}"}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    return free_ports(1)[0]


def free_ports(number: int) -> list[int]:
    """Return different ports that were free a moment ago, of those that the kernel gives to nobody who asks for any."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        while len(ports) < number:
            port = random.randrange(*_OWN_PORTS)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


def command_line(pid: int) -> str:
    """Return a process's command line, blank-separated; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, user and system (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds (proc_pid_statm(5), field 2)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Service:
    """A running service, as its clients and its operator see it."""

    process: subprocess.Popen[bytes]
    port: int
    proxy_port: int | None
    run_dir: Path
    log: Path
    leaves_run_dir: bool = False
    """Set by a test that kills the supervisor outright: nobody is left then to remove the run folder."""

    @property
    def url(self) -> str:
        """Address of the server behind the proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def proxy_url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.proxy_port}"

    @property
    def backend_pid(self) -> int:
        """Id of the decode backend."""
        return self.pids_of("inference_api.backend.main")[0]

    @property
    def worker_pids(self) -> list[int]:
        """Ids of the gunicorn workers: the children of its arbiter."""
        return self.forked_pids_of("gunicorn")

    def forked_pids_of(self, part: str) -> list[int]:
        """Return the ids of the processes of `part` whose parent is one of them too: an arbiter's workers."""
        pids = self.pids_of(part)
        return [pid for pid in pids if _parent_of(pid) in pids]

    def arbiter_pid(self, part: str) -> int:
        """Return the id of the process of `part` that the others of it are children of."""
        pids = self.pids_of(part)
        return next(pid for pid in pids if _parent_of(pid) not in pids)

    def pids(self) -> list[int]:
        """Return the ids of every living process of this service, orphans included."""
        needle = f"INFERENCE_API_RUN_DIR={self.run_dir}\0".encode()
        return [pid for pid in _all_pids() if needle in _environ_of(pid)]

    def pids_of(self, part: str) -> list[int]:
        """Return the ids of the service's processes whose command line holds `part`."""
        return [pid for pid in self.pids() if part in command_line(pid)]

    def post(self, path: str, body: object, **options: Any) -> requests.Response:
        """POST a JSON body to the server."""
        return requests.post(self.url + path, json=body, timeout=60, **options)

    def ask(self, path: str, body: object, **options: Any) -> str:
        """POST a JSON body and return the answer's text; raise AssertionError for any status but 200."""
        answer = self.post(path, body, **options)
        assert answer.status_code == 200, answer.text
        return answer.content.decode()

    def get(self, path: str, **options: Any) -> requests.Response:
        """GET from the server."""
        return requests.get(self.url + path, timeout=30, **options)

    def is_healthy(self) -> bool:
        """Tell whether /health says 200; False while nobody listens."""
        try:
            return self.get("/health").status_code == 200
        except OSError:
            return False

    def rows(self) -> dict[str, Any]:
        """Return the answer of /rows."""
        answer: dict[str, Any] = self.get("/rows").json()
        return answer

    def num_rows_in_use(self) -> int:
        """Return the number of rows that decode or prefill now."""
        return int(self.rows()["num_rows_in_use"])

    def view(self, request_id: str) -> dict[str, Any]:
        """Return what GET /v1/requests/<id> says."""
        answer: dict[str, Any] = self.get(f"/v1/requests/{request_id}").json()
        return answer

    def metric(self, name: str) -> float:
        """Return one sample of /metrics, its labels in the name."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_seconds: float = 30.0) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_seconds)


def wait_for(condition: Callable[[], object], timeout_seconds: float, what: str) -> float:
    """Wait until `condition()` is true; return the seconds it took. For states that another process reaches."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_seconds, f"{what}: not within {timeout_seconds} s"
        time.sleep(0.005)
    return time.monotonic() - began


@contextlib.contextmanager
def running_service(
    *arguments: str,
    proxy: bool = False,
    wait: bool = True,
    mock: bool = True,
    parent: Path | None = None,
    **environ: str,
) -> Iterator[Service]:
    """Run `python -m inference_api.supervisor` with the mock engine until the block ends.

    All that it writes, its log too, is in a folder in `parent`, by default that of temporary files.
    """
    command = [sys.executable, "-m", "inference_api.supervisor", *arguments]
    command += ["--mock"] if mock else []
    proxy_port = None
    if proxy:
        port, proxy_port = free_ports(2)
        command += ["--proxy-port", str(proxy_port)]
        environ = {"INFERENCE_API_PORT": str(port), **environ}
    with running_command(command, environ, own_cache=mock, parent=parent) as service:
        service.proxy_port = proxy_port
        if wait:
            limit = START_SECONDS[mock]
            log, process = service.log, service.process
            wait_for(lambda: "Ready http" in log.read_text() or process.poll() is not None, limit, "ready card")
            assert process.poll() is None, log.read_text()
        yield service


@contextlib.contextmanager
def running_command(
    command: Sequence[str], environ: Mapping[str, str], *, own_cache: bool = True, parent: Path | None = None
) -> Iterator[Service]:
    """Run any program that makes up a service, with settings of its own; end it and look for what it left behind."""
    with tempfile.TemporaryDirectory(prefix="ia-", dir=parent) as folder:
        port = int(environ.get("INFERENCE_API_PORT") or free_port())
        settings: Mapping[str, str] = {
            "INFERENCE_API_PORT": str(port),
            "INFERENCE_API_RUN_DIR": f"{folder}/run",
            "INFERENCE_API_INSECURE_DEV": "1",
            **({"INFERENCE_API_CACHE_DIR": f"{folder}/cache"} if own_cache else {}),
            "JWT_SECRET": SECRET,
            **environ,
        }
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=out, stderr=out)
        service = Service(process, port, None, Path(folder) / "run", log)
        try:
            yield service
        finally:
            _end(service)
        assert service.run_dir.exists() == service.leaves_run_dir, "the run folder was left behind, or removed"


def _end(service: Service) -> None:
    """Stop the service if it runs; raise AssertionError if it does not end or left a process behind."""
    if service.process.poll() is None:
        service.process.send_signal(signal.SIGINT)
    try:
        service.process.wait(30)
        wait_for(lambda: not service.pids(), 15.0, "end of every process")
    except (subprocess.TimeoutExpired, AssertionError) as error:
        left = {pid: command_line(pid) for pid in service.pids()}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        service.process.wait(10)
        raise AssertionError(f"processes left behind: {left}\n{service.log.read_text()}") from error


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ_of(pid: int) -> bytes:
    """Return a process's environment as it was started; empty for one that has ended, a zombie included."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def new_request_id() -> str:
    """Return a public request id, as the proxy makes them: a caller who knows it can follow the request."""
    return f"req_{secrets.token_hex(16)}"


def in_parallel(functions: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run functions in a thread each; return their results in order, raising the first error."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]
