"""Check which trace a call is logged under: the proxy's, or one of its own where there is none to go on with."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.server.trace_context import read_trace_id

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def test_the_proxys_trace_goes_on() -> None:
    assert read_trace_id(f"00-{TRACE_ID}-{PARENT_ID}-00") == TRACE_ID


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
    ids = {read_trace_id(value) for _ in range(2)}
    assert len(ids) == 2 and TRACE_ID not in ids


@given(st.text())
def test_whatever_comes_a_trace_id_is_32_hexadecimal_digits(value: str) -> None:
    assert re.fullmatch(r"[0-9a-f]{32}", read_trace_id(value))
