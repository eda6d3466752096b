"""Check that logprobs nobody reads stay in their bound, that their stream alone is cut, that no reader loses one."""

from __future__ import annotations

import tracemalloc

import pytest

from inference_api.errors import ReaderBehindError
from inference_api.messages import FinishReason, SequenceOutput
from inference_api.server import output_router
from inference_api.server.output_router import MAX_READ_LOGPROBS, Delivery, OutputRouter, SessionStream
from tests.server.fakes import finished, logprobs_of

NUM_TOP = 20


def _output(index: int, count: int = 1, session_id: str = "s0", end=None) -> SequenceOutput:
    ids = list(range(index, index + count))
    return SequenceOutput(session_id, 0, 1, index, ids, end, logprobs_of(ids, NUM_TOP))


def _read_all(stream: SessionStream) -> tuple[list[int], list[object], list[Delivery]]:
    """Return the ids and logprobs that have come, and the reads that gave them."""
    reads = []
    while (delivery := stream.read(0.0)) is not None:
        reads.append(delivery)
        if delivery.finished is not None:
            break
    return [it for one in reads for it in one.token_ids], [it for one in reads for it in one.logprobs], reads


def test_a_read_hands_out_a_few_positions_at_a_time_and_none_is_lost() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(_output(0, 100))
    router.deliver(_output(100, 20, end=finished()))
    ids, logprobs, reads = _read_all(stream)
    assert ids == list(range(120))
    assert logprobs == logprobs_of(ids, NUM_TOP)
    assert [len(one.token_ids) for one in reads] == [1, *[MAX_READ_LOGPROBS] * 3, 120 - 1 - 3 * MAX_READ_LOGPROBS]
    assert [one.finished for one in reads] == [None] * 4 + [finished()]


def test_what_has_been_read_is_held_no_more() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    tracemalloc.start()
    try:
        for index in range(2000):
            router.deliver(_output(index))
            stream.read(0.0)
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held_bytes < 200_000


def test_a_stream_whose_reader_takes_nothing_is_cut_with_its_reason_within_its_bound_and_no_other_is() -> None:
    router = OutputRouter()
    stalled, read = router.open("stalled"), router.open("read")
    tracemalloc.start()
    try:
        for index in range(2000):
            if not router.deliver(_output(index, session_id="stalled")):
                break
            assert router.deliver(_output(index, session_id="read"))
            assert read.read(0.0) == Delivery((index,), None, tuple(logprobs_of([index], NUM_TOP)))
        held_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 800 < index < 1200
    assert held_bytes < 2 * output_router.MAX_WAITING_LOGPROB_BYTES
    ids, logprobs, reads = _read_all(stalled)
    assert ids == list(range(index + 1))
    assert logprobs == logprobs_of(ids, NUM_TOP)
    end = reads[-1].finished
    assert end is not None and end.error is not None
    assert (end.reason, end.error.code, end.num_completion_tokens) == (
        FinishReason.ERROR,
        ReaderBehindError.code,
        index + 1,
    )
    assert end.error.message == "The reader left more than 256 KiB of logprobs unread."
    assert router.foreign_tokens == 0
    assert router.deliver(_output(index + 1, session_id="stalled")) and router.late_tokens == 1
    assert router.num_open == 1


def test_a_reader_that_goes_on_may_lag_several_times_as_far_as_one_that_has_stopped() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    num_ids = 0
    while router.deliver(_output(num_ids, 100)):
        num_ids += 100
        stream.read(0.0)
    assert stream._logprobs.num_bytes > output_router.MAX_LAGGING_LOGPROB_BYTES > 4 * 256 << 10
    assert 3 < num_ids / stream.num_read < 4, "it took a third of what came"


def test_an_answer_that_is_wanted_whole_may_wait_whole() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    stream.only_end()
    assert all(router.deliver(_output(index)) for index in range(1999))
    assert router.deliver(_output(1999, end=finished()))
    ids, logprobs, reads = _read_all(stream)
    assert logprobs == logprobs_of(ids, NUM_TOP) and len(ids) == 2000
    assert reads[-1].finished == finished()


def test_what_a_repetition_missed_comes_at_once_and_is_no_sign_of_a_slow_reader() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    assert router.deliver(_output(0, 1800))
    assert router.deliver(_output(1800))
    for index in range(1801, 2000):
        assert router.deliver(_output(index))
        stream.read(0.0, one_by_one=True)
    assert router.num_open == 1


@pytest.mark.parametrize("count", [1, 2000])
def test_an_end_that_comes_with_much_is_the_backends_own(count: int) -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(_output(0))
    assert router.deliver(_output(1, count, end=finished()))
    assert _read_all(stream)[2][-1].finished == finished()
