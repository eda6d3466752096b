"""Check the campaign's frame: what a part is given, how its checks are counted and told, and what fails a run.

Parts are small modules made here; no service is started.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

Run = Callable[..., dict[str, int]]


def module(name: str) -> Any:
    return importlib.import_module(f"campaigns.{name}")


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the package importable as scripts/campaign makes it, with no part in its table."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(module("__main__"), "PARTS", {})


@pytest.fixture
def add_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Run], None]:
    """Return a function that puts a part into the table."""

    def add(name: str, run: Run) -> None:
        made = types.ModuleType(f"campaigns.{name}")
        made.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"campaigns.{name}", made)
        part = module("table").Part(name, ci={"size": 1}, nightly={"size": 7})
        monkeypatch.setitem(module("__main__").PARTS, name, part)

    return add


def passing(context: Any) -> dict[str, int]:
    for index in range(context.counts["size"]):
        context.count(f"check {index}")
    return {"requests": 3}


def failing(context: Any) -> dict[str, int]:
    context.count("one")
    context.count("two", "it broke")
    context.count("three")
    return {}


def read(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any], str]:
    """Return the line that counts, the JSON object after it, and what went to stderr."""
    told = capsys.readouterr()
    count, figures = told.out.splitlines()
    return count, json.loads(figures), told.err


def test_stdout_is_a_line_that_counts_and_a_line_of_json(add_part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    add_part("good", passing)
    assert module("__main__").main(["--seed", "5"]) == 0
    count, figures, said = read(capsys)
    assert count == "1 passed, 0 failed" and "seed 5" in said
    assert (figures["tier"], figures["seed"], figures["failed"]) == ("ci", 5, [])
    seconds = figures["parts"]["good"].pop("seconds")
    assert figures["parts"] == {"good": {"requests": 3, "passed": 1, "failed": 0, "not_run": 0}} and seconds >= 0


def test_a_nightly_run_takes_the_other_counts(add_part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    add_part("good", passing)
    assert module("__main__").main(["--nightly"]) == 0
    count, figures, _ = read(capsys)
    assert (count, figures["tier"]) == ("7 passed, 0 failed", "nightly")


def test_one_failed_check_fails_the_run_is_named_and_can_be_replayed(add_part: Any, capsys: Any) -> None:
    add_part("bad", failing)
    add_part("good", passing)
    assert module("__main__").main(["--seed", "9"]) == 1
    count, figures, said = read(capsys)
    assert (count, figures["failed"]) == ("3 passed, 1 failed", ["bad"])
    assert "FAILED bad: two: it broke\n" in said
    assert "replay with: scripts/campaign bad --seed 9\n" in said


@pytest.mark.parametrize("kind", ["CampaignError", "BenchError"])
def test_a_part_that_gives_up_is_a_failed_check_and_the_next_one_runs(add_part, capsys, kind: str) -> None:
    error = {"CampaignError": module("part").CampaignError, "BenchError": module("__main__").BenchError}[kind]

    def broken(context: Any) -> dict[str, int]:
        context.count("one")
        raise error("no service")

    add_part("broken", broken)
    add_part("good", passing)
    assert module("__main__").main([]) == 1
    count, figures, said = read(capsys)
    assert (count, figures["failed"]) == ("2 passed, 1 failed", ["broken"])
    assert "FAILED broken: the part: no service\n" in said


def test_a_bug_in_a_part_is_a_failed_check_with_its_trace_and_the_next_one_runs(add_part: Any, capsys: Any) -> None:
    add_part("wrong", lambda context: {"a": context.counts["nothing"]})
    add_part("good", passing)
    assert module("__main__").main([]) == 1
    count, figures, said = read(capsys)
    assert (count, figures["failed"]) == ("1 passed, 1 failed", ["wrong"])
    assert "FAILED wrong: the part: KeyError: 'nothing'\n" in said and "Traceback" in said


def test_a_part_without_a_check_has_failed(add_part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    add_part("empty", lambda context: {})
    assert module("__main__").main([]) == 1
    assert read(capsys)[0] == "0 passed, 1 failed"


@pytest.mark.parametrize(("environment", "status"), [("", 0), ("true", 1)])
def test_what_was_not_run_fails_only_continuous_integration(
    add_part, capsys, monkeypatch: pytest.MonkeyPatch, environment: str, status: int
) -> None:
    def without_node(context: Any) -> dict[str, int]:
        context.count("one")
        context.count_not_run("two", "there is no node")
        return {}

    monkeypatch.setenv("CI", environment)
    add_part("partial", without_node)
    assert module("__main__").main([]) == status
    count, figures, said = read(capsys)
    assert count == ("1 passed, 1 failed" if status else "1 passed, 0 failed, 1 skipped")
    assert figures["parts"]["partial"]["not_run"] == 1
    assert ("FAILED partial: two: there is no node" in said) == bool(status)


def test_only_the_parts_that_are_named_run(add_part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    add_part("bad", failing)
    add_part("good", passing)
    assert module("__main__").main(["good", "good"]) == 0
    assert list(read(capsys)[1]["parts"]) == ["good"]


def test_a_part_that_there_is_not_is_one_line_and_status_2(add_part: Any, capsys: Any) -> None:
    add_part("good", passing)
    with pytest.raises(SystemExit) as ended:
        module("__main__").main(["god"])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err == "ERROR: there is no part 'god', only good; see scripts/campaign --help\n"


def test_ctrl_c_is_one_line_and_status_130(add_part: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(context: Any) -> dict[str, int]:
        raise KeyboardInterrupt

    add_part("long", interrupted)
    assert module("__main__").main([]) == 130
    assert capsys.readouterr().out == ""


def test_a_seed_draws_the_same_for_a_part_whatever_runs_beside_it(add_part: Any, capsys: Any) -> None:
    drawn: dict[str, list[float]] = {}

    def drawing(context: Any) -> dict[str, int]:
        drawn.setdefault(context.part, []).append(context.random.random())
        context.count("drawn")
        return {}

    add_part("one", drawing)
    add_part("two", drawing)
    for arguments in (["--seed", "3"], ["two", "--seed", "3"], ["two", "--seed", "4"]):
        assert module("__main__").main(arguments) == 0
    capsys.readouterr()
    assert drawn["one"][0] != drawn["two"][0] == drawn["two"][1] != drawn["two"][2]


def test_every_part_of_the_table_is_a_module_with_the_same_counts_in_both_tiers() -> None:
    parts = module("table").PARTS
    assert "clients" in parts
    for part in parts.values():
        assert (ROOT / "scripts" / "campaigns" / f"{part.module}.py").is_file()
        assert part.ci.keys() == part.nightly.keys()
        assert all(part.nightly[name] >= count for name, count in part.ci.items())


def test_the_documented_parts_are_those_of_the_table() -> None:
    page = (ROOT / "docs" / "campaign.md").read_text("utf-8")
    rows = page.split("| part | what |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(module("table").PARTS)
