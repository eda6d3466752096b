"""Make the environments of programs that do not belong into .venv, each from a list of exact pins in `pins/`.

`<folder>/<name>-<digest of the pins>` is one, so that a changed pin makes another; a stamp in it says that it is whole,
and two runs at once wait for each other. Blocks for pip or npm. Knows nothing of what runs in an environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from campaigns.part import CampaignError

PINS = Path(__file__).parent / "pins"
STAMP = ".installed"
MIN_NODE_MAJOR = 20
"""The oldest Node that the pinned JavaScript packages run on."""

_DIGEST_CHARACTERS = 12


def make_python_environment(name: str, folder: Path) -> Path:
    """Return the Python of an environment with `pins/<name>.txt` and nothing else, installed first if it is not there.

    Raises CampaignError with pip's last line if it cannot be installed.
    """
    pins = PINS / f"{name}.txt"
    with _environment(pins, folder) as (environment, is_whole):
        python = environment / "bin" / "python"
        if not is_whole:
            _run([sys.executable, "-m", "venv", "--clear", str(environment)])
            pip = [
                str(python),
                "-m",
                "pip",
                "--disable-pip-version-check",
                "--no-input",
                "install",
                "--quiet",
                "--no-compile",
            ]
            # Every package is pinned, those that others ask for too: nothing is left to resolve.
            _run([*pip, "--no-deps", "--requirement", str(pins)])
    return python


def make_node_environment(name: str, folder: Path) -> Path:
    """Return a folder whose `node_modules` has the packages of `pins/<name>.txt`, installed first if they are not.

    Raises CampaignError with npm's last line if they cannot be installed.
    """
    pins = PINS / f"{name}.txt"
    with _environment(pins, folder) as (environment, is_whole):
        if not is_whole:
            (environment / "package.json").write_text('{"private": true}\n')
            packages = [line.replace("==", "@") for line in read_pins(name)]
            npm = ["npm", "install", "--no-save", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts"]
            _run([*npm, "--prefix", str(environment), *packages])
    return environment


def find_node() -> str | None:
    """Return the program `node`, new enough and with npm; None if there is none.

    As root on Debian it is installed first (blocking) if it is missing.
    """
    if _node() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing nodejs and npm", file=sys.stderr)
        with contextlib.suppress(CampaignError):
            _run(["apt-get", "--quiet", "update"])
            _run(["apt-get", "--quiet", "--yes", "--no-install-recommends", "install", "nodejs", "npm"])
    return _node()


def read_pins(name: str) -> list[str]:
    """Return the lines `package==version` of `pins/<name>.txt`."""
    lines = (PINS / f"{name}.txt").read_text("utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _node() -> str | None:
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        return None
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    version = re.match(r"v(\d+)\.", told)
    return node if version is not None and int(version[1]) >= MIN_NODE_MAJOR else None


@contextlib.contextmanager
def _environment(pins: Path, folder: Path) -> Iterator[tuple[Path, bool]]:
    """Hold an environment's folder for this process alone; tell whether it is whole, and mark it so at the end."""
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()[:_DIGEST_CHARACTERS]
    environment = folder / f"{pins.stem}-{digest}"
    environment.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        descriptor = os.open(environment, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        is_whole = (environment / STAMP).is_file()
        if not is_whole:
            print(f"installing {pins.stem} into {environment}", file=sys.stderr)
        yield environment, is_whole
        (environment / STAMP).touch()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")
        raise CampaignError(f"{Path(command[0]).name} ended with status {done.returncode}: {said}")
