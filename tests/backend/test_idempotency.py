"""Check what is kept of calls with a key: for how long, how much of it, and for which call."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend import idempotency
from inference_api.backend.idempotency import BUSY, IdempotencyRecords, Recording, Verdict
from inference_api.backend.readers import Readers
from inference_api.messages import NO_TIMING, ErrorInfo, Finished, FinishReason, SequenceOutput, StepOutput
from inference_api.queues import MAX_FRAME_BYTES, encode_frame
from inference_api.sampling_params import TokenLogprobs
from tests.backend.keyed_rig import keyed_submit

BYTES_A_NUMBER = 48
"""What one takes at most: a float or an int of its own, and its place in a list."""

LENGTH = Finished(FinishReason.LENGTH, 3, NO_TIMING)
ABORT = Finished(FinishReason.ABORT, 3, NO_TIMING)
FAILED = Finished(FinishReason.ERROR, 3, NO_TIMING, error=ErrorInfo("generation_failed", "NaN"))


def begin(records: IdempotencyRecords, key: str = "key", now: float = 0.0, **changes: object) -> Recording:
    """Record a call that begins."""
    verdict = records.claim(keyed_submit("s", key=key, **changes), now)
    assert verdict.recording is not None and not verdict.is_repeat
    records.open(verdict.recording)
    return verdict.recording


def say(records: IdempotencyRecords, recording: Recording, num_ids: int, num_top: int | None = None) -> None:
    """Record ids, and their logprobs with so many likeliest ones."""
    logprobs = None if num_top is None else [TokenLogprobs(-1.0, [(0, -1.0)] * num_top)] * num_ids
    records.extend(recording, SequenceOutput("s", 0, 1, len(recording.token_ids), [7] * num_ids, logprobs=logprobs))


def ask(records: IdempotencyRecords, key: str = "key", now: float = 0.0, **changes: object) -> Verdict:
    """Make a call, without the consequences of being told to follow."""
    verdict = records.claim(keyed_submit("s2", key=key, **changes), now)
    if verdict.is_repeat and verdict.recording is not None:
        records.join(verdict.recording)
    return verdict


def is_known(records: IdempotencyRecords, key: str = "key", now: float = 0.0) -> bool:
    """Tell whether a key is on record: whether another call under it would be refused."""
    return ask(records, key, now, digest=b"another").recording is None


def test_a_record_is_kept_for_its_time_after_the_end_and_no_longer() -> None:
    records = IdempotencyRecords(10.0)
    recording = begin(records, now=0.0)
    assert is_known(records, now=1000.0), "a call that runs is known however long that takes"
    records.end(recording, LENGTH, 1000.0)
    assert is_known(records, now=1009.9)
    assert not is_known(records, now=1010.0)
    assert len(records) == records.num_numbers == 0


def test_without_a_time_to_keep_it_a_record_is_gone_with_its_end() -> None:
    records = IdempotencyRecords(0.0)
    recording = begin(records)
    assert ask(records).is_repeat
    records.end(recording, LENGTH, 5.0)
    assert not is_known(records, now=5.0)


def test_tenants_and_parts_never_share_a_key() -> None:
    records = IdempotencyRecords(10.0)
    begin(records)
    assert not ask(records, tenant="beta").is_repeat
    assert not ask(records, part=1).is_repeat
    assert ask(records).is_repeat


def test_an_end_that_failed_is_forgotten_and_one_that_was_broken_off_is_gone_on_with() -> None:
    records = IdempotencyRecords(10.0)
    failed, broken = begin(records, "failed"), begin(records, "broken", created=77)
    for recording in (failed, broken):
        say(records, recording, 3, 0)
    records.end(failed, FAILED, 0.0)
    assert not is_known(records, "failed")
    assert records.break_off(broken)
    records.end(broken, ABORT, 0.0)
    assert is_known(records, "broken")
    again = ask(records, "broken", created=99).recording
    assert again is not None and again is not broken
    assert (again.token_ids, len(again.logprobs), again.told_created, again.created) == ([7, 7, 7], 3, 77, 77)
    submit = again.continued(keyed_submit("s", prompt=b"abc"))
    assert (submit.token_ids, submit.num_prompt_tokens) == ([*b"abc", 7, 7, 7], 3)


def test_mirostats_state_goes_on_with_the_ids() -> None:
    records = IdempotencyRecords(10.0)
    recording = begin(records)
    records.extend(recording, SequenceOutput("s", 0, 1, 0, [7], mu=4.5))
    records.end(recording, ABORT, 0.0)
    again = ask(records).recording
    assert again is not None and again.continued(keyed_submit("s")).mu == 4.5


def test_nothing_is_broken_off_while_a_repetition_is_on_its_way() -> None:
    records = IdempotencyRecords(10.0)
    recording = begin(records)
    assert records.claim(keyed_submit("s2"), 0.0).is_repeat
    assert not records.break_off(recording)
    records.join(recording)
    assert records.break_off(recording)
    assert not ask(records).is_repeat, "who comes now goes on by itself"


def test_when_there_are_too_many_the_ended_ones_go_first_and_the_oldest_of_them() -> None:
    records = IdempotencyRecords(10.0, max_records=3)
    begin(records, "running")
    for key in ("first", "second", "third"):
        records.end(begin(records, key), LENGTH, 0.0)
    assert [is_known(records, key) for key in ("running", "first", "second", "third")] == [True, False, True, True]


@pytest.mark.parametrize("bounds", [{"max_records": 4}, {"max_numbers": 200}])
def test_whoever_holds_most_makes_room_and_nobody_elses_record_goes(bounds: dict[str, int]) -> None:
    records = IdempotencyRecords(10.0, **bounds)
    for tenant, key in (("beta", "ended"), ("beta", "running")):
        recording = begin(records, key, tenant=tenant)
        if key == "ended":
            records.end(recording, LENGTH, 0.0)
    for number in range(20):
        recording = begin(records, f"flood {number}", tenant="alpha")
        say(records, recording, 30)
        records.end(recording, LENGTH, 0.0)
    digest = {"tenant": "beta", "digest": b"another"}
    assert [ask(records, key, **digest).recording for key in ("ended", "running")] == [None, None]
    assert len(records) <= bounds.get("max_records", 5) and records.num_numbers <= bounds.get("max_numbers", 200)


def test_one_that_runs_beyond_the_bound_is_forgotten_and_what_it_still_says_counts_no_more() -> None:
    records = IdempotencyRecords(10.0, max_numbers=100)
    recording = begin(records)
    say(records, recording, 200)
    assert (len(records), records.num_numbers) == (0, 0)
    again = begin(records, digest=b"another")
    say(records, recording, 50)
    records.end(recording, LENGTH, 0.0)
    assert len(recording.token_ids) == 250, "those who read it miss nothing"
    assert (len(records), records.num_numbers) == (1, again.num_numbers)


def test_logprobs_and_embeddings_count_by_their_size() -> None:
    records = IdempotencyRecords(10.0)
    recording = begin(records)
    empty = records.num_numbers
    say(records, recording, 10)
    assert records.num_numbers == empty + 10
    say(records, recording, 10, num_top=20)
    assert records.num_numbers == empty + 20 + 10 * 21 * 3
    records.end(recording, Finished(FinishReason.STOP, 0, NO_TIMING, embedding=b"x" * 80), 0.0)
    assert records.num_numbers == empty + 20 + 10 * 21 * 3 + 10


def test_a_full_book_takes_no_more_memory_than_its_bound_stands_for() -> None:
    records = IdempotencyRecords(10.0, max_numbers=20_000)
    tracemalloc.start()
    try:
        for number in range(25):
            recording = begin(records, str(number))
            for first in range(300, 1300, 10):
                logprobs = [TokenLogprobs(-float(i), [(i * 9, -float(i)), (i * 8, -float(i))]) for i in range(3)]
                ids = list(range(first * 3, first * 3 + 3))
                index = len(recording.token_ids)
                records.extend(recording, SequenceOutput("s", 0, 1, index, ids, logprobs=logprobs))
            records.end(recording, LENGTH, 0.0)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 16_000 < records.num_numbers <= 20_000
    assert num_bytes < 20_000 * BYTES_A_NUMBER


def test_more_repetitions_at_once_than_one_message_holds_are_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_JOINING_NUMBERS", 500)
    records = IdempotencyRecords(10.0)
    recording = begin(records)
    say(records, recording, 200)
    records.end(recording, LENGTH, 0.0)
    repeated = [records.claim(keyed_submit("s2"), 0.0) for _ in range(3)]
    assert [verdict.is_repeat for verdict in repeated] == [True, True, False]
    assert repeated[2] == BUSY and recording.num_joining == 2
    records.join(recording)
    assert records.claim(keyed_submit("s2"), 0.0).is_repeat
    records.join(recording)
    records.join(recording)
    assert records.claim(keyed_submit("s2"), 0.0, may_follow=False) == BUSY
    assert recording.num_joining == 0


def test_the_most_that_repetitions_are_told_in_one_step_fits_a_frame() -> None:
    records = IdempotencyRecords(10.0)
    recording = begin(records)
    for _ in range(2048):
        top = [(40_000 + place, -0.1 * place) for place in range(20)]
        output = SequenceOutput("s", 0, 1, len(recording.token_ids), [40_000], logprobs=[TokenLogprobs(-0.1, top)])
        records.extend(recording, output)
    records.end(recording, LENGTH, 0.0)
    outputs = []
    while (verdict := records.claim(keyed_submit("s" * 32), 0.0)).is_repeat and len(outputs) < 100:
        readers = Readers(records, recording)
        readers.add(keyed_submit("s" * 32), "worker")
        outputs.append(readers)
    assert verdict == BUSY
    told = [output for readers in outputs for _, output in readers.replay()]
    assert MAX_FRAME_BYTES // 4 < len(encode_frame(StepOutput(told))) < MAX_FRAME_BYTES * 3 // 4


MOVES = st.lists(
    st.tuples(st.sampled_from(["begin", "say", "say", "end", "abort", "fail", "wait"]), st.integers(0, 9)), max_size=60
)


@given(moves=MOVES)
def test_the_bounds_hold_whatever_happens_and_the_sum_is_that_of_what_is_kept(moves: list[tuple[str, int]]) -> None:
    records = IdempotencyRecords(5.0, max_records=4, max_numbers=200)
    running: list[Recording] = []
    now = 0.0
    for move, number in moves:
        recording = running[number % len(running)] if running else None
        match move:
            case "begin":
                verdict = records.claim(keyed_submit("s", key=f"k{number}"), now)
                if verdict.recording is not None and not verdict.is_repeat:
                    records.open(verdict.recording)
                    running.append(verdict.recording)
            case "wait":
                now += number
            case "say" if recording is not None:
                say(records, recording, number * 5, num_top=number if number > 7 else None)
            case "end" | "abort" | "fail" if recording is not None:
                running.remove(recording)
                records.end(recording, {"end": LENGTH, "abort": ABORT, "fail": FAILED}[move], now)
        kept = [*records._open.values(), *records._ended.values()]
        assert len(kept) == len(records) <= 4
        assert records.num_numbers == sum(one.num_numbers for one in kept) <= 200
        assert sum(len(one.token_ids) for one in kept) <= records.num_numbers
