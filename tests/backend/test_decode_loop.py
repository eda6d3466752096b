"""Check the heart: its order, its heartbeat, its inbox and the idle engine's self-check."""

from __future__ import annotations

import threading
import time

import pytest

from inference_api.backend.decode_loop import DecodeLoop, Inbox, check_engine
from inference_api.backend.engines.base import PrefixCopy, StepPlan, StepResult
from inference_api.backend.engines.mock import MockScript
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import Abort, Message, Query, QueryKind, Snapshot, StepOutput
from tests.backend.factories import DIGITS, WORKER, Rig, make_submit


class Journal:
    """Record, in order, what the loop asks the engine and sends to workers."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.info = rig.engine.info
        self.events: list[str] = []
        self.sent: list[tuple[str, Message]] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.events.append(f"execute {[row.row for row in plan.rows]}")
        return self.rig.engine.execute(plan)

    def release(self, row: int) -> None:
        self.events.append(f"release {row}")
        self.rig.engine.release(row)

    def send(self, worker: str, message: Message) -> None:
        self.events.append(f"send {worker} {type(message).__name__}")
        self.sent.append((worker, message))


class TellingCondition(threading.Condition):
    """Tell that a thread is about to wait; it holds the lock until it does."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


def _make_loop(rig: Rig) -> tuple[DecodeLoop, Inbox, Journal]:
    journal, inbox = Journal(rig), Inbox()
    return DecodeLoop(rig.scheduler, journal, inbox, journal, lambda: rig.now), inbox, journal


def _put(rig: Rig, inbox: Inbox, session_id: str, worker: str = WORKER, **changes: object) -> None:
    rig.admission.take(5)
    inbox.put(worker, make_submit(session_id, **changes))


def test_a_step_takes_messages_in_runs_one_forward_pass_and_sends_one_message_a_worker() -> None:
    rig = Rig(4)
    loop, inbox, journal = _make_loop(rig)
    for number in range(4):
        _put(rig, inbox, f"s{number}", f"worker-{number % 2}")
    loop.step()
    assert journal.events == ["execute [0, 1, 2, 3]", "send worker-0 StepOutput", "send worker-1 StepOutput"]


def test_an_aborted_row_is_released_before_the_pass_that_its_next_owner_takes_part_in() -> None:
    rig = Rig(1)
    loop, inbox, journal = _make_loop(rig)
    _put(rig, inbox, "s0")
    _put(rig, inbox, "s1")
    loop.step()
    journal.events.clear()
    inbox.put(WORKER, Abort("req-s0", "alpha"))
    loop.step()
    assert journal.events[:2] == ["release 0", "execute [0]"]


def test_an_ended_row_is_released_in_the_same_step() -> None:
    rig = Rig(1)
    loop, inbox, journal = _make_loop(rig)
    _put(rig, inbox, "s0", max_tokens=1)
    loop.step()
    assert journal.events == ["execute [0]", f"send {WORKER} StepOutput", "release 0"]


def test_a_step_without_rows_asks_nothing_of_the_engine_and_still_answers_queries() -> None:
    rig = Rig(1)
    loop, inbox, journal = _make_loop(rig)
    inbox.put(WORKER, Query(3, QueryKind.ROWS))
    loop.step()
    assert journal.events == [f"send {WORKER} Snapshot"]
    assert isinstance(journal.sent[0][1], Snapshot)


def test_every_step_renews_the_heartbeat() -> None:
    rig = Rig(1)
    loop, inbox, _ = _make_loop(rig)
    rig.now += 5.0
    inbox.put(WORKER, Query(3, QueryKind.ROWS))
    loop.step()
    assert loop.heartbeat_at == rig.now


def test_thirty_two_requests_leave_in_one_message_a_step() -> None:
    rig = Rig(32, script=DIGITS)
    loop, inbox, journal = _make_loop(rig)
    for number in range(32):
        _put(rig, inbox, f"s{number}", max_tokens=32)
    while not rig.scheduler.is_empty or inbox._items:
        loop.step()
    executes = [event for event in journal.events if event.startswith("execute")]
    messages = [message for _, message in journal.sent if isinstance(message, StepOutput)]
    assert len(executes) <= 70
    assert len(messages) <= len(executes)
    assert sum(len(output.token_ids) for message in messages for output in message.outputs) == 32 * 32


def test_an_engine_that_fails_as_a_whole_ends_the_loop() -> None:
    rig = Rig(1, script=MockScript.parse("digits", 0.0, "crash:BOOM"))
    loop, inbox, _ = _make_loop(rig)
    _put(rig, inbox, "s0", prompt=b"BOOM!")
    with pytest.raises(RuntimeError, match="scripted crash"):
        loop.step()


def test_an_idle_engine_checks_itself_once_an_interval_and_never_while_a_row_is_taken() -> None:
    rig = Rig(1)
    loop, inbox, journal = _make_loop(rig)
    rig.now += 119.0
    assert not loop.check_idle_engine(120.0)
    rig.now += 1.0
    assert loop.check_idle_engine(120.0)
    assert not loop.check_idle_engine(120.0)
    assert journal.events == ["execute [0]", "release 0"]
    _put(rig, inbox, "s0", max_tokens=50)
    loop.step()
    rig.now += 500.0
    assert not loop.check_idle_engine(120.0)


def test_the_self_check_runs_in_the_row_whose_memory_is_worth_least_and_that_is_forgotten() -> None:
    rig = Rig(2, options=SchedulerOptions(prefix_reuse=True))
    loop, inbox, journal = _make_loop(rig)
    prompts = [b"a text of the first sequence", b"another text of the second one"]
    for number, prompt in enumerate(prompts):
        _put(rig, inbox, f"s{number}", prompt=prompt, max_tokens=1 + number)
    for _ in range(2):
        loop.step()
    for seconds, row in ((120.0, 0), (120.0, 0)):
        rig.now += seconds
        assert loop.check_idle_engine(120.0)
        assert journal.events[-2:] == [f"execute [{row}]", f"release {row}"]
    for number, prompt in enumerate(prompts):
        _put(rig, inbox, f"again-{number}", prompt=prompt, max_tokens=1)
    plans = []
    rig.engine.execute, execute = lambda plan: plans.append(plan) or execute(plan), rig.engine.execute
    loop.step()
    assert [row.prefix for row in plans[0].rows] == [None, PrefixCopy(1, len(prompts[1]) - 1)]


def test_a_question_does_not_put_the_self_check_off() -> None:
    rig = Rig(2)
    loop, inbox, _ = _make_loop(rig)
    rig.now += 119.0
    inbox.put(WORKER, Query(1, QueryKind.METRICS))
    loop.step()
    rig.now += 1.0
    assert loop.check_idle_engine(120.0)


def test_a_sick_engine_fails_its_self_check() -> None:
    rig = Rig(1, script=MockScript.parse("digits", 0.0, "nan:\x00"))
    with pytest.raises(RuntimeError, match="self-check failed"):
        check_engine(rig.engine)


def test_the_inbox_hands_over_in_order_and_only_once() -> None:
    inbox = Inbox()
    messages = [Abort(f"req-{number}", "alpha") for number in range(3)]
    for message in messages:
        inbox.put(WORKER, message)
    assert inbox.drain(1.0) == [(WORKER, message) for message in messages]
    assert inbox.drain(0.0) == []


@pytest.mark.parametrize("act", [lambda inbox: inbox.wake(), lambda inbox: inbox.put(WORKER, Abort("req", "alpha"))])
def test_a_waiting_inbox_returns_as_soon_as_something_comes(act) -> None:
    inbox, waited = Inbox(), []
    inbox._condition = condition = TellingCondition()

    def wait() -> None:
        began = time.monotonic()
        inbox.drain(30.0)
        waited.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    assert condition.waiting.wait(10.0)
    act(inbox)
    thread.join()
    assert waited[0] < 5.0
