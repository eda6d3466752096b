"""Check the scheduler's decisions step by step with the mock engine and a clock that the test moves."""

from __future__ import annotations

import dataclasses

import pytest

from inference_api.backend import request_records
from inference_api.backend.engines.base import RowResult, StepResult
from inference_api.backend.engines.mock import MockScript
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.step_planning import TokenRules
from inference_api.messages import FinishReason, QueryKind
from tests.backend.factories import DIGITS, ECHO, EOS_ID, WORKER, Rig


def _fill(rig: Rig, num_sessions: int, **changes: object) -> list[str]:
    sessions = [f"s{number}" for number in range(num_sessions)]
    for session_id in sessions:
        rig.submit(session_id, **changes)
    return sessions


def test_one_step_sends_one_message_a_worker_however_many_rows_it_has() -> None:
    rig = Rig(8)
    for number in range(8):
        rig.submit(f"s{number}", worker=f"worker-{number % 2}")
    rig.step()
    (outputs,) = rig.steps
    assert outputs.keys() == {"worker-0", "worker-1"}
    assert [len(message.outputs) for message in outputs.values()] == [4, 4]
    rig.run()


def test_abort_frees_the_row_before_the_next_step_and_a_waiting_request_gets_it_in_that_step() -> None:
    rig = Rig(2)
    _fill(rig, 3, max_tokens=50)
    rig.step()
    rig.abort("s0")
    plan = rig.step()
    assert rig.ends["s0"].reason is FinishReason.ABORT
    assert [row.start for row in plan.rows] == [0, 5]
    assert rig.rows["s2"] == {(0, 3)}
    assert len(rig.ids["s0"]) == 1


def test_abort_of_a_waiting_request_ends_it_without_a_row_and_gives_its_place_back() -> None:
    rig = Rig(1)
    _fill(rig, 2)
    rig.abort("s1")
    rig.step()
    assert rig.ends["s1"].reason is FinishReason.ABORT
    assert rig.ids["s1"] == []
    assert rig.rows["s1"] == set()
    rig.run()
    assert rig.admission.num_requests == 0


def test_abort_of_another_tenants_request_does_nothing() -> None:
    rig = Rig(1)
    rig.submit("s0")
    rig.abort("s0", tenant="beta")
    rig.run()
    assert rig.ends["s0"].reason is FinishReason.LENGTH


def test_abort_ends_every_choice_of_the_request() -> None:
    rig = Rig(4)
    for choice in range(3):
        rig.submit(f"s{choice}", request_id="req-s0", choice=choice, max_tokens=50)
    rig.step()
    rig.abort("s0")
    rig.step()
    assert {session_id: end.reason for session_id, end in rig.ends.items()} == dict.fromkeys(
        ("s0", "s1", "s2"), FinishReason.ABORT
    )


def test_the_thirty_third_request_starts_in_the_step_after_any_row_ends() -> None:
    rig = Rig(32)
    for number in range(32):
        rig.submit(f"s{number}", max_tokens=3 if number == 17 else 40)
    rig.submit("late", max_tokens=3)
    for _ in range(3):
        rig.step()
    assert "s17" in rig.ends
    rig.step()
    assert rig.rows["late"] == {(17, 33)}
    assert len(rig.ends) == 1


def test_thirty_two_requests_of_thirty_two_ids_make_at_most_seventy_forward_passes() -> None:
    rig = Rig(32, queue=(96, 65536))
    _fill(rig, 32, max_tokens=32)
    rig.run()
    assert all(len(rig.ids[f"s{number}"]) == 32 for number in range(32))
    assert len(rig.plans) <= 70


def test_a_request_sent_while_thirty_one_rows_decode_gets_its_first_id_before_any_of_them_ends() -> None:
    rig = Rig(32, budget=(64, 512))
    _fill(rig, 31, max_tokens=40)
    for _ in range(5):
        rig.step()
    rig.submit("late", b"x" * 150, max_tokens=2)
    while not rig.ids["late"]:
        plan = rig.step()
        assert len(plan.rows) == 32, "a prefilling neighbour must not pause those that decode"
    assert not rig.ends


def test_a_prompt_is_computed_in_chunks_within_the_budget_beside_decoding_rows() -> None:
    rig = Rig(3, budget=(10, 100))
    rig.submit("decoding", max_tokens=50)
    rig.step()
    rig.submit("first", b"a" * 25)
    chunks = [[len(row.token_ids) for row in rig.step().rows] for _ in range(2)]
    rig.submit("second", b"b" * 18)
    chunks += [[len(row.token_ids) for row in rig.step().rows] for _ in range(2)]
    # One prompt: 10, and the token of a row that does not decode. Two: 20 and one.
    assert chunks == [[1, 11], [1, 11], [1, 3, 18], [1, 1, 1]]


def test_a_row_that_does_not_decode_leaves_its_token_to_a_prompt_up_to_what_prompts_get_alone() -> None:
    rig = Rig(5, budget=(10, 12))
    for num_decoding, num_prompt_tokens in ((1, 12), (2, 12), (3, 11), (4, 10)):
        rig.submit(f"decoding {num_decoding}", max_tokens=50)
        rig.step()
        rig.submit(f"prompt {num_decoding}", b"p" * 30)
        plan = rig.step()
        assert sorted(len(row.token_ids) for row in plan.rows) == [1] * num_decoding + [num_prompt_tokens]
        rig.abort(f"prompt {num_decoding}")


def test_prompts_alone_use_the_larger_budget() -> None:
    rig = Rig(2, budget=(10, 100))
    rig.submit("first", b"a" * 70)
    rig.submit("second", b"b" * 70)
    assert [len(row.token_ids) for row in rig.step().rows] == [70, 30]


def test_only_a_rows_last_chunk_samples() -> None:
    rig = Rig(1, budget=(10, 10))
    rig.submit("s0", b"a" * 25)
    assert [rig.step().rows[0].sample is not None for _ in range(3)] == [False, False, True]


def test_rows_are_given_in_the_order_of_arrival_lowest_first() -> None:
    rig = Rig(3)
    _fill(rig, 5)
    rig.step()
    assert [sorted(rig.rows[f"s{number}"]) for number in range(5)] == [[(0, 1)], [(1, 2)], [(2, 3)], [], []]


def test_no_row_within_the_queue_deadline_ends_a_waiting_request_and_only_that_one() -> None:
    rig = Rig(1)
    rig.submit("running", max_tokens=50)
    rig.submit("waiting", queue_seconds=5.0)
    rig.step()
    rig.step(4.9)
    assert "waiting" not in rig.ends
    rig.step(0.2)
    end = rig.ends["waiting"]
    assert end.reason is FinishReason.ERROR
    assert end.error is not None
    assert end.error.code == "deadline_exceeded"
    assert end.error.message == "No row became free within 5 seconds."
    assert "running" not in rig.ends


def test_a_prompt_still_prefilling_at_the_first_token_deadline_is_ended() -> None:
    rig = Rig(1, budget=(1, 2))
    rig.submit("s0", b"a" * 100, first_token_seconds=3.0)
    rig.step()
    rig.step(3.0)
    error = rig.ends["s0"].error
    assert error is not None
    assert error.message == "The first token took longer than 3 seconds."
    assert rig.scheduler.is_empty


def test_the_total_deadline_ends_a_decoding_request_and_keeps_the_ids_it_made() -> None:
    rig = Rig(1)
    rig.submit("s0", max_tokens=50, total_seconds=10.0)
    rig.step()
    rig.step(9.0)
    rig.step(1.0)
    end = rig.ends["s0"]
    assert end.error is not None
    assert end.error.message == "The request took longer than 10 seconds."
    assert end.num_completion_tokens == 2 == len(rig.ids["s0"])


def test_a_stop_across_ids_ends_the_row_and_bills_the_id_that_completes_it() -> None:
    rig = Rig(1, script=ECHO)
    rig.submit("s0", b"one STOP two", max_tokens=50, stop_sequences=[b"STOP"])
    rig.run()
    assert rig.text("s0") == b"one STOP"
    assert rig.ends["s0"].reason is FinishReason.STOP
    assert rig.ends["s0"].stop == b"STOP"
    assert rig.ends["s0"].num_completion_tokens == 8


def test_a_stop_inside_one_id_ends_the_row_at_that_id() -> None:
    rig = Rig(1)
    rig.scheduler._rules = TokenRules([b"xxendyy"] * 259, frozenset())
    rig.submit("s0", max_tokens=50, stop_sequences=[b"end"])
    rig.run()
    assert len(rig.ids["s0"]) == 1
    assert rig.ends["s0"].stop == b"end"


def test_an_end_of_sequence_id_is_billed_and_ends_the_row() -> None:
    rig = Rig(1, script=ECHO)
    rig.submit("s0", b"abc", max_tokens=50)
    rig.run()
    assert rig.ids["s0"] == [*b"abc", EOS_ID]
    assert rig.ends["s0"].reason is FinishReason.STOP
    assert rig.ends["s0"].stop is None
    assert rig.ends["s0"].num_completion_tokens == 4


def test_max_tokens_ends_with_length_at_exactly_that_many() -> None:
    rig = Rig(1, script=DIGITS)
    rig.submit("s0", b"abc", max_tokens=5)
    rig.run()
    assert rig.text("s0") == b"34567"
    assert rig.ends["s0"].reason is FinishReason.LENGTH


def test_the_end_of_the_context_ends_with_length() -> None:
    rig = Rig(1, context_tokens=16)
    rig.submit("s0", b"a" * 12, max_tokens=50)
    rig.run()
    assert len(rig.ids["s0"]) == 4
    assert rig.ends["s0"].reason is FinishReason.LENGTH


def test_a_prompt_that_fills_the_context_gets_the_one_id_that_needs_no_slot() -> None:
    rig = Rig(1, context_tokens=16)
    rig.submit("s0", b"a" * 16, max_tokens=50)
    rig.run()
    assert len(rig.ids["s0"]) == 1
    assert rig.ends["s0"].reason is FinishReason.LENGTH


def test_ids_drawn_after_the_end_are_counted_as_discarded_and_never_sent() -> None:
    rig = Rig(1)
    rig.submit("s0", max_tokens=3)
    plan = rig.scheduler.schedule(rig.now)
    outputs = rig.scheduler.update(plan, StepResult((RowResult(0, (97, 98, 99, 100, 101)),)), rig.now)
    (output,) = outputs["worker-1"].outputs
    assert output.token_ids == [97, 98, 99]
    assert output.finished is not None and output.finished.num_completion_tokens == 3
    metrics = rig.query(QueryKind.METRICS).metrics
    assert (metrics["completion_tokens"], metrics["discarded_tokens"]) == (3, 2)


def test_a_row_error_ends_its_own_row_and_leaves_the_neighbours_ids_alone() -> None:
    alone = Rig(3)
    alone.submit("good", max_tokens=6)
    alone.run()
    rig = Rig(3, script=MockScript.parse("noise", 0.0, "nan:BAD"))
    rig.submit("sick", b"BAD prompt")
    rig.submit("good", max_tokens=6)
    rig.run()
    assert rig.ends["sick"].reason is FinishReason.ERROR
    assert rig.ends["sick"].error is not None
    assert rig.ends["sick"].error.code == "generation_failed"
    assert rig.ids["good"] == alone.ids["good"]
    assert rig.ends["good"].reason is FinishReason.LENGTH


def test_every_owner_of_a_row_has_a_number_of_its_own() -> None:
    rig = Rig(1)
    _fill(rig, 4)
    rig.run()
    assert [rig.rows[f"s{number}"] for number in range(4)] == [{(0, 1)}, {(0, 2)}, {(0, 3)}, {(0, 4)}]


def test_a_lost_worker_frees_its_rows_and_gets_no_message_while_others_go_on() -> None:
    rig = Rig(3)
    rig.submit("mine", worker="worker-1", max_tokens=50)
    rig.submit("other", worker="worker-2", max_tokens=5)
    rig.step()
    rig.apply(WorkerGone("worker-1"), "worker-1")
    plan = rig.step()
    assert [row.row for row in plan.rows] == [1]
    assert rig.steps[-1].keys() == {"worker-2"}
    rig.run()
    assert rig.admission.num_requests == 0


def test_a_snapshot_shows_own_rows_and_of_others_only_that_they_are_taken() -> None:
    rig = Rig(3)
    rig.submit("mine", max_tokens=50)
    rig.submit("theirs", b"secret", tenant="beta", max_tokens=50)
    rig.step(2.0)
    snapshot = rig.query(QueryKind.ROWS)
    assert (snapshot.num_rows, snapshot.num_rows_in_use, snapshot.num_waiting) == (3, 2, 0)
    mine, theirs, free = snapshot.rows
    assert (mine.state, mine.request_id, mine.num_prompt_tokens) == ("decoding", "req-mine", 5)
    assert (theirs.state, theirs.tenant, theirs.request_id, theirs.num_prompt_tokens) == ("other", "", "", 0)
    assert free.state == "free"


def test_a_foreign_request_is_as_unknown_as_one_that_never_was() -> None:
    rig = Rig(1)
    rig.submit("s0")
    rig.step()
    assert rig.request("s0", tenant="beta") is None
    assert rig.request("never") is None
    rig.run()
    assert rig.request("s0", tenant="beta") is None
    view = rig.request("s0")
    assert view is not None
    assert (view.state, view.finish_reason, view.num_completion_tokens) == ("finished", FinishReason.LENGTH, 4)


def test_a_waiting_request_is_told_its_place() -> None:
    rig = Rig(1)
    _fill(rig, 3)
    rig.step()
    view = rig.request("s2")
    assert view is not None
    assert (view.state, view.place, view.row) == ("waiting", 2, None)


def test_the_records_of_ended_requests_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_records, "MAX_ENDED_REQUESTS", 3)
    rig = Rig(1)
    for number in range(5):
        rig.submit(f"s{number}", max_tokens=1)
        rig.run()
    assert [rig.request(f"s{number}") is not None for number in range(5)] == [False, False, True, True, True]


def test_the_loop_may_wait_a_second_when_idle_and_not_at_all_when_a_row_runs() -> None:
    rig = Rig(1)
    assert rig.scheduler.next_wake(rig.now) == 1.0
    rig.submit("s0", max_tokens=9)
    rig.step()
    assert rig.scheduler.next_wake(rig.now) == 0.0
    rig.abort("s0")
    assert rig.scheduler.next_wake(rig.now) == 0.0, "the end of the aborted request must leave at once"


def test_metrics_count_requests_tokens_steps_and_ends() -> None:
    rig = Rig(1)
    _fill(rig, 2, max_tokens=3)
    rig.run()
    metrics = rig.query(QueryKind.METRICS).metrics
    assert metrics["requests"] == 2
    assert metrics["prompt_tokens"] == 10
    assert metrics["completion_tokens"] == 6
    assert metrics["finished_length"] == 2
    assert metrics["steps"] == 6
    assert metrics["scheduled_tokens"] == 2 * (5 + 2)


def test_a_resumed_request_sends_only_what_is_new_and_bills_what_it_already_had() -> None:
    whole = Rig(1)
    whole.submit("s0", max_tokens=10)
    whole.run()
    ids = whole.ids["s0"]
    rig = Rig(1)
    rig.submit("s0", b"hello" + bytes(ids[:4]), num_prompt_tokens=5, max_tokens=10, attempt=1)
    rig.run()
    assert rig.ids["s0"] == ids[4:]
    assert rig.ends["s0"].num_completion_tokens == 10


def test_a_stop_that_began_before_a_resume_still_ends_the_row() -> None:
    rig = Rig(1, script=ECHO)
    rig.submit("s0", b"one STOP two" + b"one ST", num_prompt_tokens=12, max_tokens=50, stop_sequences=[b"STOP"])
    rig.run()
    assert rig.text("s0") == b"OP"
    assert rig.ends["s0"].stop == b"STOP"


def test_a_row_for_which_the_engine_draws_nothing_fails_and_does_not_spin() -> None:
    rig = Rig(2)
    rig.submit("s0")
    rig.submit("s1")
    rig.step()
    plan = rig.scheduler.schedule(rig.now)
    result = rig.engine.execute(plan)
    kept = dataclasses.replace(result, rows=tuple(row for row in result.rows if row.row == 1))
    outputs = rig.scheduler.update(plan, kept, rig.now)[WORKER].outputs
    ends = {output.session_id: output.finished for output in outputs}
    assert ends["s1"] is None
    assert ends["s0"] is not None and ends["s0"].error is not None
    assert ends["s0"].error.code == "generation_failed"
