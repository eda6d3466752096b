"""Check what the scheduler keeps for the sampler: mirostat's state from draw to draw, and where repetitions end."""

from __future__ import annotations

import dataclasses

from inference_api.backend.engines.base import EngineInfo, StepPlan, StepResult
from inference_api.backend.engines.mock import MockEngine
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.sampling_params import SamplingParams
from tests.backend.factories import DIGITS, Rig

MIROSTAT = SamplingParams(1.0, 0, 1.0, 7, mirostat=2)
DRY = SamplingParams(1.0, 0, 1.0, 7, dry_multiplier=0.8, dry_sequence_breakers=(b"l", b"\n"))


class StatefulEngine:
    """The mock, with a state that halves with every draw; `seen` holds the states that came in, by prompt length."""

    def __init__(self, inner: MockEngine) -> None:
        self._inner = inner
        self.seen: dict[int, list[float | None]] = {}

    @property
    def info(self) -> EngineInfo:
        return self._inner.info

    def execute(self, plan: StepPlan) -> StepResult:
        states: dict[int, float] = {}
        for row in plan.rows:
            if row.sample is not None and row.sample.params.mirostat:
                self.seen.setdefault(row.sample.num_prompt_tokens, []).append(row.sample.mu)
                states[row.row] = (8.0 if row.sample.mu is None else row.sample.mu) / 2
        rows = self._inner.execute(plan).rows
        return StepResult(tuple(dataclasses.replace(row, mu=states.get(row.row)) for row in rows))

    def release(self, row: int) -> None:
        self._inner.release(row)


def rig_with_states(num_rows: int = 2, options: SchedulerOptions | None = None) -> tuple[Rig, StatefulEngine]:
    rig = Rig(num_rows, script=DIGITS, options=options)
    rig.engine = engine = StatefulEngine(rig.engine)
    return rig, engine


def test_the_state_after_a_draw_comes_in_with_the_next_one() -> None:
    rig, engine = rig_with_states()
    rig.submit("a", sampling=MIROSTAT)
    rig.submit("b")
    rig.run()
    assert engine.seen == {5: [None, 4.0, 2.0, 1.0]}
    outputs = [output for step in rig.steps for message in step.values() for output in message.outputs]
    assert [output.mu for output in outputs if output.session_id == "a"] == [4.0, 2.0, 1.0, 0.5]
    assert {output.mu for output in outputs if output.session_id == "b"} == {None}


def test_the_state_outlives_a_row_that_makes_room_for_others() -> None:
    rig, engine = rig_with_states(options=SchedulerOptions(kv_tokens=48))
    rig.submit("a", b"first", max_tokens=24, sampling=MIROSTAT)
    rig.submit("b", b"second", max_tokens=24, sampling=MIROSTAT)
    rig.run()
    assert len(rig.rows["b"]) > 1, "it was preempted"
    assert engine.seen[5] == engine.seen[6] == [None, *(4.0 / 2**step for step in range(23))]


def test_a_sequence_goes_on_elsewhere_from_its_ids_and_its_state() -> None:
    rig, engine = rig_with_states()
    rig.submit("a", sampling=MIROSTAT, token_ids=list(b"hello56"), num_prompt_tokens=5, mu=2.0)
    rig.run()
    assert engine.seen == {5: [2.0, 1.0]}


def test_rows_with_mirostat_guess_nothing_ahead() -> None:
    options = SchedulerOptions(draft_tokens=4)
    for params, guesses in ((MIROSTAT, False), (DRY, True)):
        rig = Rig(1, options=options)
        rig.submit("a", b"abcabcabcabc", sampling=params)
        rig.run()
        assert any(row.draft_ids for plan in rig.plans for row in plan.rows) == guesses


def test_where_repetitions_end_is_told_in_the_bytes_of_the_ids() -> None:
    rig = Rig(2, script=DIGITS)
    rig.submit("a", b"hello", sampling=DRY)
    rig.submit("b", b"hello")
    rig.step()
    first, second = (row.sample for row in rig.plans[0].rows)
    assert first is not None and first.breakers is not None and second is not None
    assert first.known_ids == tuple(b"hello")
    assert first.breakers.num_after(first.known_ids) == 1
    assert first.breakers.is_in(ord("l")) and not first.breakers.is_in(ord("h"))
    assert second.breakers is None and second.known_ids == ()
