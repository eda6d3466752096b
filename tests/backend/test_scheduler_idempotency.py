"""Check that a repeated call reads what the first one reads: followed, replayed or gone on with, from the first id."""

from __future__ import annotations

from typing import Any

from inference_api.backend.inbox_messages import KeyedSubmit, WorkerGone
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason, Pooling, SequenceOutput
from inference_api.sampling_params import SamplingParams
from tests.backend.factories import DIGITS, START_SECONDS, Rig
from tests.backend.keyed_rig import TTL_SECONDS, KeyedRig, keyed_submit

NUM_IDS = 12
SCORED = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=7, logprobs=2)


def ids_alone(**changes: Any) -> list[int]:
    """Return what a call without a key says."""
    rig = Rig()
    rig.submit("alone", **{"max_tokens": NUM_IDS, **changes})
    rig.run()
    return rig.ids["alone"]


def outputs_of(rig: Rig, session_id: str) -> list[SequenceOutput]:
    """Return everything that a session was sent."""
    messages = [message for step in rig.steps for message in step.values()]
    return [output for message in messages for output in message.outputs if output.session_id == session_id]


def steps(rig: Rig, number: int) -> None:
    """Take some steps."""
    for _ in range(number):
        rig.step()


def test_a_repetition_while_the_first_runs_gets_what_there_is_and_what_comes_and_takes_no_row() -> None:
    rig = KeyedRig()
    assert rig.call("first", max_tokens=NUM_IDS) == "computes"
    steps(rig, 5)
    assert rig.call("second", worker="worker-2", max_tokens=NUM_IDS, created=1) == "follows"
    assert rig.admission.num_requests == 1
    rig.step()
    assert rig.ids["second"] == rig.ids["first"] and len(rig.ids["first"]) == 6
    assert len(rig.plans[-1].rows) == 1
    rig.run()
    assert rig.ids["second"] == rig.ids["first"] == ids_alone()
    assert rig.ends["second"] == rig.ends["first"]
    assert (rig.told["first"], rig.told["second"]) == (0, int(START_SECONDS))
    assert rig.admission.num_requests == 0


def test_a_repetition_of_one_that_waits_follows_it_too() -> None:
    rig = KeyedRig(1)
    rig.submit("other", max_tokens=3)
    rig.step()
    rig.call("first")
    rig.call("second")
    rig.run()
    assert rig.ids["second"] == rig.ids["first"]
    assert rig.rows["second"] == rig.rows["first"] != set()


def test_after_the_end_a_repetition_gets_the_recorded_ids_and_end_in_one_output_and_nothing_is_computed() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS, sampling=SCORED)
    rig.run()
    num_plans = len(rig.plans)
    rig.now += 10
    assert rig.call("second", max_tokens=NUM_IDS, sampling=SCORED) == "follows"
    assert not rig.scheduler.is_empty
    rig.run()
    (replayed,) = outputs_of(rig, "second")
    assert len(rig.plans) == num_plans
    assert replayed.token_ids == rig.ids["first"]
    assert replayed.finished == rig.ends["first"]
    assert replayed.logprobs == [one for output in outputs_of(rig, "first") for one in output.logprobs or ()]


def test_scores_of_the_prompt_come_to_every_reader_once() -> None:
    rig = KeyedRig(budget=(4, 4))
    asked: dict[str, Any] = {"prompt": b"a longer prompt", "prompt_logprobs": 1, "max_tokens": 3}
    rig.call("first", **asked)
    steps(rig, 2)
    rig.call("second", **asked)
    rig.run()
    rig.call("third", **asked)
    rig.run()
    scores = [
        [one for output in outputs_of(rig, session_id) for one in output.prompt_logprobs or ()]
        for session_id in ("first", "second", "third")
    ]
    assert len(scores[0]) == len(b"a longer prompt") - 1
    assert scores[0] == scores[1] == scores[2]
    assert rig.ids["first"] == rig.ids["second"] == rig.ids["third"]


def test_a_pooled_prompt_is_replayed_with_its_embedding() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=0, pooling=Pooling.MEAN)
    rig.run()
    assert rig.call("second", max_tokens=0, pooling=Pooling.MEAN) == "follows"
    rig.run()
    assert rig.ends["first"].embedding
    assert rig.ends["second"] == rig.ends["first"]


def test_another_call_under_the_same_key_is_refused_while_the_first_runs_and_after_its_end() -> None:
    rig = KeyedRig()
    rig.call("first")
    assert rig.call("other", digest=b"two") == "refused"
    rig.run()
    assert rig.call("other", digest=b"two") == "refused"
    rig.leave("first")
    assert rig.ends.keys() == {"first"}


def test_a_key_belongs_to_its_tenant() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS)
    assert rig.call("second", tenant="beta", digest=b"two", max_tokens=NUM_IDS) == "computes"
    steps(rig, 3)
    rig.delete(tenant="beta")
    rig.run()
    assert rig.ends["first"].reason is FinishReason.LENGTH
    assert rig.ends["second"].reason is FinishReason.ABORT


def test_when_the_record_is_over_its_time_the_key_names_a_new_call() -> None:
    rig = KeyedRig()
    rig.call("first")
    rig.run()
    rig.now += TTL_SECONDS
    assert rig.call("second", digest=b"two") == "computes"
    rig.run()
    assert rig.told["second"] == 0


def test_the_leaver_alone_is_dismissed_while_others_read_on() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS)
    steps(rig, 3)
    rig.call("second", max_tokens=NUM_IDS)
    rig.step()
    rig.leave("first")
    rig.step()
    assert rig.ends["first"].reason is FinishReason.ABORT
    assert len(rig.ids["first"]) == 4
    rig.run()
    assert rig.ends["second"].reason is FinishReason.LENGTH
    assert rig.ids["second"] == ids_alone()


def test_the_row_is_free_for_the_next_step_when_the_last_reader_has_left() -> None:
    rig = KeyedRig(1)
    rig.call("first", max_tokens=NUM_IDS)
    steps(rig, 3)
    rig.call("second", max_tokens=NUM_IDS)
    rig.submit("waiting", max_tokens=1)
    rig.leave("first")
    rig.leave("second")
    rig.step()
    assert rig.ends["waiting"].reason is FinishReason.LENGTH
    assert {rig.ends[session_id].reason for session_id in ("first", "second")} == {FinishReason.ABORT}


def test_a_repetition_on_its_way_keeps_the_sequence_whose_only_reader_leaves() -> None:
    rig = KeyedRig(1)
    rig.call("first", max_tokens=NUM_IDS)
    steps(rig, 3)
    on_its_way = rig.claimed(keyed_submit("second", max_tokens=NUM_IDS))
    assert isinstance(on_its_way, KeyedSubmit)
    rig.leave("first")
    steps(rig, 2)
    rig.apply(on_its_way)
    rig.run()
    assert rig.ids["second"] == ids_alone()
    assert rig.ends["second"].reason is FinishReason.LENGTH
    assert {epoch for _, epoch in rig.rows["second"]} == {1}


def test_what_a_leaver_broke_off_is_gone_on_with_and_delivered_from_the_first_id() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS, sampling=SCORED)
    steps(rig, 5)
    rig.leave("first")
    steps(rig, 1)
    computed = sum(len(row.token_ids) for plan in rig.plans for row in plan.rows)
    assert rig.call("second", max_tokens=NUM_IDS, sampling=SCORED) == "computes"
    rig.run()
    assert rig.ids["second"] == ids_alone()
    assert rig.ids["second"][:5] == rig.ids["first"]
    assert rig.ends["second"].num_completion_tokens == NUM_IDS
    assert rig.told["second"] == int(START_SECONDS)
    num_more = sum(len(row.token_ids) for plan in rig.plans for row in plan.rows) - computed
    assert num_more == len(b"hello") + NUM_IDS - 1, "prompt and known ids once, then one id a step"
    assert len(rig.plans) == 5 + NUM_IDS - 5
    logprobs = [one for output in outputs_of(rig, "second") for one in output.logprobs or ()]
    assert len(logprobs) == NUM_IDS
    assert logprobs[:5] == [one for output in outputs_of(rig, "first") for one in output.logprobs or ()]


def test_what_is_gone_on_with_and_broken_off_again_while_it_waits_keeps_everything() -> None:
    rig = KeyedRig(1)
    rig.call("first", max_tokens=NUM_IDS)
    steps(rig, 5)
    rig.leave("first")
    rig.submit("other", max_tokens=3)
    rig.step()
    rig.call("second", max_tokens=NUM_IDS)
    rig.step()
    rig.leave("second")
    rig.step()
    assert rig.ends["second"].reason is FinishReason.ABORT
    assert rig.ids["second"] == rig.ids["first"], "the end brings what was not sent yet"
    rig.call("third", max_tokens=NUM_IDS)
    rig.run()
    assert rig.ids["third"] == ids_alone()


def test_what_is_known_comes_with_the_row_and_not_only_with_the_next_id() -> None:
    rig = KeyedRig(budget=(4, 4))
    prompt = b"a prompt of several chunks"
    rig.call("first", prompt=prompt, max_tokens=NUM_IDS)
    while len(rig.ids["first"]) < 5:
        rig.step()
    rig.leave("first")
    rig.step()
    rig.call("second", prompt=prompt, max_tokens=NUM_IDS)
    rig.step()
    assert rig.ids["second"] == rig.ids["first"]
    rig.run()
    assert len(rig.ids["second"]) == NUM_IDS


def test_a_prompt_that_is_scored_begins_anew_so_that_no_id_comes_before_its_scores() -> None:
    rig = KeyedRig(budget=(4, 4))
    asked: dict[str, Any] = {"prompt": b"a longer prompt", "prompt_logprobs": 0, "max_tokens": NUM_IDS}
    rig.call("first", **asked)
    while len(rig.ids["first"]) < 5:
        rig.step()
    rig.leave("first")
    rig.call("second", **asked)
    rig.run()
    assert rig.ids["second"] == ids_alone(prompt=b"a longer prompt")
    outputs = outputs_of(rig, "second")
    begin = next(place for place, output in enumerate(outputs) if output.token_ids)
    scores = [len(output.prompt_logprobs or ()) for output in outputs]
    assert sum(scores[: begin + 1]) == len(b"a longer prompt") - 1 == sum(scores)
    assert rig.told["second"] == int(START_SECONDS)


def test_a_worker_that_is_gone_takes_only_its_own_readers_with_it() -> None:
    rig = KeyedRig()
    rig.call("first", worker="worker-1", max_tokens=NUM_IDS)
    rig.call("second", worker="worker-2", max_tokens=NUM_IDS)
    steps(rig, 3)
    rig.apply(WorkerGone("worker-1"), "worker-1")
    rig.run()
    assert rig.ids["second"] == ids_alone()
    assert len(rig.ids["first"]) == 3
    rig.call("third", worker="worker-2", key="b", max_tokens=NUM_IDS)
    steps(rig, 3)
    rig.apply(WorkerGone("worker-2"), "worker-2")
    assert rig.admission.num_requests == 0
    rig.call("fourth", key="b", max_tokens=NUM_IDS)
    rig.run()
    assert rig.ids["fourth"] == ids_alone()


def test_the_owner_ends_it_for_all_readers_also_for_one_on_its_way() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS)
    rig.call("second", max_tokens=NUM_IDS)
    steps(rig, 3)
    on_its_way = rig.claimed(keyed_submit("third", max_tokens=NUM_IDS))
    assert isinstance(on_its_way, KeyedSubmit)
    rig.delete()
    rig.apply(on_its_way)
    rig.run()
    assert {end.reason for end in rig.ends.values()} == {FinishReason.ABORT}
    assert rig.ids["first"] == rig.ids["second"] == rig.ids["third"] == ids_alone()[:3]
    assert rig.admission.num_requests == 0


def test_an_error_is_not_on_record_and_the_repetition_runs_anew() -> None:
    rig = KeyedRig()
    rig.call("first", max_tokens=NUM_IDS, total_seconds=5.0)
    steps(rig, 3)
    on_its_way = rig.claimed(keyed_submit("second", max_tokens=NUM_IDS))
    assert isinstance(on_its_way, KeyedSubmit)
    rig.step(6.0)
    rig.apply(on_its_way)
    rig.step()
    assert rig.ends["first"].error == rig.ends["second"].error is not None
    assert rig.ids["first"] == rig.ids["second"]
    assert len(rig.records) == 0
    assert rig.call("third", digest=b"two", max_tokens=NUM_IDS) == "computes"
    rig.run()
    assert rig.told["third"] == 0


def test_a_call_that_finds_no_place_leaves_no_record() -> None:
    rig = KeyedRig(1, queue=(0, 100))
    rig.submit("other", max_tokens=2)
    assert rig.call("first") == "full"
    assert len(rig.records) == 0
    rig.run()
    assert rig.call("first", digest=b"two") == "computes"
    rig.run()


def test_the_parts_of_a_call_are_on_record_each_for_itself_and_told_as_one_request() -> None:
    rig = KeyedRig()
    for part in range(2):
        rig.call(f"first-{part}", part=part, choice=part, max_tokens=4 + 4 * part, call_id="first")
    steps(rig, 5)
    rig.leave("first")
    rig.step()
    assert [rig.ends[f"first-{part}"].reason for part in range(2)] == [FinishReason.LENGTH, FinishReason.ABORT]
    for part in range(2):
        rig.call(f"second-{part}", part=part, choice=part, max_tokens=4 + 4 * part, call_id="second")
    waiting = rig.request("key")
    assert waiting is not None and waiting.num_completion_tokens == 4 + 5, "what goes on is not what has ended too"
    rig.run()
    assert [len(rig.ids[f"second-{part}"]) for part in range(2)] == [4, 8]
    view = rig.request("key")
    assert view is not None
    assert (view.num_prompt_tokens, view.num_completion_tokens) == (5, 12)


def test_a_stop_that_was_held_back_half_is_found_by_who_goes_on() -> None:
    rig = KeyedRig(script=DIGITS)
    asked: dict[str, Any] = {"prompt": b"12345", "stop_sequences": [b"901"], "max_tokens": 30}
    rig.call("first", **asked)
    while not rig.text("first").endswith(b"90"):
        rig.step()
    rig.call("second", **asked)
    rig.leave("first")
    rig.step()
    rig.leave("second")
    assert rig.text("second").endswith(b"901")
    rig.call("third", key="b", **asked)
    while not rig.text("third").endswith(b"90"):
        rig.step()
    rig.leave("third", key="b")
    rig.call("fourth", key="b", **asked)
    rig.run()
    for session_id in ("second", "fourth"):
        end = rig.ends[session_id]
        assert (end.reason, end.stop) == (FinishReason.STOP, b"901")
        assert rig.text(session_id) == b"5678901"


def test_a_sequence_that_makes_room_for_others_keeps_its_readers() -> None:
    rig = KeyedRig(2, context_tokens=64, options=SchedulerOptions(kv_tokens=64))
    rig.submit("oldest", b"o" * 20, max_tokens=30)
    rig.step()
    rig.call("first", max_tokens=NUM_IDS)
    while rig.query().num_rows_in_use == 2:
        rig.step()
        assert "oldest" not in rig.ends
    rig.call("second", max_tokens=NUM_IDS)
    rig.run()
    assert rig.ids["second"] == rig.ids["first"] == ids_alone()
