"""Check the memory of the moving windows: exact at the edge, and bounded whoever comes and goes."""

from __future__ import annotations

import random

import pytest

from proxy.counted_windows import CountedWindow, LocalWindows
from proxy.window_storage import BoundedStorage


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_moving_window_is_what_its_definition_says(clock: Clock) -> None:
    windows, rng, passed = LocalWindows(clock), random.Random(7), list[float]()
    window = CountedWindow("a", 5, 10)
    for _ in range(3000):
        clock.seconds += rng.choice([0.0, 0.25, 0.5, 1.0, 3.0])
        recent = [moment for moment in passed if clock.seconds - moment < 10]
        (state,) = windows.take([window])
        assert state.is_full == (len(recent) >= 5)
        if not state.is_full:
            passed.append(clock.seconds)
            recent.append(clock.seconds)
        assert state.remaining == 5 - len(recent)
        assert state.reset_seconds == recent[0] + 10 - clock.seconds
    assert len(passed) > 500


def test_a_lower_count_of_the_same_window_is_free_again_when_its_own_calls_leave(clock: Clock) -> None:
    windows = LocalWindows(clock)
    for clock.seconds in (0.0, 1.0, 2.0):
        windows.take([CountedWindow("a", 3, 10)])
    (state,) = windows.look([CountedWindow("a", 1, 10)])
    assert state.is_full and state.reset_seconds == 10.0
    (state,) = windows.look([CountedWindow("a", 2, 10)])
    assert state.is_full and state.reset_seconds == 9.0
    (state,) = windows.look([CountedWindow("a", 0, 10)])
    assert state.is_full and state.reset_seconds == 10.0


def test_a_call_is_counted_in_all_windows_or_in_none(clock: Clock) -> None:
    windows = LocalWindows(clock)
    wide, narrow = CountedWindow("a", 3, 10), CountedWindow("b", 1, 10)
    assert not any(state.is_full for state in windows.take([wide, narrow]))
    assert [state.is_full for state in windows.take([wide, narrow])] == [False, True]
    assert (windows.count(wide), windows.count(narrow)) == (1, 1)


def test_windows_of_two_lengths_are_two(clock: Clock) -> None:
    windows = LocalWindows(clock)
    windows.take([CountedWindow("a", 1, 10), CountedWindow("a", 5, 100)])
    clock.seconds = 10.0
    states = windows.take([CountedWindow("a", 1, 10), CountedWindow("a", 5, 100)])
    assert [(state.is_full, state.remaining) for state in states] == [(False, 0), (False, 3)]


def test_keys_that_are_asked_for_no_more_are_forgotten(clock: Clock) -> None:
    storage = BoundedStorage(clock)
    for number in range(500):
        storage.acquire_entry(f"tenant-{number}", 5, 60)
    assert len(storage) == 500
    clock.seconds = 60.0
    for _ in range(260):
        storage.acquire_entry("tenant-0", 100_000, 60)
    assert len(storage) == 1


def test_ever_new_keys_do_not_fill_the_memory(clock: Clock) -> None:
    storage = BoundedStorage(clock, max_keys=100)
    storage.acquire_entry("regular", 2, 60)
    for number in range(5000):
        clock.seconds += 0.001
        storage.acquire_entry(f"tenant-{number}", 5, 60 if number % 2 else 10)
        storage.get_moving_window("regular", 2, 60)
        assert len(storage) <= 100
    assert storage.get_moving_window("regular", 2, 60)[1] == 1


def test_times_that_count_no_more_are_not_kept(clock: Clock) -> None:
    storage = BoundedStorage(clock)
    for _ in range(1000):
        clock.seconds += 1
        assert storage.acquire_entry("a", 1000, 10)
    assert storage.count_since("a", 10, 0.0) == 10
    assert storage.count_since("a", 10, 998.0) == 2
