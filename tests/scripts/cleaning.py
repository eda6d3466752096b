"""Run scripts/clean for tests, beside a process that looks like a service. Knows nothing of what is removed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "clean"
HALF = "smollm-0123-v1.partial-ab12cd34"


def run(cache: Path, *arguments: str, script: Path = SCRIPT, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], "SERVE_PYTHON": sys.executable, "INFERENCE_API_CACHE_DIR": str(cache)}
    command = [str(script), *arguments]
    return subprocess.run(command, env={**given, **environ}, capture_output=True, text=True, timeout=30, check=False)


@contextlib.contextmanager
def living_process(
    python: Path, *, looks_like: Sequence[str] = ("inference_api.supervisor",), cwd: Path = ROOT, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that looks like a module to whoever reads its command line, until the block ends."""
    command = [python, "-c", "import sys; print(flush=True); sys.stdin.read()", "-m", *looks_like]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, cwd=cwd) as process:
        # Before it runs, the kernel may not have its command line and its environment yet.
        process.stdout.readline()  # type: ignore[union-attr]  # it has a pipe
        yield process
        process.communicate()
