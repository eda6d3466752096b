"""Check delivery to sessions: order, ends, late and foreign ids, and readers that wait without using the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from inference_api.messages import FinishReason, SequenceOutput
from inference_api.sampling_params import TokenLogprobs
from inference_api.server import output_router
from inference_api.server.output_router import Delivery, OutputRouter, SessionStream
from tests.server.fakes import finished, tell_when_read


def _output(index: int, ids: list[int], *, session_id: str = "s0", epoch: int = 1, end=None) -> SequenceOutput:
    return SequenceOutput(session_id, 0, epoch, index, ids, end)


def test_mirostats_state_is_that_after_the_last_ids_that_came() -> None:
    stream = OutputRouter().open("s0")
    assert stream.mu is None
    for index, mu in enumerate((4.0, 3.5)):
        assert stream.deliver(SequenceOutput("s0", 0, 1, index, [5], mu=mu))
    assert stream.deliver(SequenceOutput("s0", 0, 1, 2, [], finished()))
    assert stream.mu == 3.5


def test_the_first_id_leaves_alone_and_those_that_queue_up_join_one_read() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(_output(0, [1, 2]))
    router.deliver(_output(2, [3]))
    router.deliver(_output(3, [4], end=finished()))
    assert stream.read() == Delivery((1,), None)
    assert stream.read() == Delivery((2, 3, 4), finished())


def test_a_reader_that_wants_the_whole_is_woken_by_the_end_alone() -> None:
    router = OutputRouter()
    woken: list[int] = []
    stream = router.open("s0", lambda: woken.append(1))
    router.deliver(_output(0, [1]))
    assert woken == [1]
    stream.only_end()
    router.deliver(_output(1, [2, 3]))
    router.deliver(_output(3, [4]))
    assert woken == [1]
    router.deliver(_output(4, [5], end=finished()))
    assert woken == [1, 1]
    assert stream.read() == Delivery((1,), None)
    assert stream.read() == Delivery((2, 3, 4, 5), finished())


def test_a_reader_that_wants_the_whole_is_woken_by_an_end_that_the_backend_does_not_make() -> None:
    router = OutputRouter()
    woken: list[int] = []
    stream = router.open("s0", lambda: woken.append(1))
    stream.only_end()
    router.close("s0", finished())
    assert woken == [1]
    assert stream.read() == Delivery((), finished())


def test_a_prompts_logprobs_wait_for_the_first_id_and_come_with_it_alone() -> None:
    router = OutputRouter()
    woken: list[int] = []
    stream = router.open("s0", lambda: woken.append(1))
    scored = [TokenLogprobs(-float(place), []) for place in range(4)]
    router.deliver(SequenceOutput("s0", 0, 1, 0, [], prompt_logprobs=scored[:2]))
    assert stream.read(0.0) is None and not woken
    router.deliver(SequenceOutput("s0", 0, 1, 0, [1, 2], prompt_logprobs=scored[2:]))
    assert woken
    assert stream.read() == Delivery((1,), None, (), tuple(scored))
    assert stream.read() == Delivery((2,), None)


def test_a_prompts_logprobs_come_with_an_end_that_has_no_ids() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    scored = [TokenLogprobs(-1.0, [])]
    router.deliver(SequenceOutput("s0", 0, 1, 0, [], finished(), prompt_logprobs=scored))
    assert stream.read() == Delivery((), finished(), (), tuple(scored))


def test_an_end_comes_once_all_ids_are_read_and_not_before() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(_output(0, [1, 2], end=finished()))
    assert stream.read() == Delivery((1,), None)
    assert stream.read() == Delivery((2,), finished())


def test_an_end_without_ids_is_a_delivery_of_its_own() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(SequenceOutput("s0", -1, 0, 0, [], finished(FinishReason.ABORT)))
    assert stream.read() == Delivery((), finished(FinishReason.ABORT))


def test_a_read_gives_up_after_its_time_and_loses_nothing() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    assert stream.read(0.0) is None
    router.deliver(_output(0, [1]))
    assert stream.read(0.0) == Delivery((1,), None)
    assert stream.read(0.0) is None


def test_ids_for_a_session_that_has_just_ended_are_late() -> None:
    router = OutputRouter()
    router.open("s0")
    router.close("s0")
    router.deliver(_output(0, [1, 2]))
    assert (router.late_tokens, router.foreign_tokens) == (2, 0)


def test_ids_for_a_session_that_never_was_are_foreign() -> None:
    router = OutputRouter()
    router.deliver(_output(0, [1, 2, 3]))
    assert (router.late_tokens, router.foreign_tokens) == (0, 3)


@pytest.mark.parametrize(
    "wrong",
    [_output(1, [2, 3], epoch=2), _output(2, [2, 3]), _output(0, [2, 3]), _output(1, [2, 3], epoch=2, end=finished())],
    ids=["epoch", "gap", "repeat", "epoch at the end"],
)
def test_an_output_that_does_not_fit_its_stream_ends_it_with_one_error_and_is_counted(wrong: SequenceOutput) -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.deliver(_output(0, [1]))
    router.deliver(wrong)
    assert stream.read() == Delivery((1,), output_router._BROKEN)
    assert stream.token_ids == [1]
    assert router.foreign_tokens == 2
    assert router.num_open == 0
    router.deliver(_output(1, [9], end=finished()))
    assert router.late_tokens == 1


def test_a_session_is_closed_by_its_terminal_event() -> None:
    router = OutputRouter()
    streams = [router.open(f"s{number}") for number in range(3)]
    assert router.num_open == 3
    router.deliver(_output(0, [1], session_id="s1", end=finished()))
    assert router.num_open == 2
    assert streams[1].read() == Delivery((1,), finished())


def test_a_session_that_the_worker_closes_gets_the_end_it_is_given() -> None:
    router = OutputRouter()
    stream = router.open("s0")
    router.close("s0", finished(error="backend_lost"))
    router.close("s0", finished())
    delivery = stream.read()
    assert delivery is not None
    assert delivery.finished == finished(error="backend_lost")


def test_the_memory_of_ended_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_router, "MAX_ENDED_SESSIONS", 2)
    router = OutputRouter()
    for number in range(4):
        router.open(f"s{number}")
        router.close(f"s{number}")
    for number in range(4):
        router.deliver(_output(0, [1], session_id=f"s{number}"))
    assert (router.late_tokens, router.foreign_tokens) == (2, 2)


def test_a_reader_that_waits_gets_the_id_as_soon_as_it_is_delivered() -> None:
    stream = SessionStream("s0")
    got: list[Delivery | None] = []
    reader = threading.Thread(target=lambda: got.append(stream.read(30.0)))
    reader.start()
    stream.deliver(_output(0, [5]))
    reader.join()
    assert got == [Delivery((5,), None)]


def test_thirty_two_waiting_readers_use_no_cpu() -> None:
    streams = [SessionStream(f"s{number}") for number in range(32)]
    readers = [threading.Thread(target=stream.read, args=(30.0,)) for stream in streams]
    for reader in readers:
        reader.start()
    began = time.process_time()
    threading.Event().wait(0.3)
    used = time.process_time() - began
    for stream in streams:
        stream.end(finished())
    for reader in readers:
        reader.join()
    assert used < 0.03


def test_a_slow_reader_holds_up_nobody() -> None:
    router = OutputRouter()
    slow, fast = router.open("slow"), router.open("fast")
    for index in range(2048):
        router.deliver(_output(index, [index], session_id="slow"))
        router.deliver(_output(index, [index], session_id="fast"))
        assert fast.read(0.0) == Delivery((index,), None)
    assert slow.read(0.0) == Delivery((0,), None)
    assert slow.read(0.0) == Delivery(tuple(range(1, 2048)), None)


def _relay_in_a_thread(stream: SessionStream, take: Callable[[tuple[int, ...]], bool]) -> Callable[[], list[str]]:
    """Relay in a thread of its own; return once it waits. The function that comes back joins it and tells its error."""
    waits, errors = tell_when_read(stream), []

    def run() -> None:
        try:
            stream.relay(take)
        except ValueError as error:
            errors.append(str(error))

    reader = threading.Thread(target=run)
    reader.start()
    assert waits.wait(10.0)

    def join() -> list[str]:
        reader.join(10.0)
        assert not reader.is_alive()
        return errors

    return join


def _open_and_read_first(router: OutputRouter) -> SessionStream:
    stream = router.open("s0")
    router.deliver(_output(0, [1]))
    assert stream.read() == Delivery((1,), None)
    return stream


def test_a_relay_takes_what_arrived_together_in_the_delivering_thread_and_leaves_the_end_to_the_reader() -> None:
    router = OutputRouter()
    stream = _open_and_read_first(router)
    taken: list[tuple[tuple[int, ...], threading.Thread]] = []
    join = _relay_in_a_thread(stream, lambda ids: taken.append((ids, threading.current_thread())) is None)
    router.deliver(_output(1, [2]))
    router.deliver(_output(2, [3, 4]))
    assert taken == []
    router.pass_on()
    router.pass_on()
    router.deliver(_output(4, [5], end=finished()))
    router.pass_on()
    assert join() == []
    assert taken == [((2, 3, 4), threading.current_thread())]
    assert stream.read() == Delivery((5,), finished())


def test_a_relay_that_can_take_no_more_hands_back_to_the_reader_and_nothing_is_lost() -> None:
    router = OutputRouter()
    stream = _open_and_read_first(router)
    taken: list[tuple[int, ...]] = []
    join = _relay_in_a_thread(stream, lambda ids: taken.append(ids) is not None)
    for index in (1, 2):
        router.deliver(_output(index, [index]))
        router.pass_on()
    assert join() == []
    assert taken == [(1,)]
    assert stream.read() == Delivery((2,), None)


def test_an_error_of_a_relay_is_raised_where_the_request_runs() -> None:
    router = OutputRouter()
    stream = _open_and_read_first(router)

    def take(token_ids: tuple[int, ...]) -> bool:
        raise ValueError(f"cannot send {token_ids}")

    join = _relay_in_a_thread(stream, take)
    router.deliver(_output(1, [2]))
    router.pass_on()
    assert join() == ["cannot send (2,)"]


@pytest.mark.parametrize("end", [None, finished()], ids=["ids", "end"])
def test_a_relay_begins_only_once_all_that_has_come_is_read(end) -> None:
    router = OutputRouter()
    stream = router.open("s0")
    stream.relay(lambda ids: True)  # the first id is for `read`
    router.deliver(_output(0, [1]))
    assert stream.read() == Delivery((1,), None)
    router.deliver(_output(1, [] if end else [2], end=end))
    stream.relay(lambda ids: True)
    assert stream.read(0.0) == Delivery(() if end else (2,), end)


def test_a_relay_ends_with_a_session_that_the_worker_closes() -> None:
    router = OutputRouter()
    stream = _open_and_read_first(router)
    join = _relay_in_a_thread(stream, lambda ids: True)
    router.close("s0", finished(error="backend_lost"))
    assert join() == []
    assert stream.read() == Delivery((), finished(error="backend_lost"))
