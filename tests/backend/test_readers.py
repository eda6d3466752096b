"""Check what the readers of one generation get: all of it, each for itself, whenever they come and go."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.idempotency import IdempotencyRecords
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.readers import Readers
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason, SequenceOutput
from tests.backend.factories import Rig
from tests.backend.keyed_rig import KeyedRig, keyed_submit


def make_readers(*sessions: str) -> Readers:
    """Return readers of one recording that is on record."""
    records = IdempotencyRecords(600.0)
    recording = records.claim(keyed_submit("first"), 0.0).recording
    assert recording is not None
    readers = Readers(records, recording)
    assert readers.begin() == 0
    for session_id in sessions:
        readers.add(keyed_submit(session_id), f"worker of {session_id}")
    return readers


def made(index: int, *token_ids: int) -> SequenceOutput:
    """Return what a step made in row 3."""
    return SequenceOutput("whoever", 3, 9, index, list(token_ids))


def test_everybody_gets_an_output_under_its_own_name() -> None:
    readers = make_readers("a", "b")
    assert readers.take(made(0, 5, 6), None) == [
        ("worker of a", SequenceOutput("a", 3, 9, 0, [5, 6])),
        ("worker of b", SequenceOutput("b", 3, 9, 0, [5, 6])),
    ]


def test_who_comes_late_gets_what_it_missed_once_alone_or_with_the_next_ids() -> None:
    readers = make_readers("a")
    readers.take(made(0, 5, 6), None)
    readers.add(keyed_submit("b"), "w")
    assert readers.catch_up(3, 9) == [("w", SequenceOutput("b", 3, 9, 0, [5, 6]))]
    assert readers.catch_up(3, 9) == []
    readers.add(keyed_submit("c"), "w")
    assert [output for _, output in readers.take(made(2, 7), None)] == [
        SequenceOutput("a", 3, 9, 2, [7]),
        SequenceOutput("b", 3, 9, 2, [7]),
        SequenceOutput("c", 3, 9, 0, [5, 6, 7]),
    ]


def test_who_is_dismissed_gets_nothing_more_and_the_last_one_is_not_dismissed_but_broken_off() -> None:
    readers = make_readers("a", "b")
    assert not readers.break_off(lambda reader: reader.session_id == "a")
    ((worker, _),) = readers.dismiss(lambda reader: reader.session_id == "a", made(0))
    assert worker == "worker of a"
    assert [output.session_id for _, output in readers.take(made(0, 5), None)] == ["b"]
    assert readers.break_off(lambda reader: reader.session_id == "b")
    assert readers.is_ended


@functools.cache
def ids_alone() -> list[int]:
    """Return what the call of the histories says without a key."""
    rig = Rig()
    rig.submit("alone", max_tokens=9)
    rig.run()
    return rig.ids["alone"]


@settings(max_examples=80, deadline=None)
@given(
    moves=st.lists(st.sampled_from(["call", "leave", "step", "delete", "other", "lose"]), max_size=40),
    kv_tokens=st.sampled_from([0, 32, 40]),
)
def test_whatever_readers_do_each_gets_one_end_and_a_beginning_of_the_same_ids(
    moves: list[str], kv_tokens: int
) -> None:
    options = SchedulerOptions(kv_tokens, prefix_reuse=True)
    rig = KeyedRig(2, context_tokens=32, budget=(3, 9), options=options, records=IdempotencyRecords(600.0))
    expected, called, lost = ids_alone(), 0, set()
    for number, move in enumerate(moves):
        match move:
            case "call":
                rig.call(f"c{called}", worker=f"worker-{called % 2}", max_tokens=9)
                called += 1
            case "leave" if called:
                rig.leave(f"c{number % called}")
            case "delete":
                rig.delete()
            case "other":
                rig.offer(f"o{number}", b"other", max_tokens=9)
            case "lose":
                open_ids = {f"c{index}" for index in range(number % 2, called, 2)} - rig.ends.keys()
                lost |= open_ids
                rig.apply(WorkerGone(f"worker-{number % 2}"))
            case _:
                rig.step()
    rig.run()
    assert {f"c{index}" for index in range(called)} == {s for s in rig.ends if s[0] == "c"} | lost
    for session_id, ids in rig.ids.items():
        if session_id[0] == "c":
            assert ids == expected[: len(ids)]
            end = rig.ends.get(session_id)
            assert end is None or end.reason is FinishReason.ABORT or len(ids) == 9
    assert rig.admission.num_requests == 0
    assert not rig.scheduler._records._open
