"""Check who has to go when connections run out: never one with a good bearer, and of the others the longest there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.places import Places


def filled(*connections: str, num_places: int) -> Places[str]:
    places: Places[str] = Places(num_places)
    assert [places.enter(connection) for connection in connections] == [None] * len(connections)
    return places


def ask_with_bearer(places: Places[str], connection: str) -> bool:
    places.ask(connection)
    return places.keep(connection)


def test_while_there_is_room_nobody_goes() -> None:
    filled("a", "b", "c", num_places=3)


def test_the_longest_waiting_goes_for_a_newcomer_and_is_counted_until_it_has_left() -> None:
    places = filled("a", "b", num_places=2)
    assert places.enter("c") == "a"
    assert places.enter("d") == "b"
    places.leave("a")
    places.leave("b")
    assert places.enter("e") == "c"


def test_one_with_a_good_bearer_stays_and_the_next_longest_goes() -> None:
    places = filled("a", "b", num_places=2)
    assert ask_with_bearer(places, "a")
    assert places.enter("c") == "b"


def test_one_that_has_asked_goes_after_all_that_have_not_and_before_those_with_a_good_bearer() -> None:
    places = filled("a", "b", "c", num_places=3)
    assert ask_with_bearer(places, "a")
    places.ask("b")
    assert places.enter("d") == "c"
    places.ask("d")
    assert [places.enter("e"), places.enter("f"), places.enter("g")] == ["b", "e", "f"]


def test_a_bearer_counts_only_with_a_whole_request() -> None:
    places = filled("a", num_places=1)
    assert places.keep("a")
    assert places.enter("b") == "a"


def test_after_its_answer_it_waits_like_everybody_and_as_the_latest() -> None:
    places = filled("a", "b", "c", num_places=3)
    assert ask_with_bearer(places, "a")
    places.wait("a")
    places.ask("b")
    places.wait("b")
    assert [places.enter("d"), places.enter("e"), places.enter("f")] == ["c", "a", "b"]


def test_when_all_places_are_kept_a_newcomer_is_let_in_but_may_not_stay() -> None:
    places = filled("a", "b", num_places=2)
    assert ask_with_bearer(places, "a") and ask_with_bearer(places, "b")
    assert places.enter("c") is None
    assert not ask_with_bearer(places, "c")
    places.leave("a")
    assert places.keep("c")


def test_one_that_was_told_to_go_takes_no_place_whatever_it_still_does() -> None:
    places = filled("a", num_places=1)
    assert places.enter("b") == "a"
    assert ask_with_bearer(places, "a")
    places.wait("a")
    places.leave("a")
    assert ask_with_bearer(places, "b")
    assert places.enter("c") is None
    assert not ask_with_bearer(places, "c")


@given(st.lists(st.tuples(st.sampled_from(["enter", "ask", "keep", "wait", "leave"]), st.integers(0, 5)), max_size=60))
def test_no_order_of_events_evicts_a_kept_one_or_lets_more_stay_than_there_are_places(
    events: list[tuple[str, int]],
) -> None:
    places: Places[int] = Places(2)
    there: set[int] = set()
    asking: set[int] = set()
    kept: set[int] = set()
    told_to_go: set[int] = set()
    for event, connection in events:
        if event == "enter" and connection not in there:
            there.add(connection)
            evicted = places.enter(connection)
            assert evicted is None or (evicted in there and evicted not in kept | told_to_go | {connection})
            if evicted is not None:
                told_to_go.add(evicted)
                asking.discard(evicted)
        elif event == "ask" and connection in there:
            places.ask(connection)
            asking |= {connection} - told_to_go
        elif event == "keep" and connection in asking - kept:
            if places.keep(connection):
                kept.add(connection)
        elif event == "wait" and connection in there:
            places.wait(connection)
            kept.discard(connection)
            asking.discard(connection)
        elif event == "leave" and connection in there:
            places.leave(connection)
            for group in (there, asking, kept, told_to_go):
                group.discard(connection)
        assert len(kept) <= 2
