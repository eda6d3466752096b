"""Check the suite's own rules: a skipped test fails a run of continuous integration, and leaks are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _run(tmp_path: Path, body: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_it.py").write_text(f"import os, pytest, socket, threading\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    return subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True
    )


SKIPPED = "@pytest.mark.skip\ndef test_nothing(): pass\n\ndef test_something(): pass"


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_a_skipped_test_fails_continuous_integration_and_nothing_else(tmp_path: Path, ci: str, status: int) -> None:
    done = _run(tmp_path, SKIPPED, CI=ci)
    assert done.returncode == status, done.stdout


LEAKS = """
KEPT = []

def test_socket(): KEPT.append(socket.socketpair())

def test_thread(): threading.Thread(target=threading.Event().wait, args=(9,), daemon=True).start()

def test_child(): os.posix_spawn('/bin/sleep', ['sleep', '1'], {})
"""


def test_what_a_test_leaves_behind_is_found(tmp_path: Path) -> None:
    done = _run(tmp_path, LEAKS)
    assert done.returncode == 1
    for name, what in (("socket", "descriptors"), ("thread", "threads"), ("child", "child processes")):
        assert f"test_it.py::test_{name} - AssertionError: {what} left behind" in done.stdout
