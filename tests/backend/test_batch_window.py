"""Hold the batch window to its promise: started by the first, never put off, capped, in order, and nobody is lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.batch_window import BatchWindow
from inference_api.backend.sequence import Sequence
from tests.backend.factories import WORKER, make_submit

SECONDS = 2.0


def make_sequence(number: int) -> Sequence:
    return Sequence(make_submit(f"s{number}"), WORKER, 0.0)


def test_without_a_window_nobody_is_held() -> None:
    window = BatchWindow(0.0, 32)
    assert not window.hold(make_sequence(0), 5.0)
    assert (len(window), window.ends_at, window.take(9.0)) == (0, math.inf, [])


def test_the_window_begins_with_the_first_and_later_ones_do_not_put_it_off() -> None:
    window = BatchWindow(SECONDS, 32)
    sequences = [make_sequence(number) for number in range(3)]
    for now, sequence in zip((10.0, 11.0, 11.9), sequences, strict=True):
        assert window.hold(sequence, now)
        assert window.ends_at == 12.0
    assert window.take(11.99) == []
    assert window.take(12.0) == sequences
    assert (len(window), window.ends_at) == (0, math.inf)


def test_who_comes_after_a_full_window_begins_another_one() -> None:
    window = BatchWindow(SECONDS, 2)
    sequences = [make_sequence(number) for number in range(5)]
    for now, sequence in zip((10.0, 10.5, 11.0, 11.5, 12.0), sequences, strict=True):
        window.hold(sequence, now)
    assert window.ends_at == -math.inf
    assert list(window) == sequences
    assert window.take(12.0) == sequences[:4]
    assert window.ends_at == 14.0
    assert window.take(12.0, at_once=True) == sequences[4:]


def test_the_first_may_leave_and_the_window_still_ends_when_it_would_have() -> None:
    window = BatchWindow(SECONDS, 32)
    first, second, stranger = (make_sequence(number) for number in range(3))
    window.hold(first, 10.0)
    window.hold(second, 11.0)
    assert window.drop(first)
    assert not window.drop(stranger)
    assert window.take(12.0) == [second]


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("hold"), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0.0, 0.3, 1.0, 2.0, 5.0])),
        st.tuples(st.just("drop"), st.integers(0, 30)),
    ),
    max_size=60,
)


@given(moves=MOVES, max_requests=st.integers(1, 5))
def test_everybody_starts_once_and_in_order_no_later_than_the_window_and_no_sooner_than_it_or_the_cap(
    moves, max_requests
) -> None:
    window = BatchWindow(SECONDS, max_requests)
    now = 0.0
    arrived: list[tuple[Sequence, float]] = []
    gone: set[Sequence] = set()
    started: list[Sequence] = []
    for move, number in moves:
        if move == "hold":
            arrived.append((make_sequence(len(arrived)), now))
            assert window.hold(*arrived[-1])
        elif move == "wait":
            now += number
        elif number < len(arrived):
            sequence = arrived[number][0]
            if window.drop(sequence):
                assert sequence not in started
                gone.add(sequence)
        is_due = window.ends_at <= now
        batch = window.take(now)
        assert is_due == bool(batch) or not is_due
        if batch:
            came = [at for sequence, at in arrived if sequence in batch]
            assert now >= min(came) + SECONDS or len(batch) >= max_requests or window.ends_at > now
        started += batch
        left = [at for sequence, at in arrived if sequence not in gone and sequence not in started]
        assert all(at + SECONDS > now for at in left)
        assert len(left) < max_requests
        assert len(window) == len(left)
    started += window.take(now + SECONDS)
    assert started == [sequence for sequence, _ in arrived if sequence not in gone]
