"""Check which trace a call is logged under: the proxy's, or one of its own where there is none to go on with."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.server.trace_context import Trace, read_trace

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("fe", False), ("ff", True)])
def test_the_proxys_trace_goes_on(flags: str, is_sampled: bool) -> None:
    assert read_trace(f"00-{TRACE_ID}-{PARENT_ID}-{flags}") == Trace(TRACE_ID, PARENT_ID, is_sampled)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        TRACE_ID,
        f"ff-{TRACE_ID}-{PARENT_ID}-00",
        f"00-{'0' * 32}-{PARENT_ID}-00",
        f"00-{TRACE_ID}-{'0' * 16}-00",
        f"00-{TRACE_ID.upper()}-{PARENT_ID}-00",
        f"00-{TRACE_ID}-{PARENT_ID}-00\n",
        f"00-{TRACE_ID}-{PARENT_ID}-00-more",
    ],
)
def test_without_a_valid_one_each_call_has_a_trace_of_its_own(value: str | None) -> None:
    traces = [read_trace(value) for _ in range(2)]
    assert len({trace.trace_id for trace in traces} - {TRACE_ID}) == 2
    assert {(trace.parent_id, trace.is_sampled) for trace in traces} == {(None, False)}


@given(st.text())
def test_whatever_comes_a_trace_id_is_32_hexadecimal_digits(value: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", read_trace(value).trace_id)
