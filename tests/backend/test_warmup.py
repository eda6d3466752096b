"""Check the warm-up: every kind of step is run, nothing is left behind, and the budget follows the measured times."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from inference_api.backend import warmup
from inference_api.backend.decode_loop import check_engine
from inference_api.backend.engines.base import EngineInfo, PrefillBudget, StepPlan, StepResult
from inference_api.backend.engines.mock import MockEngine
from inference_api.backend.warmup import warm_up
from inference_api.errors import SettingError
from tests.backend.factories import DIGITS, ECHO, NOISE, make_image


class ClockedEngine:
    """Charge an injected clock for each step: `cost` maps a plan to seconds; like a real engine, name no budget."""

    def __init__(
        self, cost: Callable[[StepPlan], float], num_rows: int = 4, context_tokens: int = 2048, script=DIGITS
    ) -> None:
        self._inner = MockEngine(make_image(), num_rows, context_tokens, script)
        self._cost = cost
        self.plans: list[StepPlan] = []
        self.now = 0.0

    @property
    def info(self) -> EngineInfo:
        return dataclasses.replace(self._inner.info, prefill_budget=None)

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.now += self._cost(plan)
        return self._inner.execute(plan)

    def release(self, row: int) -> None:
        self._inner.release(row)


def _num_tokens(plan: StepPlan) -> int:
    return sum(len(row.token_ids) for row in plan.rows)


def _warm(monkeypatch: pytest.MonkeyPatch, engine: ClockedEngine, chunk_tokens: int = 0) -> PrefillBudget:
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: engine.now)
    return warm_up(engine, chunk_tokens)


def test_a_chunk_beside_decoding_rows_may_double_a_step_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    # A decode step costs 0.100; a chunk of 64 ids brings it to 0.164, one of 128 to 0.228.
    engine = ClockedEngine(lambda plan: 0.097 + 0.001 * _num_tokens(plan))
    assert _warm(monkeypatch, engine).beside_tokens == 64


def test_a_chunk_alone_stays_below_half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ClockedEngine(lambda plan: 0.003 * _num_tokens(plan))
    assert _warm(monkeypatch, engine).alone_tokens == 128


def test_a_slow_engine_still_gets_the_smallest_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ClockedEngine(lambda plan: float(_num_tokens(plan)))
    assert _warm(monkeypatch, engine) == PrefillBudget(32, 32)


def test_a_set_chunk_is_taken_unmeasured_after_prefill_and_decode_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ClockedEngine(lambda plan: 0.001)
    assert _warm(monkeypatch, engine, 48) == PrefillBudget(48, 48)
    assert {len(row.token_ids) > 1 for plan in engine.plans for row in plan.rows} == {True, False}


@pytest.mark.parametrize(
    ("num_rows", "context_tokens", "script"),
    list(itertools.product((1, 2, 5), (16, 20, 33, 64, 2048), (DIGITS, ECHO, NOISE))),
    ids=lambda value: getattr(value, "mode", value),
)
def test_every_size_and_mode_warms_up_and_leaves_no_row_in_use(num_rows: int, context_tokens: int, script) -> None:
    engine = ClockedEngine(lambda plan: 0.001, num_rows, context_tokens, script)
    warm_up(engine)
    assert not engine._inner.rows_in_use
    check_engine(engine)
    assert not engine._inner.rows_in_use


def test_an_engine_that_names_its_budget_is_not_measured() -> None:
    engine = MockEngine(make_image(), 4, 2048, dataclasses.replace(DIGITS, tokens_per_second=0.001))
    assert warm_up(engine) == engine.info.prefill_budget == PrefillBudget(512, 512)
    assert warm_up(engine, 7) == PrefillBudget(7, 7)


def test_a_step_near_the_watchdogs_time_stops_the_start_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ClockedEngine(lambda plan: 3.0)
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: engine.now)
    with pytest.raises(SettingError, match=r"4 rows takes 3.0 s .* INFERENCE_API_WATCHDOG_SECONDS is 5"):
        warm_up(engine, watchdog_seconds=5.0)
    warm_up(engine, watchdog_seconds=7.0)
