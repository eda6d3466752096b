"""Start what a bench measures, as child processes: the whole service, or any WSGI application under its settings.

Each service gets free ports, a run folder of its own and a random secret, and is ended with the block that started it.
Processor time comes from /proc. Knows nothing of what is asked of a service.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jwt

from benches.figures import ROOT
from inference_api.config import SWITCHES, Settings

POLL_SECONDS = 0.02
STOP_SECONDS = 15.0
BEARER_SECONDS = 7200


class BenchError(Exception):
    """End a bench: what was measured is not what was meant to be measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and as whom: a port on loopback and the bearer's header, if there is one."""

    port: int
    bearer: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that every request to this target carries."""
        return {"Authorization": f"Bearer {self.bearer}"} if self.bearer else {}

    def get_json(self, path: str) -> dict[str, object]:
        """GET a JSON object (blocking); raise BenchError for any status but 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=self.headers)
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != 200:
            raise BenchError(f"GET {path} was answered {answer.status}")
        value: dict[str, object] = json.loads(body)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """A running service: the server itself, the proxy in front of it, and its processes by role."""

    direct: Target
    proxied: Target
    pids: Mapping[str, int]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor time that each process has used so far."""
        return {role: cpu_seconds(pid) for role, pid in self.pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, all threads (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port(*, other_than: int = 0) -> int:
    """Return a port of loopback that was free a moment ago; of two that are asked for in turn, the second another."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        if port != other_than:
            return port


@contextlib.contextmanager
def running_service(
    settings: Mapping[str, str], *, mock: bool = True, start_seconds: float = 180.0
) -> Iterator[Service]:
    """Run supervisor, backend, server and proxy until the block ends. Raises BenchError if they do not come up."""
    secret = secrets.token_hex(32)
    direct = Target(free_port())
    proxy_port = free_port(other_than=direct.port)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        environ = {
            **service_environ({}),
            "INFERENCE_API_PORT": str(direct.port),
            "INFERENCE_API_RUN_DIR": f"{folder}/run",
            "INFERENCE_API_INSECURE_DEV": "1",
            "JWT_SECRET": secret,
            "PROXY_REQUESTS_PER_MINUTE": "0",
            **({"INFERENCE_API_CACHE_DIR": f"{folder}/cache"} if mock else {}),
            **settings,
        }
        command = ["-m", "inference_api.supervisor", "--proxy-port", str(proxy_port), *(["--mock"] if mock else [])]
        with _running(command, environ, Path(folder) / "log") as process:
            _wait_until_healthy(process, proxy_port, Path(folder) / "log", start_seconds)
            yield Service(direct, Target(proxy_port, make_bearer(environ["JWT_SECRET"])), _pids_by_role(process.pid))


@contextlib.contextmanager
def running_wsgi(application: str, settings: Mapping[str, str]) -> Iterator[Target]:
    """Run a WSGI application under the service's own gunicorn settings until the block ends."""
    target = Target(free_port())
    environ = service_environ({"INFERENCE_API_PORT": str(target.port), **settings})
    command = ["-m", "gunicorn", "--config", "python:inference_api.server.gunicorn_settings", application]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "log"
        with _running(command, environ, log) as process:
            _wait_until_healthy(process, target.port, log, start_seconds=30.0)
            yield target


def make_bearer(secret: str, tenant: str = "bench") -> str:
    """Return a bearer of a tenant."""
    now = int(time.time())
    claims = {"team_id": tenant, "token_id": f"{tenant}-1", "iat": now, "exp": now + BEARER_SECONDS}
    bearer: str = jwt.encode(claims, secret, algorithm="HS256")
    return bearer


def service_environ(settings: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of what is measured: `settings`, and of the caller's own only where the model is.

    Whatever else a service reads is left out, under every name it has: a bench says what it runs.
    """
    names = {field.name: set(field.metadata["names"]) for field in dataclasses.fields(Settings)}
    kept = set().union(*(names[field] for field in ("model", "cache_dir", "hf_cache")))
    dropped = set().union(*names.values(), (name for name, _, _ in SWITCHES)) - kept
    inherited = {
        name: text
        for name, text in environ.items()
        if name in kept or not (name in dropped or name.startswith(("INFERENCE_API_", "PROXY_", "JWT_", "REDIS_")))
    }
    return {**inherited, **settings}


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command line of a Python program that the kernel ends with this process, however that is killed.

    `command` is what follows `python`. Start it in a process group of its own: Ctrl-C is the bench's alone to handle.
    """
    return [sys.executable, "-m", "inference_api.child", str(os.getpid()), sys.executable, *command]


@contextlib.contextmanager
def _running(command: Sequence[str], environ: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            ending_with_this_process(command), cwd=ROOT, env=environ, stdout=out, stderr=out, process_group=0
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path, start_seconds: float) -> None:
    """Ask /health until it answers 200; the proxy forwards it, so one answer means that all of them serve."""
    deadline = time.monotonic() + start_seconds
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, BenchError, ValueError):
            if _is_healthy(port):
                return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"the service did not come up within {start_seconds:g} s:\n{log.read_text()}")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200


def _pids_by_role(supervisor: int) -> dict[str, int]:
    """Find the backend and the workers of the server and the proxy: each of these two is a child of its arbiter."""
    roles = {"backend": "inference_api.backend.main", "server": "gunicorn_settings", "proxy": "proxy.proxy"}
    pids = {}
    for pid in _children(supervisor):
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        for role, part in roles.items():
            if part in command:
                pids[role] = pid if role == "backend" else _children(pid)[0]
    missing = roles.keys() - pids.keys()
    if missing:
        raise BenchError(f"no process is the {', '.join(sorted(missing))}")
    return pids


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return found
