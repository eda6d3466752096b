"""Check what the campaign's part on Redis counts as a fault, and that it makes one of each kind."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.redis_server import require_redis

ROOT = Path(__file__).parents[2]


@pytest.fixture
def redis_faults(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("campaigns.redis_faults")


def faults(redis_faults: ModuleType, tmp_path: Path, passed: list[float], took_seconds: list[float]) -> list[str]:
    context = importlib.import_module("campaigns.part").Context("redis", {}, 5, tmp_path)
    redis_faults._check(context, "killed", redis_faults.Calls(passed, took_seconds))
    return [name.partition(": ")[2].partition(":")[0] for name in context.tally.failed]


def test_more_than_a_fifth_too_many_in_any_window_is_a_fault(redis_faults: ModuleType, tmp_path: Path) -> None:
    spread = [number * 0.1 for number in range(24)]
    assert faults(redis_faults, tmp_path, spread, [0.01]) == []
    assert faults(redis_faults, tmp_path, [*spread, 100.0], [0.01]) == []
    assert faults(redis_faults, tmp_path, [*spread, 1.05], [0.01]) == ["limit"]
    assert faults(redis_faults, tmp_path, [1.0], [0.01]) == ["something passes"]


def test_one_call_that_waited_for_redis_is_a_fault(redis_faults: ModuleType, tmp_path: Path) -> None:
    passed = [1.0, 1.1]
    assert faults(redis_faults, tmp_path, passed, [*[0.01] * 1000, 1.4]) == []
    assert faults(redis_faults, tmp_path, passed, [*[0.01] * 1000, 2.0]) == ["delay"]
    assert faults(redis_faults, tmp_path, passed, [0.2] * 10) == ["delay"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], []),
        (["Redis did not answer right and in time", "else", "Redis answers again"], ["gone", "back"]),
        (["Redis did not answer", "Redis did not answer", "Redis answers again"], ["gone", "gone", "back"]),
    ],
)
def test_changes_are_read_from_the_log(redis_faults: ModuleType, lines: list[str], told: list[str]) -> None:
    assert redis_faults._told_changes(lines) == told


def test_a_fault_is_made_and_checked(redis_faults: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    monkeypatch.setattr(redis_faults, "FAULT_SECONDS", 0.3)
    context = importlib.import_module("campaigns.part").Context("redis", {"faults": 1}, 5, tmp_path)
    totals = redis_faults.run(context)
    # How fast things go is for a machine that does nothing else to say.
    wrong = {name.split(": ")[1] for name in context.tally.failed} - {"delay", "return"}
    assert not wrong and context.tally.passed >= 4
    assert totals["faults"] == 1 and totals["passed"] and totals["refused"]
