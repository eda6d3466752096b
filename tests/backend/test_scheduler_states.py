"""Drive the scheduler and the mock engine through random histories, and check what must hold after every move."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inference_api.backend.engines.base import ScoreSpec
from inference_api.backend.engines.mock import MockScript, _embedding, _scores
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason, Pooling, QueryKind
from tests.backend.factories import DIGITS, ECHO, NOISE, Rig

WORKERS = ("worker-1", "worker-2")
CONTEXT_TOKENS = 32


class Reading(NamedTuple):
    """What a request asks of its prompt."""

    pooling: Pooling | None
    num_top: int | None
    draws_nothing: bool


READINGS = (
    Reading(Pooling.MEAN, None, True),
    Reading(Pooling.LAST, None, True),
    Reading(None, 2, True),
    Reading(None, 0, False),
)
SHARED = bytes(range(65, 85))
PROMPTS = st.builds(lambda num, rest: SHARED[:num] + rest, st.integers(0, 20), st.binary(min_size=1, max_size=9))


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, step, let time pass, lose workers, ask: in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.worker_of: dict[str, str] = {}
        self.lost: set[str] = set()
        self.owners: dict[int, str] = {}
        self.prompts: dict[str, bytes] = {}
        self.readings: dict[str, Reading | None] = {}

    @initialize(
        kv_tokens=st.sampled_from([0, CONTEXT_TOKENS, 50, 80]),
        prefix_reuse=st.booleans(),
        draft_tokens=st.sampled_from([0, 1, 5]),
        mode=st.sampled_from([NOISE, ECHO, DIGITS]),
        batching=st.sampled_from([(0.0, 32), (1.5, 32), (1.5, 2)]),
    )
    def begin(self, kv_tokens: int, prefix_reuse: bool, draft_tokens: int, mode: MockScript, batching) -> None:
        self.max_kv_tokens = kv_tokens or 3 * CONTEXT_TOKENS
        options = SchedulerOptions(kv_tokens, prefix_reuse, draft_tokens, *batching)
        self.rig = Rig(3, script=mode, context_tokens=CONTEXT_TOKENS, queue=(4, 90), budget=(3, 9), options=options)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 9),
        worker=st.sampled_from(WORKERS),
        tenant=st.sampled_from(["alpha", "beta"]),
        queue_seconds=st.sampled_from([1.0, 3.0, 50.0]),
        total_seconds=st.sampled_from([2.0, 6.0, 500.0]),
        stop=st.sampled_from([[], [b"a"], [b" ", b"ab"]]),
        priority=st.sampled_from([0, 0, 0, -3, 5]),
        reading=st.sampled_from([*(None,) * 4, *READINGS]),
        batches=st.booleans(),
    )
    def submit(
        self, prompt, max_tokens, worker, tenant, queue_seconds, total_seconds, stop, priority, reading, batches
    ) -> None:
        taken = self.rig.admission.num_requests
        session_id = f"s{len(self.worker_of)}"
        if not self.rig.offer(
            session_id,
            prompt,
            worker=worker,
            tenant=tenant,
            max_tokens=0 if reading is not None and reading.draws_nothing else max_tokens,
            pooling=reading and reading.pooling,
            prompt_logprobs=reading and reading.num_top,
            batches=batches,
            queue_seconds=queue_seconds,
            total_seconds=total_seconds,
            stop_sequences=stop,
            priority=priority,
        ):
            assert self.rig.admission.num_requests == taken
            return
        self.worker_of[session_id] = worker
        self.prompts[session_id] = prompt
        self.readings[session_id] = reading

    @rule(number=st.integers(0, 30), tenant=st.sampled_from(["alpha", "beta"]))
    def abort(self, number: int, tenant: str) -> None:
        self.rig.abort(f"s{number}", tenant)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 2.5]))
    def step(self, seconds: float) -> None:
        plan = self.rig.step(seconds)
        for row in plan.rows:
            assert row.pool is None or (row.sample, row.prefix, row.score) == (None, None, None)
            assert row.score is None or (row.draft_ids, row.prefix) == ((), None)
        known = [plan.start + len(plan.token_ids) + len(plan.draft_ids) for plan in plan.rows]
        assert sum(known) <= self.max_kv_tokens
        num_new = sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1)
        assert num_new <= 9
        for message in self.rig.steps[-1].values():
            sessions = [output.session_id for output in message.outputs]
            assert len(sessions) == len(set(sessions))
            for output in message.outputs:
                if output.row >= 0:
                    assert self.owners.setdefault(output.epoch, output.session_id) == output.session_id

    @rule(worker=st.sampled_from(WORKERS))
    def lose_worker(self, worker: str) -> None:
        self.rig.apply(WorkerGone(worker), worker)
        self.lost.update(s for s, owner in self.worker_of.items() if owner == worker and s not in self.rig.ends)

    @rule(kind=st.sampled_from(list(QueryKind)), number=st.integers(0, 30))
    def ask(self, kind: QueryKind, number: int) -> None:
        snapshot = self.rig.query(kind, "alpha", f"req-s{number}")
        assert snapshot.num_rows_in_use == len(self.rig.scheduler._running)
        assert all(row.tenant in ("", "alpha") for row in snapshot.rows)

    @invariant()
    def no_session_has_two_rows_and_rows_fit(self) -> None:
        running = self.rig.scheduler._running
        sessions = [sequence.session_id for sequence in running.values()]
        assert len(sessions) == len(set(sessions))
        assert len(running) + self.rig.scheduler._rows.num_free == 3
        assert all(sequence.row == row for row, sequence in running.items())

    @invariant()
    def places_taken_are_those_that_run_or_wait(self) -> None:
        scheduler = self.rig.scheduler
        waiting = [*scheduler._waiting, *scheduler._window]
        assert self.rig.admission.num_requests == len(scheduler._running) + len(waiting)
        waiting_tokens = sum(len(sequence.submit.token_ids) for sequence in waiting)
        assert self.rig.admission._num_waiting_tokens == waiting_tokens

    @invariant()
    def the_engine_holds_what_the_scheduler_has_computed(self) -> None:
        released = set(self.rig.scheduler._released)
        for row, held in enumerate(self.rig.engine._rows):
            sequence = self.rig.scheduler._running.get(row)
            if row in released:
                continue
            if sequence is not None and sequence.num_computed_tokens:
                assert held == sequence.token_ids[: sequence.num_computed_tokens]
            assert sequence is not None or row not in self.rig.engine.rows_in_use

    @invariant()
    def what_is_remembered_of_a_row_is_what_the_engine_holds(self) -> None:
        for row, holder in enumerate(self.rig.scheduler._rows._holders):
            if holder is not None:
                num_tokens = holder.num_computed_tokens
                assert self.rig.engine._rows[row][:num_tokens] == holder.token_ids[:num_tokens]

    @invariant()
    def whoever_has_started_comes_first_in_the_order_of_starts_and_then_each_tenants_most_urgent(self) -> None:
        scheduler = self.rig.scheduler
        everybody = [*scheduler._running.values(), *scheduler._waiting]
        epochs = [sequence.epoch or 1 << 30 for sequence in everybody]
        assert epochs == sorted(epochs)
        for tenant, batches in itertools.product(("alpha", "beta"), (True, False)):  # who batches may come in later
            waiting = [s for s in scheduler._waiting if (s.tenant, s.submit.batches, s.epoch) == (tenant, batches, 0)]
            turns = [(sequence.submit.priority, int(sequence.session_id[1:])) for sequence in waiting]
            assert turns == sorted(turns)

    @invariant()
    def a_session_is_open_or_has_ended_or_lost_its_worker(self) -> None:
        scheduler = self.rig.scheduler
        alive = {sequence.session_id for sequence in scheduler._sequences()}
        leaving = {output.session_id for outputs in scheduler._outputs.values() for output in outputs}
        for session_id in self.worker_of:
            states = (session_id in alive, session_id in leaving, session_id in self.rig.ends, session_id in self.lost)
            assert sum(states) == 1, (session_id, states)

    @invariant()
    def what_is_said_of_a_prompt_is_said_once_and_whole_at_the_end(self) -> None:
        for session_id, reading in self.readings.items():
            prompt, end = list(self.prompts[session_id]), self.rig.ends.get(session_id)
            scores = self.rig.scores[session_id]
            expected = []
            if reading is not None and reading.num_top is not None and len(prompt) > 1:
                expected = list(_scores(0, ScoreSpec(tuple(prompt[1:]), reading.num_top)))
            assert scores == expected[: len(scores)]
            if end is None or end.error is not None or end.reason is FinishReason.ABORT:
                continue
            assert scores == expected
            pooling = None if reading is None else reading.pooling
            assert end.embedding == (None if pooling is None else _embedding(pooling, prompt))
            if reading is not None and reading.draws_nothing:
                assert end.reason is (FinishReason.LENGTH if pooling is None else FinishReason.STOP)
                assert end.num_completion_tokens == 0
                assert self.rig.ids[session_id] == []

    def teardown(self) -> None:
        for _ in range(3):  # whoever waits for company no longer does
            self.rig.step(1.0)
        self.rig.run()
        self.rig.step()
        self.a_session_is_open_or_has_ended_or_lost_its_worker()
        assert self.rig.ends.keys() | self.lost == self.worker_of.keys()
        assert self.rig.admission.num_requests == 0
        assert not self.rig.engine.rows_in_use
        assert not self.rig.scheduler._records._open


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestSchedulerHistories(SchedulerMachine.TestCase):
    """Random histories end with one terminal event a session and nothing left behind."""
