"""Start the real service for a test: supervisor, backend with the mock engine, gunicorn, and the proxy if asked.

A test uses it as a context manager; it takes free ports and a run folder of its own, and leaving it proves that every
process has ended and no socket or lock is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

ROOT = Path(__file__).resolve().parent.parent.parent
SECRET = "a-secret-for-tests-of-at-least-32-bytes"


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants that live now."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += process_tree(int(child))
    return found


def command_line(pid: int) -> str:
    """Return a process's command line, blank-separated; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@dataclass
class Service:
    """A running service, as its clients and its operator see it."""

    process: subprocess.Popen[bytes]
    port: int
    proxy_port: int | None
    run_dir: Path
    log: Path
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def url(self) -> str:
        """Address of the server behind the proxy."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def proxy_url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self.proxy_port}"

    def pid_of(self, part: str) -> int:
        """Return the id of the process whose command line holds `part`."""
        for pid in process_tree(self.process.pid):
            if part in command_line(pid):
                return pid
        raise AssertionError(f"no process of the service runs {part}: {self.log.read_text()}")

    @property
    def backend_pid(self) -> int:
        """Id of the decode backend."""
        return self.pid_of("inference_api.backend.main")

    def post(self, path: str, body: object, **options: Any) -> requests.Response:
        """POST a JSON body to the server."""
        return self.session.post(self.url + path, json=body, timeout=60, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        """GET from the server."""
        return self.session.get(self.url + path, timeout=30, **options)

    def rows(self) -> dict[str, Any]:
        """Return the answer of /rows."""
        answer: dict[str, Any] = self.get("/rows").json()
        return answer

    def metric(self, name: str) -> float:
        """Return one sample of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"/metrics has no {name}")

    def stop(self, number: signal.Signals = signal.SIGINT, timeout_seconds: float = 10.0) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_seconds)


def wait_for(condition: Any, timeout_seconds: float, what: str) -> float:
    """Wait until `condition()` is true; return the seconds it took. For states that another process reaches."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_seconds, f"{what}: not within {timeout_seconds} s"
        time.sleep(0.005)
    return time.monotonic() - began


@contextlib.contextmanager
def running_service(
    *arguments: str, proxy: bool = False, wait: bool = True, mock: bool = True, **environ: str
) -> Iterator[Service]:
    """Run `python -m inference_api.supervisor` with the mock engine until the block ends."""
    with tempfile.TemporaryDirectory(prefix="ia-") as folder:
        port, proxy_port = free_port(), free_port() if proxy else None
        settings: Mapping[str, str] = {
            "INFERENCE_API_PORT": str(port),
            "INFERENCE_API_RUN_DIR": f"{folder}/run",
            "INFERENCE_API_INSECURE_DEV": "1",
            **({"INFERENCE_API_CACHE_DIR": f"{folder}/cache"} if mock else {}),
            "JWT_SECRET": SECRET,
            **environ,
        }
        command = [sys.executable, "-m", "inference_api.supervisor", *arguments]
        command += ["--mock"] if mock else []
        command += ["--proxy-port", str(proxy_port)] if proxy else []
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **settings}, stdout=out, stderr=out)
        service = Service(process, port, proxy_port, Path(folder) / "run", log)
        try:
            if wait:
                limit = 20.0 if mock else 120.0
                wait_for(lambda: "Ready http" in log.read_text() or process.poll() is not None, limit, "ready card")
                assert process.poll() is None, log.read_text()
            yield service
            tree = process_tree(process.pid) if process.poll() is None else []
        finally:
            service.session.close()
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                for pid in reversed(process_tree(process.pid)):
                    os.kill(pid, signal.SIGKILL)
                process.wait(10)
                raise AssertionError(f"the service did not end:\n{log.read_text()}") from None
        left = [pid for pid in tree if "inference_api" in command_line(pid) or "gunicorn" in command_line(pid)]
        assert not left, f"processes left behind: {[command_line(pid) for pid in left]}"
        assert not (Path(folder) / "run").exists(), "the run folder was left behind"


class RawStream:
    """A streaming POST over a plain socket, for tests that need to see bytes, times and FINs."""

    def __init__(self, port: int, path: str, body: object, headers: Mapping[str, str] | None = None) -> None:
        """Connect and send the request."""
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=60)
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        self.sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def read_until(self, needle: bytes) -> bytes:
        """Read until `needle` has come, or to the end of file; return everything read."""
        data = b""
        while needle not in data:
            part = self.sock.recv(65536)
            if not part:
                break
            data += part
        return data

    def close(self) -> None:
        """Close the socket: the server sees FIN."""
        self.sock.close()


def in_parallel(functions: list[Any]) -> list[Any]:
    """Run functions in a thread each; return their results in order, raising the first error."""
    results: list[Any] = [None] * len(functions)
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
    return results
