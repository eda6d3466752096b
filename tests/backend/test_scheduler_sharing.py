"""Check what sequences share step by step: prefixes, and the bound of the KV cache."""

from __future__ import annotations

import dataclasses

import pytest

from inference_api.backend.engines.base import PrefillBudget, PrefixCopy
from inference_api.backend.engines.mock import MockScript
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.scheduler import GROWTH_TOKENS, Scheduler
from inference_api.backend.step_planning import SchedulerOptions, TokenRules
from inference_api.messages import FinishReason, QueryKind
from tests.backend.factories import Rig, figure, ids_alone, make_image

REUSE = SchedulerOptions(prefix_reuse=True)
TURN = b"a question of more than sixteen letters"


def test_a_second_turn_computes_only_what_the_first_one_did_not() -> None:
    rig = Rig(4, options=REUSE)
    rig.submit("first", TURN, max_tokens=10)
    rig.run()
    second = TURN + bytes(rig.ids["first"]) + b" and another one"
    rig.submit("second", second, max_tokens=10)
    (row,) = rig.step().rows
    num_held = len(TURN) + 9  # the last id was drawn and never computed
    assert (row.row, row.start, row.prefix) == (0, num_held, PrefixCopy(0, num_held))
    assert row.token_ids == tuple(second[num_held:])
    rig.run()
    assert rig.ids["second"] == ids_alone(second, max_tokens=10)
    assert (figure(rig, "prefix_hits"), figure(rig, "prefix_tokens")) == (1, num_held)
    view = rig.request("second")
    assert view is not None and view.num_prompt_tokens == len(second), "a reused prompt is counted whole"
    assert figure(rig, "prompt_tokens") == len(TURN) + len(second)


def test_the_end_and_the_requests_view_tell_how_much_of_the_prompt_was_held() -> None:
    rig = Rig(4, options=REUSE)
    rig.submit("first", TURN, max_tokens=10)
    rig.run()
    second = TURN + bytes(rig.ids["first"]) + b" and another one"
    rig.submit("second", second, max_tokens=10)
    rig.submit("foreign", second, max_tokens=10, tenant="beta")
    rig.run()
    num_held = len(TURN) + 9
    assert [rig.ends[name].num_cached_tokens for name in ("first", "second", "foreign")] == [0, num_held, 0]
    view = rig.request("second")
    assert view is not None and view.num_cached_tokens == num_held


def test_what_a_preempted_sequence_had_computed_itself_is_not_cached() -> None:
    rig = make_tight_rig(prefix_reuse=True)
    rig.submit("old", b"1234567890", max_tokens=30, seed=1)
    rig.submit("new", b"1234567890", max_tokens=30, seed=2)
    rig.run()
    assert figure(rig, "preemptions") == figure(rig, "prefix_hits") == 1
    assert rig.ends["new"].num_cached_tokens == 0


def test_only_what_a_prefix_saves_is_counted() -> None:
    rig = Rig(2, budget=(100, 100), options=REUSE)
    stem = bytes(97 + index * 7 % 26 for index in range(90))
    for number in range(2):
        rig.submit(f"s{number}", stem + bytes([65 + number]) * 5, max_tokens=3)
    rig.run()
    num_computed = sum(len(row.token_ids) for plan in rig.plans for row in plan.rows)
    assert figure(rig, "prefix_tokens") == 2 * (95 + 2) - num_computed > 0


def test_rows_that_come_together_compute_a_shared_beginning_once() -> None:
    rig = Rig(8, budget=(64, 64), options=REUSE)
    stem = bytes(97 + index * 7 % 26 for index in range(200))
    for number in range(8):
        rig.submit(f"s{number}", stem + bytes([65 + number]) * 5, max_tokens=3)
    rig.run()
    num_computed = sum(len(row.token_ids) for plan in rig.plans for row in plan.rows)
    assert num_computed < 205 + 8 * (5 + 2) + 64
    for number in range(8):
        assert rig.ids[f"s{number}"] == ids_alone(stem + bytes([65 + number]) * 5, max_tokens=3)


@pytest.mark.parametrize("state", ["running", "ended"])
def test_what_another_tenant_computed_is_never_observable(state: str) -> None:
    rig = Rig(4, options=REUSE)
    rig.submit("theirs", TURN, tenant="beta", max_tokens=9)
    if state == "ended":
        rig.run()
    else:
        rig.step()
    rig.submit("mine", TURN, max_tokens=9)
    plan = next(row for row in rig.step().rows if row.start != len(TURN))
    assert (plan.start, plan.prefix, len(plan.token_ids)) == (0, None, len(TURN))
    rig.run()
    assert figure(rig, "prefix_hits") == 0
    rig.submit("theirs again", TURN, tenant="beta", max_tokens=9)
    assert rig.step().rows[0].prefix is not None, "its own tenant still gets it"


def test_reuse_that_is_off_or_unknown_to_the_engine_begins_every_prompt_anew() -> None:
    for options, copies in ((SchedulerOptions(), True), (REUSE, False)):
        rig = Rig(1)
        info = dataclasses.replace(rig.engine.info, copies_prefixes=copies)
        image = make_image()
        rules = TokenRules(image.token_bytes, image.stop_ids)
        rig.scheduler = Scheduler(info, rules, rig.admission, PrefillBudget(64, 512), options)
        for session_id in ("first", "second"):
            rig.submit(session_id, TURN)
            rig.run()
        assert all(row.prefix is None for plan in rig.plans for row in plan.rows)


def test_what_a_failed_row_holds_is_not_used_again() -> None:
    rig = Rig(1, script=MockScript("noise", faults={b"BAD": "nan"}), options=REUSE)
    rig.submit("sick", TURN + b"BAD")
    rig.run()
    assert rig.ends["sick"].reason is FinishReason.ERROR
    rig.submit("well", TURN + b"good")
    assert rig.step().rows[0].prefix is None


def test_an_aborted_prompt_leaves_what_it_had_computed() -> None:
    rig = Rig(1, budget=(20, 20), options=REUSE)
    rig.submit("left", TURN)
    rig.step()
    rig.abort("left")
    rig.submit("next", TURN)
    assert rig.step().rows[0].prefix == PrefixCopy(0, 20)


def test_an_abort_frees_the_row_that_another_prompt_copies_from_without_harm() -> None:
    rig = Rig(2, options=REUSE)
    rig.submit("source", TURN, max_tokens=30)
    rig.step()
    rig.submit("copy", TURN + b"?", max_tokens=30)
    rig.step()
    rig.abort("source")
    rig.submit("third", b"something else of some length", max_tokens=30)
    rig.run()
    assert rig.ids["copy"] == ids_alone(TURN + b"?", max_tokens=30)


def make_tight_rig(kv_tokens: int = 64, **changes: object) -> Rig:
    """Return a rig whose rows may hold `kv_tokens` ids together."""
    return Rig(4, context_tokens=64, options=SchedulerOptions(kv_tokens=kv_tokens, **changes))


def step_until_preempted(rig: Rig) -> None:
    """Step until a row has been taken back."""
    for _ in range(64):
        rig.step()
        if figure(rig, "preemptions"):
            return
    raise AssertionError("no row was taken back")


def test_the_latest_arrival_makes_room_and_goes_on_later_with_the_same_ids() -> None:
    rig = make_tight_rig()
    rig.submit("old", b"1234567890", max_tokens=30, seed=1)
    rig.submit("new", b"1234567890", max_tokens=30, seed=2)
    step_until_preempted(rig)
    view = rig.request("new")
    assert view is not None
    assert (view.state, view.place, view.row) == ("waiting", 1, None)
    assert len(rig.ids["new"]) == 23, "the rows hold 2 x 32 ids, and each would compute one more"
    snapshot = rig.query(QueryKind.ROWS)
    assert (snapshot.num_waiting, snapshot.num_rows_in_use) == (1, 1)
    assert [row.state for row in snapshot.rows] == ["decoding", "free", "free", "free"]
    rig.run()
    for session_id, seed in (("old", 1), ("new", 2)):
        assert rig.ids[session_id] == ids_alone(b"1234567890", max_tokens=30, seed=seed)
        assert rig.ends[session_id].reason is FinishReason.LENGTH
    assert figure(rig, "preemptions") == 1
    assert rig.admission.num_requests == 0


def test_a_sequence_keeps_its_number_in_every_row_that_it_gets() -> None:
    rig = make_tight_rig()
    for session_id in ("s0", "s1", "s2"):
        rig.submit(session_id, b"1234567890", max_tokens=40)
    rig.run()
    assert figure(rig, "preemptions") > 0
    assert {epoch for _, epoch in rig.rows["s1"]} == {2}
    assert {epoch for _, epoch in rig.rows["s2"]} == {3}


def test_the_queue_deadline_does_not_come_back_and_the_total_one_does_not_go() -> None:
    rig = make_tight_rig()
    rig.submit("old", b"1234567890", max_tokens=50)
    rig.submit("new", b"1234567890", max_tokens=50, queue_seconds=5.0, total_seconds=40.0)
    step_until_preempted(rig)
    rig.step(30.0)
    assert "new" not in rig.ends
    rig.step(15.0)
    error = rig.ends["new"].error
    assert error is not None and error.message == "The request took longer than 40 seconds."
    rig.run()
    assert rig.admission.num_requests == 0
    assert rig.admission._num_waiting_tokens == 0


@pytest.mark.parametrize("way", ["abort", "worker"])
def test_a_sequence_that_leaves_while_it_waits_again_ends_once_and_frees_nothing_of_others(way: str) -> None:
    rig = make_tight_rig()
    rig.submit("old", b"1234567890", max_tokens=50)
    rig.submit("new", b"1234567890", max_tokens=50, worker="worker-2")
    step_until_preempted(rig)
    num_made = len(rig.ids["new"])
    if way == "abort":
        rig.abort("new")
    else:
        rig.apply(WorkerGone("worker-2"), "worker-2")
    assert [row.row for row in rig.step().rows] == [0]
    if way == "abort":
        assert (rig.ends["new"].reason, rig.ends["new"].num_completion_tokens) == (FinishReason.ABORT, num_made)
    rig.run()
    assert rig.ids["old"] == ids_alone(b"1234567890", max_tokens=50)
    assert rig.admission.num_requests == 0


def test_a_prompt_waits_until_the_rows_have_room_for_it_and_nobody_overtakes_it() -> None:
    rig = make_tight_rig(80)
    rig.submit("running", b"1" * 30, max_tokens=3)
    rig.submit("large", b"2" * 40, max_tokens=3)
    rig.submit("small", b"3", max_tokens=3)
    rig.step()
    assert [rig.query().rows[row].request_id for row in range(4)] == ["req-running", "", "", ""]
    assert 30 + 1 + GROWTH_TOKENS * 2 <= 80, "the small one would have fitted"
    rig.run()
    assert rig.ends.keys() == {"running", "large", "small"}


def test_a_prompt_as_long_as_the_context_gets_its_turn() -> None:
    rig = make_tight_rig()
    rig.submit("short", b"1" * 5, max_tokens=20)
    rig.submit("whole", b"2" * 64, max_tokens=20)
    rig.run()
    assert len(rig.ids["whole"]) == 1
    assert len(rig.ids["short"]) == 20


@pytest.mark.parametrize("prefix_reuse", [False, True])
def test_the_tightest_bound_slows_down_and_never_stops_what_runs(prefix_reuse: bool) -> None:
    rig = Rig(8, context_tokens=64, queue=(40, 65536), options=SchedulerOptions(64, prefix_reuse), budget=(5, 5))
    for number in range(24):
        rig.submit(f"s{number}", bytes([97 + number]) * (1 + number * 2 % 23), max_tokens=40)
    ends = 0
    for _ in range(24):
        for _ in range(64 // 5 + 40 + 1):  # the oldest alone needs no longer
            rig.step()
        ends, before = len(rig.ends), ends
        assert ends == 24 or ends > before
    assert ends == 24
    assert figure(rig, "preemptions") > 5


def test_a_preempted_sequence_goes_on_where_its_row_still_holds_what_it_knows() -> None:
    rig = make_tight_rig(prefix_reuse=True)
    rig.submit("old", b"1234567890", max_tokens=30, seed=1)
    rig.submit("new", b"1234567890", max_tokens=30, seed=2)
    rig.run()
    resumed = next(row for plan in rig.plans for row in plan.rows if row.prefix is not None)
    assert resumed == dataclasses.replace(resumed, row=1, start=32, prefix=PrefixCopy(1, 32))
    assert len(resumed.token_ids) == 1
