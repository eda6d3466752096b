"""Check one generation's memory: its deadlines, its progress, its end and its timing."""

from __future__ import annotations

import pytest

from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.messages import ErrorInfo, FinishReason, Timing
from tests.backend.factories import make_submit

# Clock readings at which adding a limit and taking the reading away again does not give the limit back.
_ARRIVALS = [1000.0, 844.717949, 8184.809515, 8190.618871]


@pytest.mark.parametrize("arrived_at", _ARRIVALS)
def test_each_deadline_names_the_limit_that_it_stands_for(arrived_at: float) -> None:
    sequence = Sequence(make_submit("s0"), "worker-1", arrived_at)
    assert sequence.deadline == pytest.approx(arrived_at + 60)
    assert sequence.deadline_text == "No row became free within 60 seconds."
    sequence.start(3, 1, arrived_at + 1)
    assert sequence.deadline == pytest.approx(arrived_at + 120)
    assert sequence.deadline_text == "The first token took longer than 120 seconds."
    sequence.advance(5)
    sequence.append(97, b"a", arrived_at + 2)
    assert sequence.deadline == pytest.approx(arrived_at + 600)
    assert sequence.deadline_text == "The request took longer than 600 seconds."


def test_the_shortest_limit_comes_first_whichever_it_is() -> None:
    sequence = Sequence(make_submit("s0", total_seconds=2.0), "worker-1", 10.0)
    assert sequence.deadline == 12.0
    assert sequence.deadline_text == "The request took longer than 2 seconds."


def test_a_sequence_decodes_once_its_computed_ids_catch_up_with_its_known_ones() -> None:
    sequence = Sequence(make_submit("s0", b"hello"), "worker-1", 0.0)
    assert sequence.status is SequenceStatus.WAITING
    sequence.start(0, 1, 1.0)
    sequence.advance(3)
    assert (sequence.status, sequence.num_uncomputed_tokens) == (SequenceStatus.PREFILLING, 2)
    sequence.advance(2)
    assert (sequence.status, sequence.num_uncomputed_tokens) == (SequenceStatus.DECODING, 0)
    sequence.append(97, b"a", 2.0)
    assert (sequence.num_uncomputed_tokens, sequence.num_completion_tokens) == (1, 1)


def test_a_stop_in_recalled_output_and_new_ids_is_found_where_it_completes() -> None:
    sequence = Sequence(make_submit("s0", b"helloab", num_prompt_tokens=5, stop_sequences=[b"abc"]), "worker-1", 0.0)
    sequence.recall([b"a", b"b"])
    assert sequence.num_completion_tokens == 2
    assert sequence.append(99, b"c", 1.0)
    assert sequence.finish(FinishReason.STOP, 1.0).stop == b"abc"


def test_only_an_end_by_stop_tells_the_stop_bytes() -> None:
    sequence = Sequence(make_submit("s0", stop_sequences=[b"a"]), "worker-1", 0.0)
    assert sequence.append(97, b"a", 1.0)
    finished = sequence.finish(FinishReason.ABORT, 2.0)
    assert finished.stop is None
    assert sequence.status is SequenceStatus.FINISHED


def test_timing_splits_the_time_at_the_row_and_at_the_first_id() -> None:
    sequence = Sequence(make_submit("s0"), "worker-1", 10.0)
    sequence.start(0, 1, 12.0)
    sequence.batch_size = 3
    sequence.append(97, b"a", 15.0)
    error = ErrorInfo("generation_failed", "x")
    expected = Timing(queue_seconds=2.0, prefill_seconds=3.0, decode_seconds=4.0, batch_size=3, context_tokens=6)
    assert sequence.finish(FinishReason.ERROR, 19.0, error).timing == expected
    assert sequence.timing(99.0) == expected


def test_a_sequence_that_leaves_its_row_waits_with_all_that_it_knows_and_no_queue_deadline() -> None:
    sequence = Sequence(make_submit("s0", b"hello"), "worker-1", 10.0)
    sequence.start(2, 1, 11.0)
    sequence.advance(5)
    sequence.append(97, b"a", 12.0)
    sequence.preempt()
    assert (sequence.status, sequence.token_ids) == (SequenceStatus.WAITING, [*b"helloa"])
    assert sequence.deadline_text == "The request took longer than 600 seconds."
    sequence.start(0, 1, 30.0)
    assert (sequence.status, sequence.num_uncomputed_tokens) == (SequenceStatus.PREFILLING, 6)
    sequence.reuse(5)
    assert sequence.num_uncomputed_tokens == 1
    assert sequence.timing(31.0).queue_seconds == 1.0, "the first row ends the time in the queue"


def test_timing_of_a_request_that_never_had_a_row_is_all_queue() -> None:
    sequence = Sequence(make_submit("s0"), "worker-1", 10.0)
    timing = sequence.finish(FinishReason.ABORT, 14.0).timing
    assert (timing.queue_seconds, timing.prefill_seconds, timing.decode_seconds) == (4.0, 0.0, 0.0)
