"""Drive the scheduler and the mock engine through random histories, and check what must hold after every move."""

from __future__ import annotations

import collections

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from inference_api.backend.scheduler import WorkerGone
from inference_api.messages import QueryKind
from tests.backend.factories import Rig

WORKERS = ("worker-1", "worker-2")


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, abort, step, let time pass, lose workers, ask: in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(3, context_tokens=24, queue=(4, 60), budget=(3, 9))
        self.worker_of: dict[str, str] = {}
        self.lost: set[str] = set()
        self.epochs: dict[int, int] = collections.defaultdict(int)
        self.asked = 0

    @rule(
        prompt=st.binary(min_size=1, max_size=20),
        max_tokens=st.integers(1, 9),
        worker=st.sampled_from(WORKERS),
        tenant=st.sampled_from(["alpha", "beta"]),
        queue_seconds=st.sampled_from([1.0, 3.0, 50.0]),
        total_seconds=st.sampled_from([2.0, 6.0, 500.0]),
        stop=st.sampled_from([[], [b"a"], [b" ", b"ab"]]),
    )
    def submit(self, prompt, max_tokens, worker, tenant, queue_seconds, total_seconds, stop) -> None:
        taken = self.rig.admission.num_requests
        session_id = f"s{len(self.worker_of)}"
        if not self.rig.offer(
            session_id,
            prompt,
            worker=worker,
            tenant=tenant,
            max_tokens=max_tokens,
            queue_seconds=queue_seconds,
            total_seconds=total_seconds,
            stop_sequences=stop,
        ):
            assert self.rig.admission.num_requests == taken
            return
        self.worker_of[session_id] = worker

    @rule(number=st.integers(0, 30), tenant=st.sampled_from(["alpha", "beta"]))
    def abort(self, number: int, tenant: str) -> None:
        self.rig.abort(f"s{number}", tenant)

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 2.5]))
    def step(self, seconds: float) -> None:
        plan = self.rig.step(seconds)
        num_new = sum(len(row.token_ids) for row in plan.rows if len(row.token_ids) > 1)
        assert num_new <= 9
        for message in self.rig.steps[-1].values():
            sessions = [output.session_id for output in message.outputs]
            assert len(sessions) == len(set(sessions))
            for output in message.outputs:
                if output.row >= 0:
                    assert output.epoch >= self.epochs[output.row]
                    self.epochs[output.row] = output.epoch

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
        assert self.rig.admission.num_requests == len(scheduler._running) + len(scheduler._waiting)
        waiting_tokens = sum(len(sequence.submit.token_ids) for sequence in scheduler._waiting)
        assert self.rig.admission._num_waiting_tokens == waiting_tokens

    @invariant()
    def the_engine_holds_what_the_scheduler_has_computed(self) -> None:
        released = set(self.rig.scheduler._released)
        for row, held in enumerate(self.rig.engine._rows):
            sequence = self.rig.scheduler._running.get(row)
            if row in released:
                continue
            assert held == (sequence.token_ids[: sequence.num_computed_tokens] if sequence else [])

    @invariant()
    def a_session_is_open_or_has_ended_or_lost_its_worker(self) -> None:
        scheduler = self.rig.scheduler
        alive = {sequence.session_id for sequence in [*scheduler._waiting, *scheduler._running.values()]}
        leaving = {output.session_id for outputs in scheduler._outputs.values() for output in outputs}
        for session_id in self.worker_of:
            states = (session_id in alive, session_id in leaving, session_id in self.rig.ends, session_id in self.lost)
            assert sum(states) == 1, (session_id, states)

    def teardown(self) -> None:
        self.rig.run()
        self.rig.step()
        self.a_session_is_open_or_has_ended_or_lost_its_worker()
        assert self.rig.ends.keys() | self.lost == self.worker_of.keys()
        assert self.rig.admission.num_requests == 0
        assert self.rig.engine._rows == [[], [], []]
        assert not self.rig.scheduler._by_request


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestSchedulerHistories(SchedulerMachine.TestCase):
    """Random histories end with one terminal event a session and nothing left behind."""
