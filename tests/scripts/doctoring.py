"""Run the doctor for tests and read its report: the worst finding of each check.

It runs in this process, for a start of Python takes longer than all checks do, or as scripts/doctor of a checkout: what
it says of other processes, it does not say of its own. Knows no check.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a-secret-for-tests-of-at-least-32-bytes"


def report(environ: dict[str, str], *arguments: str, root: Path | None = None) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the doctor, that of the checkout `root` if it is given; return its exit status and what each check found."""
    if root is None:
        status, said = _in_this_process(environ, ["--json", *arguments])
    else:
        command = [str(root / "scripts" / "doctor"), "--json", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.stderr == ""
        status, said = done.returncode, done.stdout
    answer: dict[str, Any] = json.loads(said)
    assert answer["starts"] == (status == 0)
    assert SECRET not in said
    order = ["ok", "note", "warning", "fault"]
    found = sorted(answer["findings"], key=lambda finding: order.index(finding["level"]))
    for finding in found:
        assert finding["advice"] or finding["level"] == "ok", finding
    return status, {finding["check"]: finding for finding in found}


def _in_this_process(environ: dict[str, str], arguments: list[str]) -> tuple[int, str]:
    """Return the exit status and the output of the program behind scripts/doctor, with no settings but `environ`."""
    with mock.patch.object(sys, "path", [str(ROOT / "scripts"), *sys.path]):
        program = importlib.import_module("doctor_checks")
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        status = program.main(arguments)
    assert errors.getvalue() == ""
    return status, output.getvalue()
