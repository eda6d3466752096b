"""Check the parts of the benches `memory` and `sampling` that need no model: how rows are filled, weighed and timed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from inference_api.backend.engines.base import EngineInfo, StepPlan, StepResult
from inference_api.backend.engines.row_lengths import RowLengths

ROOT = Path(__file__).parents[2]
CONTEXT_TOKENS = 2048


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/bench makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> Any:
    return importlib.import_module(f"benches.{name}")


class Recording:
    """An engine that computes nothing: it checks plans as the real ones do, and keeps those that it was given."""

    def __init__(self, num_rows: int, *, copies_prefixes: bool) -> None:
        self.info = EngineInfo(
            "recording", "none", "cpu", num_rows, CONTEXT_TOKENS, 259, True, "", copies_prefixes=copies_prefixes
        )
        self.lengths = RowLengths(self.info)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        sound, faults = self.lengths.split(plan)
        for row in sound:
            self.lengths.advance(row)
        return StepResult(tuple(faults.values()))

    def release(self, row: int) -> None:
        raise AssertionError("a bench releases no row here")


@pytest.mark.parametrize("copies_prefixes", [True, False])
def test_all_rows_hold_the_positions_and_draw_in_one_step(copies_prefixes: bool) -> None:
    engine = Recording(4, copies_prefixes=copies_prefixes)
    for num_positions in (1, 2, 600, CONTEXT_TOKENS):
        module("memory_engine").hold(engine, num_positions)
        assert engine.lengths.computed == [num_positions] * 4
        assert [row.sample is not None for row in engine.plans[-1].rows] == [True] * 4
    computed = {row.row for plan in engine.plans[:-1] for row in plan.rows if len(row.token_ids) > 1}
    assert computed == ({0} if copies_prefixes else {0, 1, 2, 3})


def test_a_row_that_fails_ends_the_bench_instead_of_making_its_steps_fast() -> None:
    engine = Recording(2, copies_prefixes=False)
    with pytest.raises(module("service").BenchError, match="row 1 failed: invalid_plan: Positions 2048 to 2048"):
        module("row_steps").fill(engine, 1, [5] * (CONTEXT_TOKENS + 1))


def test_a_process_is_weighed_by_its_rollup_and_the_part_of_files(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    parts = {"Rss": 10240, "Shared_Clean": 1024, "Shared_Dirty": 512, "Private_Clean": 2048, "Private_Dirty": 6656}
    rollup = "".join(f"{name}:  {kib} kB\n" for name, kib in parts.items())
    (tmp_path / "7" / "smaps_rollup").write_text(f"55d0-7ffd ---p 00000000 00:00 0  [rollup]\n{rollup}")
    (tmp_path / "7" / "status").write_text("Name:\tpython 3 kB\nThreads:\t2\nRssFile:\t    3072 kB\n")
    memory = module("memory")
    assert memory.Resident.read(7, tmp_path) == memory.Resident(10.0, 8.5, 1.5, 3.0)


def test_every_rule_is_timed_in_every_turn_at_the_same_position_of_every_row() -> None:
    engine, sampling = Recording(2, copies_prefixes=True), module("sampling")
    texts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    for row, ids in enumerate(texts):
        module("row_steps").fill(engine, row, ids)
    seconds = sampling._take_turns(engine, texts, 3)
    assert {rule: len(taken) for rule, taken in seconds.items()} == dict.fromkeys(sampling.RULES, 3)
    steps = engine.plans[len(texts) :]
    assert {(row.start, row.token_ids) for plan in steps for row in plan.rows} == {(3, (8,)), (3, (12,))}
    num_rules = len(sampling.RULES)
    first_of_turns = [steps[turn * num_rules].rows[0].sample.params for turn in range(4)]
    assert first_of_turns == list(sampling.RULES.values())[:4]
    numbers = [row.sample.choice for plan in steps[::num_rules] for row in plan.rows]
    assert len(set(numbers)) == len(numbers)


def test_a_rule_costs_what_its_steps_take_over_greedy_ones() -> None:
    figures = module("sampling")._figures({"greedy": [0.04, 0.05, 0.06], "top_p": [0.044, 0.06, 0.09]})
    assert figures["greedy"] == {"median_ms": 50.0, "fastest_ms": 40.0, "over_greedy": 0.0, "fastest_over_greedy": 0.0}
    assert figures["top_p"] == {"median_ms": 60.0, "fastest_ms": 44.0, "over_greedy": 0.2, "fastest_over_greedy": 0.1}


def test_a_table_sets_texts_to_the_left_and_numbers_to_the_right() -> None:
    assert module("figures").table(("what", "ms", "share"), [("a", 5, "-"), ("longer", 10.5, 0.2)]).splitlines() == [
        "what      ms  share",
        "a          5      -",
        "longer  10.5    0.2",
    ]
