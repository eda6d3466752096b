"""Check that the slow tests are run, each counted once, and that a run of none is no success."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.mark.slow
def test_good() -> None:
    pass

@pytest.mark.slow
def test_bad() -> None:
    raise ValueError("one of two")

@pytest.mark.slow
def test_left_out() -> None:
    pytest.skip("no means")

def test_quick() -> None:
    raise AssertionError
"""


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/campaign makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def run_slow(text: str, folder: Path) -> tuple[int, Any]:
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    (folder / "test_some.py").write_text(text)
    context = importlib.import_module("campaigns.part").Context("slow_tests", {}, 1, folder)
    number = importlib.import_module("campaigns.slow_tests").run_slow(context, folder, folder / "report.xml")
    return number, context.tally


def test_each_slow_test_is_counted_and_one_that_is_skipped_is_a_fault(tmp_path: Path) -> None:
    number, tally = run_slow(TESTS, tmp_path)
    assert (number, tally.passed) == (3, 1)
    bad, left_out = tally.failed
    assert bad.startswith("test_some::test_bad: ") and "one of two" in bad
    assert left_out.startswith("test_some::test_left_out: ") and "no means" in left_out


def test_a_run_of_no_slow_test_ends_the_part(tmp_path: Path) -> None:
    with pytest.raises(importlib.import_module("campaigns.part").CampaignError, match="pytest ended with 5"):
        run_slow("def test_quick() -> None: ...", tmp_path)


def test_there_are_slow_tests_of_benches_and_of_the_installation() -> None:
    marked = {path.name for path in (ROOT / "tests").rglob("test_*.py") if "mark.slow" in path.read_text("utf-8")}
    assert {"test_bench.py", "test_bench_api.py", "test_packaging.py"} <= marked


def test_a_run_that_breaks_off_ends_the_part(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(importlib.import_module("campaigns.part").CampaignError, match="pytest ended with 2"):
        run_slow(TESTS, tmp_path)
