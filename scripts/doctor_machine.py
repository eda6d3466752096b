"""Look at the machine for scripts/doctor: Python, packages, ports, folders, cores. Changes nothing.

Each check returns findings; what they mean together is doctor_checks' matter. Needs the standard library only, because
it runs before .venv exists too. Sources: proc(5) for sockets and their owners, cgroups(7) for the processor quota.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

VENV_BYTES = 2 * 2**30
"""What the pinned packages take on a disk, with the CPU build of torch."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `level`: ok, note, warning, or fault, which would stop a start."""

    check: str
    level: str
    text: str
    advice: str = ""


def check_python(root: Path) -> list[Finding]:
    """Tell the version, and whether .venv is there or can be made."""
    version = ".".join(str(part) for part in sys.version_info[:3])
    findings = [Finding("python", "ok", f"Python {version}")]
    try:
        (root / ".venv" / "bin" / "python").stat()
    except PermissionError:
        advice = f"make {root / '.venv'} yours again, or remove it: scripts/serve makes a new one"
        return [*findings, Finding("venv", "fault", ".venv cannot be entered: Permission denied", advice)]
    except OSError:
        pass
    if _is_program(root / ".venv" / "bin" / "python"):
        return [*findings, Finding("venv", "ok", ".venv is there")]
    if any(importlib.util.find_spec(name) is None for name in ("venv", "ensurepip")):
        advice = "on Debian and Ubuntu: apt-get install python3-venv"
        return [*findings, Finding("venv", "fault", "no .venv, and this Python has no venv or ensurepip", advice)]
    return [*findings, Finding("venv", "note", "no .venv yet", "scripts/serve makes it and installs the packages")]


def check_packages(root: Path, extras: tuple[str, ...]) -> list[Finding]:
    """Compare what is installed in .venv with the pins of pyproject.toml."""
    if not _is_program(root / ".venv" / "bin" / "python"):
        return []
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    pins = list(project["dependencies"])
    for extra in extras:
        pins += project["optional-dependencies"][extra]
    wrong = [problem for pin in pins if (problem := _package_problem(pin))]
    if not wrong:
        return [Finding("packages", "ok", f"{len(pins)} packages are the pinned ones")]
    if not _is_stamped(root, extras):
        return [Finding("packages", "note", "; ".join(wrong), "scripts/serve installs the pinned ones")]
    advice = "remove .venv/.installed and start scripts/serve: it installs them again"
    return [Finding("packages", "fault", "; ".join(wrong), advice)]


def _package_problem(pin: str) -> str:
    match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(.+)", pin)
    if match is None:
        return f"{pin} is no pin"
    name, wanted = match.groups()
    try:
        # A build's own mark, such as +cpu, is no part of the pin (PEP 440, local versions).
        found = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is not installed"
    return "" if found == wanted else f"{name} is {found} and not {wanted}"


def _is_stamped(root: Path, extras: tuple[str, ...]) -> bool:
    """Tell whether scripts/environment takes .venv for complete, so that a start would install nothing."""
    pins = (root / "pyproject.toml").read_bytes() + (root / "scripts" / "constraints.txt").read_bytes()
    digest = hashlib.sha256(pins).hexdigest()
    try:
        lines = (root / ".venv" / ".installed").read_text().splitlines()
    except OSError:
        return False
    stamped = [set(line.split(" ", 1)[-1].split(",")) for line in lines if line.startswith(digest)]
    return bool(stamped) and all(any(extra in installed for installed in stamped) for extra in extras)


def check_port(check: str, host: str, port: int, advice: str) -> list[Finding]:
    """Bind as the service does, and give it back; name the process that has the port, if it can be told."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(1)
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                owner = port_owner(port)
                text = f"{host}:{port} is taken by {owner or 'a process that cannot be seen from here'}"
            return [Finding(check, "fault", text, advice)]
    return [Finding(check, "ok", f"{host}:{port} is free")]


def port_owner(port: int) -> str | None:
    """Return the process that listens on a port as `process ID (name)`, or None if it is another user's."""
    sockets = {name for name, listens_on in _listening_sockets().items() if listens_on == port}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if sockets & {os.readlink(link) for link in (process / "fd").iterdir()}:
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue
    return None


def lock_owner_ports(file: Path) -> list[int]:
    """Return the ports on which the process listens that holds the lock on `file`; none if that cannot be seen."""
    inode = str(file.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        # `1: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END` (proc_locks(5)). The device is not compared:
        # some file systems have another one here than stat(2) tells.
        if words[1] == "FLOCK" and words[3] == "WRITE" and words[5].rpartition(":")[2] == inode:
            try:
                names = {os.readlink(link) for link in Path(f"/proc/{words[4]}/fd").iterdir()}
            except OSError:
                continue
            return sorted({port for name, port in _listening_sockets().items() if name in names})
    return []


def _listening_sockets() -> dict[str, int]:
    """Return the port of every TCP socket that listens, by the name that /proc/PID/fd gives it."""
    ports = {}
    for table in filter(Path.exists, map(Path, ("/proc/net/tcp", "/proc/net/tcp6"))):
        for row in (line.split() for line in table.read_text().splitlines()[1:]):
            # State 0A is LISTEN; column 9 is the socket's inode (proc_net(5)).
            if row[3] == "0A":
                ports[f"socket:[{row[9]}]"] = int(row[1].rpartition(":")[2], 16)
    return ports


def check_folder(check: str, folder: Path, needed_bytes: int, setting: str) -> list[Finding]:
    """Tell whether a folder, or the nearest one above it, can be written to and has room."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        # A file without a name: to ask for rights tells root nothing of a read-only or virtual file system.
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        advice = f"make {place} a folder that you can write to, or set {setting}"
        return [Finding(check, "fault", f"{folder} cannot be written to: {error.strerror}", advice)]
    free = shutil.disk_usage(place).free
    sizes = f"{free / 2**20:.0f} MiB free, {needed_bytes / 2**20:.0f} MiB needed"
    if free < needed_bytes:
        return [Finding(check, "fault", f"{folder}: {sizes}", f"free some space (scripts/clean), or set {setting}")]
    return [Finding(check, "ok", f"{folder}: {sizes}")]


def check_cores(num_threads: int, cgroup: Path = Path("/sys/fs/cgroup")) -> list[Finding]:
    """Compare the engine's threads with the cores that this process may use; 0 threads: torch chooses."""
    num_cores = float(len(os.sched_getaffinity(0)))
    quota = (cgroup / "cpu.max").read_text().split() if (cgroup / "cpu.max").is_file() else ["max", "1"]
    if quota[0] != "max":
        num_cores = min(num_cores, int(quota[0]) / int(quota[1]))
    if num_threads > num_cores:
        advice = "threads that share a core wait for each other: lower INFERENCE_API_TORCH_THREADS, or leave it at 0"
        return [Finding("cores", "warning", f"{num_threads} threads on {num_cores:g} cores", advice)]
    return [Finding("cores", "ok", f"{num_cores:g} cores, {num_threads or 'as many threads as torch chooses'}")]


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except PermissionError:
        return False
