"""Run those of the project's own tests that `scripts/test` leaves out for their length: the part `slow_tests`.

They are marked `slow`: the benches at their tiny sizes, and what installs the project from the package index. Each is
one check. They run once, whatever the tier, in a process of their own, as pytest runs them by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from campaigns.part import CampaignError, Context

ROOT = Path(__file__).parents[2]
_FAULTS = ("failure", "error", "skipped")


def run(context: Context) -> dict[str, int]:
    """Run the tests; return how many there are."""
    context.folder.mkdir(parents=True, exist_ok=True)
    return {"tests": run_slow(context, ROOT / "tests", context.folder / "slow_tests.xml")}


def run_slow(context: Context, tests: Path, report: Path) -> int:
    """Run the slow tests of a folder and count each; return how many.

    Raises CampaignError if pytest ran none, or broke off.
    """
    report.unlink(missing_ok=True)
    # What makes the campaign's own packages importable is not there for who runs the tests by hand.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-m", "slow", f"--junitxml={report}", str(tests)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise CampaignError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    cases = _cases_of(report)
    for case in cases:
        fault = next((part for part in case if part.tag in _FAULTS), None)
        name = f"{case.get('classname')}::{case.get('name')}"
        context.count(name, None if fault is None else (fault.get("message") or fault.tag)[:300])
    if done.returncode and not context.tally.failed:
        context.count("the run", done.stdout.strip()[-300:])
    context.log(done.stdout.strip().rpartition("\n")[2])
    return len(cases)


def _cases_of(report: Path) -> list[ElementTree.Element]:
    return list(ElementTree.parse(report).getroot().iter("testcase"))  # noqa: S314  # pytest has just written it
