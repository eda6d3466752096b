"""Check which row is handed out next, and that every owner has an epoch of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.kv_cache import RowAllocator


def test_the_lowest_free_row_is_handed_out() -> None:
    rows = RowAllocator(3)
    assert [rows.allocate() for _ in range(3)] == [(0, 1), (1, 1), (2, 1)]
    rows.free(2)
    rows.free(0)
    assert rows.allocate() == (0, 2)
    assert rows.allocate() == (2, 2)


def test_no_free_row_is_an_error_of_the_caller() -> None:
    rows = RowAllocator(1)
    rows.allocate()
    with pytest.raises(IndexError):
        rows.allocate()


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_no_row_has_two_owners_and_epochs_only_grow(moves: list[tuple[bool, int]]) -> None:
    rows, owned, epochs = RowAllocator(5), set[int](), [0] * 5
    for take, which in moves:
        if take and rows.num_free:
            row, epoch = rows.allocate()
            assert row not in owned
            assert epoch == epochs[row] + 1
            epochs[row] = epoch
            owned.add(row)
        elif not take and owned:
            row = sorted(owned)[which % len(owned)]
            owned.remove(row)
            rows.free(row)
        assert rows.num_free + len(owned) == 5
