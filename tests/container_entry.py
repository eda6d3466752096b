"""Run the entry point of the images for tests: without a container, and with a checkout that shows what it got."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRY = ROOT / "scripts" / "container"
SHOW = 'import os, sys; print(sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith("JWT_SECRET")})'


def entry(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point to its end, with the settings given and none of a service's besides."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
    return subprocess.run(
        [str(ENTRY), *arguments],
        env={**kept, "PATH": path, **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def checkout_that_shows(folder: Path, program: str = SHOW) -> str:
    """Make a checkout whose supervisor says what it was started with; return its folder."""
    package = folder / "checkout" / "inference_api"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "supervisor.py").write_text(program)
    (package.parent / "proxy").mkdir()
    for name in ("__init__.py", "proxy.py"):
        (package.parent / "proxy" / name).touch()
    return str(package.parent)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line with which the entry point gave up."""
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR: ")
    return line
