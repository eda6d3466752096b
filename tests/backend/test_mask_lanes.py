"""Check the lanes: bits are found beside the caller, a slow mask keeps nobody but its own row, and every wait ends."""

from __future__ import annotations

import gc
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence

import pytest

from inference_api.backend import mask_lanes
from inference_api.backend.engines.base import MaskError
from inference_api.backend.mask_lanes import SLOW_NICENESS, MaskLanes

WAIT_SECONDS = 10.0


class HeldMask:
    """A mask that finds its bits when the test lets it, and remembers where and how often."""

    def __init__(self, *, held: bool = False, failure: BaseException | None = None) -> None:
        self.may_go = threading.Event()
        self.failure = failure
        self.threads: list[str] = []
        self.niceness = -1
        self._bits: dict[int, bytes] = {}
        if not held:
            self.may_go.set()

    def guess(self, ids: Sequence[int], proposal: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        return tuple(proposal[:max_tokens])

    def prepare(self, ids: Sequence[int], draft_ids: Sequence[int] = ()) -> None:
        self.threads.append(threading.current_thread().name)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert self.may_go.wait(WAIT_SECONDS)
        if self.failure is not None:
            raise self.failure
        self._bits = {len(ids) + count: bytes([len(ids), count]) for count in range(len(draft_ids) + 1)}

    def forced_id(self, ids: Sequence[int]) -> int | None:
        return len(ids)

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        self.threads.append("caller")
        return token_id == len(ids)

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self._bits[len(ids)]


@pytest.fixture
def told() -> queue.SimpleQueue[None]:
    return queue.SimpleQueue()


@pytest.fixture
def lanes(told: queue.SimpleQueue[None]) -> Iterator[MaskLanes]:
    lanes = MaskLanes(lambda: told.put(None))
    yield lanes
    lanes.close()


@pytest.fixture
def all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every mask have been slow once it has found its first bits."""
    monkeypatch.setattr(mask_lanes, "SLOW_SECONDS", -1.0)


def test_bits_are_found_beside_the_caller_for_the_next_id_and_after_each_draft(lanes: MaskLanes) -> None:
    inner = HeldMask()
    mask = lanes.ahead(inner)
    assert not mask.is_late([7])
    mask.expect([7], (1, 2))
    assert [mask.allowed([7, *drafts]) for drafts in ((), (1,), (1, 2))] == [b"\1\0", b"\1\1", b"\1\2"]
    assert inner.threads == ["masks"]


def test_bits_are_found_ahead_where_they_are_sure_to_be_needed_or_were_the_last_time(lanes: MaskLanes) -> None:
    inner = HeldMask()
    mask = lanes.ahead(inner)
    mask.expect([7])
    assert mask.takes([7], 1) and not mask.takes([7], 0)
    assert inner.threads == ["caller"] * 2
    mask.expect([7, 8])
    assert mask.allowed([7, 8]) == b"\2\0"  # in a lane too, so that it is known for slow if it is
    mask.expect([7, 8, 9])
    assert mask.takes([7, 8, 9], 0)  # once it is found there
    mask.expect([7, 8, 9, 10])  # nobody has asked for bits in between
    assert inner.threads == [*["caller"] * 2, "masks", "masks"]


def test_an_id_is_looked_up_in_the_bits_that_a_lane_finds(lanes: MaskLanes) -> None:
    inner = HeldMask(held=True)
    mask = lanes.ahead(inner)
    mask.expect([7], (1,))
    inner.may_go.set()
    assert [mask.takes([7], token_id) for token_id in range(3)] == [True, False, False]  # the bits b"\1\0"
    assert mask.takes([7, 1], 8)
    assert mask.forced_id([7, 1]) == 2
    assert inner.threads == ["masks"]


def test_a_mask_that_is_slow_now_and_then_stays_quick_and_one_that_often_is_does_not(
    lanes: MaskLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter(range(10**6))
    seconds = [0.0]

    def thread_time() -> float:
        return seconds[0] if next(spent) % 2 == 0 else seconds[0] + took

    monkeypatch.setattr(mask_lanes.time, "thread_time", thread_time)
    mask = lanes.ahead(HeldMask())
    for length in range(1, 100):
        took = 0.005 if length % 8 == 0 else 0.001
        mask.takes([7] * length, 0)
    assert not mask.is_late([7] * 100)
    for length in range(101, 110):
        took = 0.005
        mask.takes([7] * length, 0)
    assert mask.is_late([7] * 110)


def test_bits_that_are_prepared_again_are_found_once(lanes: MaskLanes) -> None:
    inner = HeldMask()
    mask = lanes.ahead(inner)
    for _ in range(3):
        mask.expect([7], surely=True)
        mask.allowed([7])
    mask.expect([7, 8], surely=True)
    assert mask.allowed([7, 8]) == b"\2\0"
    assert len(inner.threads) == 2


@pytest.mark.usefixtures("all_are_slow")
def test_a_mask_that_has_been_slow_is_late_until_its_bits_are_there_and_that_is_told(
    lanes: MaskLanes, told: queue.SimpleQueue[None]
) -> None:
    inner = HeldMask()
    mask = lanes.ahead(inner)
    mask.expect([7], surely=True)
    mask.allowed([7])
    inner.may_go.clear()
    assert mask.is_late([7, 8]) and mask.is_late([7, 8])
    assert mask.guess([7, 8], (1, 2), 2) == ()
    assert told.empty()
    inner.may_go.set()
    told.get(timeout=WAIT_SECONDS)
    assert not mask.is_late([7, 8])
    mask.expect([7, 8], surely=True)
    assert mask.allowed([7, 8]) == b"\2\0"
    assert inner.threads == ["masks", "slow masks"]


@pytest.mark.usefixtures("all_are_slow")
def test_a_mask_goes_with_its_sequence_and_is_no_garbage_to_collect(
    lanes: MaskLanes, told: queue.SimpleQueue[None]
) -> None:
    inner = HeldMask()
    left = weakref.ref(inner)
    mask = lanes.ahead(inner)
    gc.disable()
    try:
        mask.allowed([7])
        assert mask.is_late([7, 8])
        told.get(timeout=WAIT_SECONDS)
        del inner, mask
        assert left() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("all_are_slow")
def test_a_slow_mask_is_found_in_its_lane_for_each_id_of_a_list_that_grows(
    lanes: MaskLanes, told: queue.SimpleQueue[None]
) -> None:
    inner = HeldMask()
    mask = lanes.ahead(inner)
    known_ids = [7]
    mask.expect(tuple(known_ids), surely=True)
    mask.allowed(tuple(known_ids))
    for token_id in (8, 9, 10):
        known_ids.append(token_id)
        inner.may_go.clear()
        assert mask.is_late(known_ids)
        inner.may_go.set()
        told.get(timeout=WAIT_SECONDS)
        assert not mask.is_late(known_ids)
        mask.expect(tuple(known_ids), surely=True)
        assert mask.allowed(tuple(known_ids)) == bytes([len(known_ids), 0])
    assert inner.threads == ["masks", *["slow masks"] * 3]


@pytest.mark.usefixtures("all_are_slow")
def test_a_slow_mask_holds_up_no_other_one_and_yields_its_processor(lanes: MaskLanes) -> None:
    slow = HeldMask()
    mask = lanes.ahead(slow)
    mask.expect([7], surely=True)
    mask.allowed([7])
    slow.may_go.clear()
    assert mask.is_late([7, 8])
    other = lanes.ahead(HeldMask())
    other.expect([5], surely=True)
    assert other.allowed([5]) == b"\1\0"
    assert mask.is_late([7, 8])
    slow.may_go.set()
    assert mask.allowed([7, 8]) == b"\2\0"
    assert slow.niceness == min(19, os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICENESS)


def test_a_mask_is_quick_as_long_as_it_takes_little_time_of_a_processor(lanes: MaskLanes) -> None:
    inner = HeldMask(held=True)
    mask = lanes.ahead(inner)
    mask.expect([7], surely=True)
    inner.may_go.set()  # whatever it waited for, it did not compute
    mask.allowed([7])
    assert not mask.is_late([7, 8])


def test_nothing_is_guessed_while_a_lane_is_at_the_mask(lanes: MaskLanes) -> None:
    inner = HeldMask(held=True)
    mask = lanes.ahead(inner)
    assert mask.guess([7], (1, 2), 2) == (1, 2)
    mask.expect([7], surely=True)
    assert mask.guess([7], (1, 2), 2) == ()
    inner.may_go.set()
    mask.allowed([7])
    assert mask.guess([7], (1, 2), 1) == (1,)


def test_bits_that_never_came_are_waited_for_once(lanes: MaskLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_lanes, "MAX_WAIT_SECONDS", 0.01)
    inner = HeldMask(held=True)
    mask = lanes.ahead(inner)
    mask.expect([7], surely=True)
    with pytest.raises(MaskError):
        mask.allowed([7])
    monkeypatch.setattr(mask_lanes, "MAX_WAIT_SECONDS", threading.TIMEOUT_MAX)
    with pytest.raises(MaskError, match="was not found within"):
        mask.allowed([7])
    inner.may_go.set()


def test_a_wait_for_bits_ends_with_the_row(lanes: MaskLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_lanes, "MAX_WAIT_SECONDS", 0.01)
    inner = HeldMask(held=True)
    mask = lanes.ahead(inner)
    mask.expect([7], surely=True)
    with pytest.raises(MaskError, match=r"within 0\.01 seconds"):
        mask.allowed([7])
    inner.may_go.set()


class Panic(BaseException):
    """What native code raises when it gives up."""


def test_a_panic_ends_its_own_row_and_tells_nothing_of_its_text(
    lanes: MaskLanes, caplog: pytest.LogCaptureFixture
) -> None:
    mask, other = lanes.ahead(HeldMask(failure=Panic("a secret text"))), lanes.ahead(HeldMask())
    for each in (mask, other):
        each.expect([7], surely=True)
    with pytest.raises(MaskError, match="could not be followed"):
        mask.allowed([7])
    assert other.allowed([7]) == b"\1\0"
    assert "Panic" in caplog.text and "secret" not in caplog.text


def test_no_thread_is_there_before_the_first_mask_nor_after_the_last() -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("masks")]

    lanes = MaskLanes(lambda: None)
    mask = lanes.ahead(HeldMask())
    assert names() == []
    mask.expect([7], surely=True)
    mask.allowed([7])
    assert names() == ["masks"]
    lanes.close()
    assert names() == []
