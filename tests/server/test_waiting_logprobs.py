"""Check that logprobs that wait come out as they went in, in order, once, and are small meanwhile."""

from __future__ import annotations

import math
import tracemalloc

from inference_api.sampling_params import TokenLogprobs
from inference_api.server.waiting_logprobs import WaitingLogprobs
from tests.server.fakes import logprobs_of


def test_positions_come_out_in_order_each_once_as_they_went_in() -> None:
    given = [TokenLogprobs(-0.1, [(7, -0.1), (2**40, -1e300)]), TokenLogprobs(-math.inf, []), TokenLogprobs(0.0, [])]
    waiting = WaitingLogprobs()
    waiting.extend(given[:2])
    assert waiting.take(1) == (given[0],)
    waiting.extend(given[2:])
    assert waiting.take(9) == tuple(given[1:])
    assert waiting.take() == ()
    assert not waiting and waiting.num_bytes == 0


def test_two_thousand_positions_with_twenty_ids_each_wait_in_less_than_a_megabyte_and_leave_nothing() -> None:
    waiting = WaitingLogprobs()
    waiting.extend(logprobs_of([1], 20))
    waiting.take()
    tracemalloc.start()
    try:
        for token_id in range(2048):
            waiting.extend(logprobs_of([token_id], 20))
        held_bytes = tracemalloc.get_traced_memory()[0]
        waiting.take()
        left_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 500_000 < waiting_bytes(2048) < held_bytes < 1 << 20
    assert left_bytes < 200_000, "Python itself keeps some tuples"


def waiting_bytes(count: int) -> int:
    """Return what so many positions with twenty ids each say that they take."""
    waiting = WaitingLogprobs()
    for token_id in range(count):
        waiting.extend(logprobs_of([token_id], 20))
    return waiting.num_bytes
