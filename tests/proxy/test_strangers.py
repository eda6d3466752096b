"""Check how those without a bearer share their turns, and who shares an answer."""

from __future__ import annotations

import gevent
import pytest
from gevent.event import Event

from proxy.answers import Refusal
from proxy.strangers import SharedAnswer, Strangers

pytestmark = pytest.mark.usefixtures("hub")

ANSWER = SharedAnswer(100.0, 200, [("Content-Type", "text/plain")], b"OK")


def take_turns(strangers: Strangers, number: int, free: Event) -> list[gevent.Greenlet]:
    """Take so many turns, each held until `free` is set; those that get none wait."""

    def hold() -> None:
        with strangers.turn():
            free.wait(10)

    return [gevent.spawn(hold) for _ in range(number)]


def test_four_have_turns_and_a_fifth_waits_for_one_of_them() -> None:
    strangers, free = Strangers(), Event()
    holding = take_turns(strangers, 4, free)
    fifth = gevent.spawn(strangers.wait_for_turn)
    fifth.join(0.1)
    assert not fifth.dead
    free.set()
    gevent.joinall([*holding, fifth], timeout=5)
    assert fifth.dead


def test_who_came_first_has_the_next_turn_whoever_asks_again_meanwhile() -> None:
    strangers, free, order = Strangers(), Event(), list[str]()

    def ask_again_and_again() -> None:
        while len(order) < 400 and "patient" not in order:
            strangers.wait_for_turn()
            order.append("again")

    def ask_once() -> None:
        strangers.wait_for_turn()
        order.append("patient")

    holding = take_turns(strangers, 4, free)
    flood = [gevent.spawn(ask_again_and_again) for _ in range(20)]
    patient = gevent.spawn(ask_once)
    gevent.sleep(0.01)
    free.set()
    gevent.joinall([*holding, *flood, patient], timeout=10)
    assert order.index("patient") <= 24


def test_a_turn_that_does_not_come_in_time_is_a_503_and_what_can_do_without_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.strangers._WAIT_SECONDS", 0.05)
    strangers, free = Strangers(), Event()
    holding = take_turns(strangers, 4, free)
    gevent.sleep(0.01)
    with pytest.raises(Refusal) as caught, strangers.turn():
        pytest.fail("there was a fifth turn")
    assert (caught.value.status, caught.value.code) == (503, "public_busy")
    strangers.wait_for_turn()
    free.set()
    gevent.joinall(holding, timeout=5)
    with strangers.turn():
        pass


def test_who_leaves_while_waiting_or_in_a_turn_takes_none_along() -> None:
    strangers, free = Strangers(), Event()
    holding = take_turns(strangers, 4, free)
    waiting = take_turns(strangers, 3, free)
    gevent.sleep(0.01)
    # The first two hand their turns to two of those who wait, and these are gone before they can take them.
    gevent.killall([*holding[:2], *waiting])
    free.set()
    gevent.joinall(holding, timeout=5)
    later = Event()
    again = take_turns(strangers, 5, later)
    gevent.sleep(0.05)
    assert len(strangers._waiting) == 1, "four have a turn each"
    later.set()
    gevent.joinall(again, timeout=5)
    assert all(greenlet.successful() for greenlet in again)


def test_others_run_between_two_turns_though_nobody_waits_for_anything() -> None:
    strangers, order = Strangers(), list[str]()
    asking = [gevent.spawn(lambda: (strangers.wait_for_turn(), order.append("stranger"))) for _ in range(40)]
    team = gevent.spawn(lambda: (gevent.sleep(0), gevent.sleep(0), order.append("team")))
    gevent.joinall([*asking, team], timeout=5)
    assert order.index("team") <= 8


def test_an_answer_is_for_those_who_had_come_when_the_server_was_asked() -> None:
    strangers = Strangers()
    assert strangers.asked_since(0.0, "/health") is None
    strangers.keep("/health", ANSWER)
    assert strangers.asked_since(0.0, "/health/live") is None
    assert strangers.asked_since(100.0, "/health") is ANSWER
    assert strangers.asked_since(100.01, "/health") is None
    strangers.keep("/health", SharedAnswer(99.0, 500, [], b"older"))
    assert strangers.asked_since(98.0, "/health") is ANSWER
