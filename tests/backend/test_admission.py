"""Check the bound of the input queue: decided at once, exact under racing threads."""

from __future__ import annotations

import threading

from inference_api.backend.admission import Admission
from inference_api.messages import RefusalReason


def test_rows_and_queue_places_are_taken_then_refused_at_once() -> None:
    admission = Admission(2, 1, 1000)
    assert [admission.take(5) for _ in range(4)] == [0, 0, 1, RefusalReason.QUEUE_FULL]
    assert admission.num_requests == 3


def test_a_place_given_back_can_be_taken_again() -> None:
    admission = Admission(1, 0, 1000)
    assert admission.take(5) == 0
    assert admission.take(5) is RefusalReason.QUEUE_FULL
    admission.start(5)
    admission.release(1.0)
    assert admission.take(5) == 0


def test_waiting_prompt_tokens_are_bounded_and_a_started_prompt_no_longer_counts() -> None:
    admission = Admission(1, 9, 100)
    assert admission.take(60) == 0
    assert admission.take(41) is RefusalReason.QUEUE_FULL
    assert admission.take(40) == 1
    admission.start(60)
    assert admission.take(60) == 2


def test_a_prompt_that_waits_again_counts_again_and_keeps_its_place() -> None:
    admission = Admission(1, 9, 100)
    admission.take(60)
    admission.start(60)
    admission.wait_again(60)
    assert admission.take(41) is RefusalReason.QUEUE_FULL
    assert admission.take(40) == 1
    assert admission.num_requests == 2


def test_a_prompt_over_the_token_bound_is_taken_when_nothing_waits() -> None:
    assert Admission(1, 9, 100).take(2000) == 0


def test_draining_refuses_everything_and_says_why() -> None:
    admission = Admission(4, 4, 100)
    admission.take(1)
    admission.drain()
    assert admission.draining
    assert admission.take(1) is RefusalReason.DRAINING
    assert admission.num_requests == 1


def test_counts_are_exact_when_sixteen_threads_race() -> None:
    admission = Admission(32, 96, 10**9)
    taken: list[int] = []
    start = threading.Barrier(16)

    def race() -> None:
        start.wait()
        for _ in range(50):
            place = admission.take(3)
            if not isinstance(place, RefusalReason):
                taken.append(place)

    threads = [threading.Thread(target=race) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 128 == admission.num_requests
    assert sorted(taken) == [0] * 32 + list(range(1, 97))
    for _ in taken:
        admission.start(3)
        admission.release(None)
    assert admission.num_requests == 0
    assert admission._num_waiting_tokens == 0


def test_the_estimate_follows_how_long_requests_hold_a_row() -> None:
    admission = Admission(4, 9, 1000)
    assert admission.eta_seconds(0) == 0.0
    before = admission.eta_seconds(4)
    for _ in range(100):
        admission.take(1)
        admission.start(1)
        admission.release(20.0)
    assert before == 1.0
    assert 19.0 < admission.eta_seconds(4) < 20.1


def test_an_abandoned_place_in_the_queue_leaves_the_estimate_alone() -> None:
    admission = Admission(4, 9, 1000)
    admission.take(1)
    admission.release(None)
    assert admission.eta_seconds(4) == 1.0


def test_prompts_for_which_rows_are_free_do_not_count_as_waiting() -> None:
    admission = Admission(num_rows=4, queue_requests=2, queue_tokens=100)
    assert [admission.take(90) for _ in range(4)] == [0, 0, 0, 0]
    assert admission.take(90) is RefusalReason.QUEUE_FULL
