"""Check that the calls of a revoked bearer are cut, those and no others, and that ended calls are forgotten."""

from __future__ import annotations

from functools import partial

from proxy.open_calls import CallRevoked, OpenCalls


def test_every_call_of_a_revoked_id_is_cut_and_no_other() -> None:
    calls, cut = OpenCalls(), list[str]()
    for name, token_id in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("none", None)):
        calls.open(token_id, partial(cut.append, name))
    assert len(calls) == 3
    assert calls.cut({"a", "x"}) == 2
    assert cut == ["a1", "a2"]
    assert calls.cut(frozenset()) == 0


def test_a_call_that_has_ended_is_forgotten() -> None:
    calls, cut = OpenCalls(), list[str]()
    close_first = calls.open("a", partial(cut.append, "first"))
    close_second = calls.open("a", partial(cut.append, "second"))
    close_first()
    assert calls.cut({"a"}) == 1 and cut == ["second"]
    close_second()
    calls.open(None, partial(cut.append, "none"))()
    assert len(calls) == 0 and calls._cuts == {}


def test_a_call_that_ends_while_it_is_cut_does_not_disturb_the_others() -> None:
    calls, cut = OpenCalls(), list[str]()
    closers = []

    def end_all() -> None:
        cut.append("cut")
        while closers:
            closers.pop()()

    for _ in range(3):
        closers.append(calls.open("a", end_all))
    assert calls.cut({"a"}) == 3
    assert len(calls) == 0


def test_a_cut_call_is_told_as_a_401() -> None:
    assert (CallRevoked().status, CallRevoked().code) == (401, "jwt_revoked")
    assert CallRevoked().message == "JWT has been revoked."
