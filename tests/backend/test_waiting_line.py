"""Check whose turn it is: a tenant's own priorities order its own requests, and nobody else's place moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.sequence import Sequence
from inference_api.backend.waiting_line import WaitingLine
from tests.backend.factories import Rig, make_submit

ARRIVALS = st.lists(st.tuples(st.sampled_from(["alpha", "beta", "gamma"]), st.integers(-2, 2)), max_size=30)


def make_sequence(session_id: str, tenant: str = "alpha", priority: int = 0) -> Sequence:
    """Return one that waits."""
    return Sequence(make_submit(session_id, tenant=tenant, priority=priority), "worker-1", 0.0)


def make_line(*arrivals: tuple[str, str, int]) -> WaitingLine:
    """Return a line in which sequences have come as (session, tenant, priority)."""
    line = WaitingLine()
    for session_id, tenant, priority in arrivals:
        line.append(make_sequence(session_id, tenant, priority))
    return line


def order(line: WaitingLine) -> str:
    """Return the sessions in their order, joined."""
    return "".join(sequence.session_id for sequence in line)


def drained(line: WaitingLine) -> str:
    """Let everybody go; return the sessions in the order in which they went, joined."""
    gone = ""
    while line:
        expected = line.first()
        assert line.take_first() is expected
        gone += expected.session_id
    return gone


def test_without_priorities_the_order_is_that_of_arrival() -> None:
    line = make_line(("a", "alpha", 0), ("b", "beta", 0), ("c", "alpha", 0))
    assert order(line) == drained(line) == "abc"


def test_the_lowest_priority_of_a_tenant_comes_first_and_the_earliest_of_equal_ones() -> None:
    line = make_line(("a", "alpha", 5), ("b", "alpha", 0), ("c", "alpha", -1), ("d", "alpha", -1), ("e", "alpha", 0))
    assert order(line) == drained(line) == "cdbea"


def test_those_of_a_tenant_that_an_urgent_one_has_passed_keep_their_order() -> None:
    line = make_line(("a", "alpha", 0), ("x", "beta", 0), ("b", "alpha", 0), ("c", "alpha", 0), ("d", "alpha", -1))
    assert line.take_first().session_id == "d"
    assert order(line) == drained(line) == "xabc"


def test_an_urgent_request_takes_its_own_tenants_first_place_and_no_one_elses() -> None:
    line = make_line(("a", "alpha", 0), ("b", "beta", 0), ("c", "beta", 0), ("d", "alpha", -100))
    assert order(line) == drained(line) == "dbca"


def test_one_that_made_room_comes_before_everybody_however_urgent() -> None:
    line = make_line(("a", "alpha", 9), ("b", "alpha", 9))
    first, second = line.take_first(), line.take_first()
    line.append(make_sequence("c", priority=-100))
    line.put_back(second)
    line.put_back(first)
    assert order(line) == "abc"
    line.remove(second)
    assert drained(line) == "ac"


def test_whoever_leaves_takes_its_own_place_out_of_the_line() -> None:
    line = make_line(("a", "alpha", 0), ("b", "beta", 0), ("c", "alpha", -1))
    urgent = line.first()
    line.remove(urgent)
    assert order(line) == drained(line) == "ab"
    with pytest.raises(ValueError, match="not in deque"):
        line.remove(urgent)


@given(arrivals=ARRIVALS, events=st.lists(st.integers(0, 40), max_size=40))
def test_no_priority_changes_when_another_tenant_has_its_turn(
    arrivals: list[tuple[str, int]], events: list[int]
) -> None:
    """Let sequences come and go alike in a line with priorities and in one without; compare whose turns come when."""
    line, plain = WaitingLine(), WaitingLine()
    comes = [
        (make_sequence(str(n), tenant, p), make_sequence(str(n), tenant)) for n, (tenant, p) in enumerate(arrivals)
    ]
    turns: list[tuple[str, str]] = []
    while comes or line:
        if comes and (not line or (events.pop() if events else 0) % 2 == 0):
            prioritised, other = comes.pop(0)
            line.append(prioritised)
            plain.append(other)
        else:
            in_order = list(line)
            assert line.first() is in_order[0]
            turns.append((line.take_first().tenant, plain.take_first().tenant))
            assert list(line) == in_order[1:]
        assert [s.tenant for s in line] == [s.tenant for s in plain]
        assert len(line) == len(plain) == len(list(line))
    assert [tenant for tenant, _ in turns] == [tenant for _, tenant in turns]


def test_the_place_that_a_request_is_told_is_the_one_in_which_it_gets_its_row() -> None:
    rig = Rig(1)
    rig.submit("runs", max_tokens=2)
    rig.step()
    rig.submit("late", priority=3, max_tokens=1)
    rig.submit("other", tenant="beta", max_tokens=1)
    rig.submit("soon", priority=-3, max_tokens=1)
    views = [rig.request("soon"), rig.request("other", "beta"), rig.request("late")]
    assert [view.place for view in views if view is not None] == [1, 2, 3]
    rig.run()
    assert list(rig.ends) == ["runs", "soon", "other", "late"]
