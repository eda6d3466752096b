"""Check `traceparent` against W3C Trace Context level 1: what goes on, under whose parent id, and what begins anew."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trace_context import Trace, continue_trace

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
HEADER = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]")


@pytest.mark.parametrize("flags", ["00", "01"])
def test_a_valid_trace_goes_on_as_it_came(flags: str) -> None:
    assert str(continue_trace(f"00-{TRACE_ID}-{PARENT_ID}-{flags}")) == f"00-{TRACE_ID}-{PARENT_ID}-{flags}"


def test_a_trace_that_begins_here_has_ids_of_its_own() -> None:
    traces = [continue_trace(None) for _ in range(8)]
    assert len({trace.trace_id for trace in traces}) == len({trace.parent_id for trace in traces}) == 8


def test_flags_that_nobody_has_defined_are_sent_as_zero() -> None:
    assert continue_trace(f"00-{TRACE_ID}-{PARENT_ID}-ff").flags == 1
    assert continue_trace(f"00-{TRACE_ID}-{PARENT_ID}-fe").flags == 0


@pytest.mark.parametrize("rest", ["", "-", "-more-of-a-later-version"])
def test_a_later_version_is_read_as_far_as_it_is_known_and_sent_on_as_this_one(rest: str) -> None:
    trace = continue_trace(f"cc-{TRACE_ID}-{PARENT_ID}-01{rest}")
    assert trace.trace_id == TRACE_ID and str(trace).startswith("00-")


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01-more",
        f"00-{TRACE_ID}-{PARENT_ID}-01.",
        f"cc-{TRACE_ID}-{PARENT_ID}-01.more",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
        f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-1",
        f"00-{TRACE_ID}-{PARENT_ID}",
        f"0-{TRACE_ID}-{PARENT_ID}-01",
        f" 00-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}-01\n",
        f"00-{TRACE_ID}-{PARENT_ID}-01,00-{TRACE_ID}-{PARENT_ID}-01",
    ],
)
def test_what_is_not_valid_is_dropped_and_a_trace_of_its_own_begins(value: str | None) -> None:
    traces = [continue_trace(value), continue_trace(value)]
    assert TRACE_ID not in {trace.trace_id for trace in traces} and len({trace.trace_id for trace in traces}) == 2
    assert {trace.flags for trace in traces} == {0}


@pytest.mark.parametrize(("ratio", "flags"), [(0.0, {0}), (1.0, {1}), (0.5, {0, 1})])
def test_a_share_of_the_traces_that_begin_here_is_sampled(ratio: float, flags: set[int]) -> None:
    assert {continue_trace(None, ratio).flags for _ in range(64)} == flags
    assert {continue_trace(f"00-{TRACE_ID}-{PARENT_ID}-00", ratio).flags for _ in range(8)} == {0}


@given(st.text())
def test_whatever_comes_what_goes_on_is_valid(value: str) -> None:
    assert HEADER.fullmatch(str(continue_trace(value)))


def test_an_id_is_written_in_full() -> None:
    assert str(Trace("0" * 31 + "1", "0" * 15 + "2", 1)) == f"00-{'0' * 31}1-{'0' * 15}2-01"
