"""Run the programs and the documented snippets of real clients against a service, and read what they say.

A program gets an environment of its own: an empty home, the service's address, and a proxy for everything outside that
answers nobody and remembers who called. Blocks until a program has ended. Knows no client's library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benches.figures import ROOT

from campaigns.client_table import Client
from campaigns.part import ServiceUnderTest

PAGE = ROOT / "docs" / "clients.md"
PAGE_ADDRESS = "127.0.0.1:1223"
"""Where the snippets of the page find the service."""

PROGRAMS = Path(__file__).parent / "clients"

PROGRAM_SECONDS = 300.0
"""Longest run of one program; on the real model most of it is the model's time."""

QUIET: Mapping[str, str] = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""What keeps clients from calling home, as their documents say."""

_PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One check of a program, or one run of a snippet; `fault` is None if it passed."""

    check: str
    fault: str | None


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a client runs: the interpreter of its environment, and the folder with its packages."""

    interpreter: str
    environment: Path

    def command(self, program: str, folder: Path) -> list[str]:
        """Return the command line of a program of `clients/`; Node's is copied to where it finds its packages."""
        if not program.endswith(".mjs"):
            return [self.interpreter, "-m", f"campaigns.clients.{program}"]
        for source in PROGRAMS.glob("*.mjs"):
            shutil.copy(source, folder)
        return [self.interpreter, str(folder / program)]


def run_program(client: Client, place: Place, service: ServiceUnderTest, left_out: Sequence[str]) -> list[Finding]:
    """Run a client's program to its end, and return what its checks came to, and whether it called outside."""
    with _folder(place) as folder, _outside() as outside:
        environ = {
            **_environ(place, folder, outside),
            "BASE_URL": service.url,
            "TOKEN": service.jwt,
            "MODEL": service.model,
        }
        done = _run([*place.command(client.program, folder), *left_out], environ, folder)
        findings = [Finding(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not findings:
            findings.append(Finding("end", f"status {done.returncode}: {_last_line(done.stderr)}"))
        findings.append(Finding("nothing sent outside", _caller(outside)))
    return findings


def run_snippet(mark: str, place: Place, service: ServiceUnderTest) -> Finding:
    """Run a snippet of docs/clients.md as it stands there, but for the address, and return whether it answered."""
    try:
        language, text = read_snippet(mark, PAGE.read_text("utf-8"))
    except LookupError as error:
        return Finding(f"snippet {mark}", str(error))
    program = text.replace(PAGE_ADDRESS, service.url.removeprefix("http://"))
    with _folder(place) as folder, _outside() as outside:
        environ = {**_environ(place, folder, outside), "AUTHORIZATION": f"Bearer {service.jwt}"}
        if language == "js":
            (folder / "snippet.mjs").write_text(program)
        commands = {
            "python": [place.interpreter, "-c", program],
            "sh": ["bash", "-euo", "pipefail", "-c", program],
            "js": [place.interpreter, "snippet.mjs"],
        }
        done = _run(commands[language], environ, folder)
        fault = f"status {done.returncode}: {_last_line(done.stderr)}" if done.returncode else _caller(outside)
    return Finding(f"snippet {mark}", fault or (None if done.stdout.strip() else "it printed nothing"))


def read_snippet(mark: str, page: str) -> tuple[str, str]:
    """Return the language and the text of the one snippet under `<!-- run: MARK -->`; raise LookupError if not one."""
    found = re.findall(rf"<!-- run: {re.escape(mark)} -->\n```(python|sh|js)\n(.*?)```", page, re.DOTALL)
    if len(found) != 1:
        raise LookupError(f"docs/clients.md has {len(found)} snippets under the mark {mark}")
    language, text = found[0]
    return language, text


@contextlib.contextmanager
def _folder(place: Place) -> Iterator[Path]:
    """Yield a folder to run in, which is the program's home too."""
    with tempfile.TemporaryDirectory(prefix="client-") as name:
        folder = Path(name)
        if (place.environment / "node_modules").is_dir():
            (folder / "node_modules").symlink_to(place.environment / "node_modules")
        yield folder


@contextlib.contextmanager
def _outside() -> Iterator[socket.socket]:
    """Yield a listener that a program takes for its way to the outside."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener


def _caller(outside: socket.socket) -> str | None:
    """Return what the first caller of the listener asked for; None if nobody has called."""
    try:
        connection, _ = outside.accept()
    except BlockingIOError:
        return None
    with connection:
        connection.settimeout(1.0)
        with contextlib.suppress(OSError):
            return f"it asked for {connection.recv(200).decode('latin-1').splitlines()[:1]}"
    return "it opened a connection to the outside"


def _environ(place: Place, folder: Path, outside: socket.socket) -> dict[str, str]:
    proxy = f"http://127.0.0.1:{outside.getsockname()[1]}"
    return {
        "PATH": f"{Path(place.interpreter).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": str(PROGRAMS.parents[1]),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        **dict.fromkeys(_PROXY_NAMES, proxy),
        **QUIET,
    }


def _run(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROGRAM_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        return subprocess.CompletedProcess(command, -1, said, f"not done within {PROGRAM_SECONDS:g} s")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "nothing on stderr"
