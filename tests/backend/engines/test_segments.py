"""Prove that the cut of a decode batch into attention calls covers every row once, and is the cheapest one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.engines.segments import plan_segments


def cost_of(rows, lengths, cuts, call_cost):
    total = 0
    for begin, end in itertools.pairwise(cuts):
        total += call_cost + (rows[end - 1] - rows[begin] + 1) * max(lengths[begin:end])
    return total


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 2048)), min_size=1, max_size=7, unique_by=lambda e: e[0]))
def test_the_cut_is_the_cheapest_of_all_cuts(entries):
    entries.sort()
    rows, lengths = [row for row, _ in entries], [length for _, length in entries]
    segments = plan_segments(rows, lengths)
    cuts = [segment.begin for segment in segments] + [len(rows)]
    inner = range(1, len(rows))
    cheapest = min(
        cost_of(rows, lengths, [0, *chosen, len(rows)], 1024)
        for count in range(len(rows))
        for chosen in itertools.combinations(inner, count)
    )
    assert cost_of(rows, lengths, cuts, 1024) == cheapest


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(1, 2048)), max_size=32, unique_by=lambda e: e[0]))
def test_every_entry_is_covered_once_by_a_segment_as_long_as_its_longest(entries):
    entries.sort()
    rows, lengths = [row for row, _ in entries], [length for _, length in entries]
    covered = 0
    for segment in plan_segments(rows, lengths):
        assert segment.begin == covered < segment.end
        assert (segment.first_row, segment.last_row) == (rows[segment.begin], rows[segment.end - 1])
        assert segment.length == max(lengths[segment.begin : segment.end])
        covered = segment.end
    assert covered == len(rows)


def test_rows_of_like_length_share_a_call_and_a_long_row_gets_its_own():
    assert len(plan_segments(list(range(32)), [100] * 32)) == 1
    lengths = [2000] + [20] * 31
    assert [(s.begin, s.end) for s in plan_segments(list(range(32)), lengths)] == [(0, 1), (1, 32)]
