"""Check which row is handed out, the number of its owner, and what prompts may begin with."""

from __future__ import annotations

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.engines.base import PrefixCopy
from inference_api.backend.kv_cache import MIN_REUSED_TOKENS, RowPool

TEXT = list(range(100, 200))


@dataclasses.dataclass(eq=False)
class Owner:
    """A sequence as the pool sees it."""

    token_ids: list[int] = dataclasses.field(default_factory=lambda: list(TEXT))
    tenant: str = "alpha"
    num_computed_tokens: int = 0
    row: int = -1
    epoch: int = 0

    def take_row(self, rows: RowPool) -> Owner:
        """Own a row of `rows`, with nothing begun there."""
        self.row, self.epoch = rows.allocate(self)
        return self

    def compute(self, rows: RowPool, num_tokens: int = 100) -> PrefixCopy | None:
        """Begin in a plan of its own and compute up to `num_tokens`."""
        rows.open_plan()
        prefix = rows.begin(self)
        self.num_computed_tokens = num_tokens
        return prefix


def remembered(rows: RowPool, token_ids: list[int] = TEXT, tenant: str = "alpha") -> int:
    """Let an owner compute `token_ids` and leave; return its row."""
    owner = Owner(list(token_ids), tenant).take_row(rows)
    owner.compute(rows, len(token_ids))
    rows.free(owner.row)
    return owner.row


def test_the_lowest_free_row_is_handed_out_when_nothing_is_remembered() -> None:
    rows = RowPool(3)
    owners = [Owner().take_row(rows) for _ in range(3)]
    assert [owner.row for owner in owners] == [0, 1, 2]
    rows.free(2)
    rows.free(0)
    assert [Owner().take_row(rows).row for _ in range(2)] == [0, 2]


def test_no_free_row_is_an_error_of_the_caller() -> None:
    rows = RowPool(1)
    Owner().take_row(rows)
    with pytest.raises(ValueError, match="empty"):
        rows.allocate(Owner())


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "leave", "return"]), st.integers(0, 4)), max_size=60))
def test_no_row_has_two_owners_and_no_number_two_sequences(moves: list[tuple[str, int]]) -> None:
    rows, running, paused, numbers = RowPool(5, remembers=True), list[Owner](), list[Owner](), set[int]()
    for move, which in moves:
        if move == "leave" and running:
            paused.append(running.pop(which % len(running)))
            rows.free(paused[-1].row)
        elif move != "leave" and rows.num_free:
            is_back = move == "return" and bool(paused)
            owner = paused.pop() if is_back else Owner()
            number = owner.epoch
            owner.take_row(rows)
            assert owner.row not in {other.row for other in running}
            assert (owner.epoch == number) if is_back else (owner.epoch not in numbers)
            numbers.add(owner.epoch)
            running.append(owner)
        assert rows.num_free + len(running) == 5


def test_a_prompt_goes_on_in_the_row_that_holds_its_beginning() -> None:
    rows = RowPool(4, remembers=True)
    assert remembered(rows) == 0
    assert remembered(rows, list(range(50))) == 1
    owner = Owner([*TEXT, 1, 2, 3]).take_row(rows)
    assert owner.row == 0
    assert owner.compute(rows) == PrefixCopy(0, 100)


def test_the_last_id_of_a_prompt_is_always_computed() -> None:
    rows = RowPool(1, remembers=True)
    remembered(rows)
    assert Owner().take_row(rows).compute(rows) == PrefixCopy(0, 99)


def test_a_row_that_would_lose_more_than_it_gives_is_copied_from_and_left_alone() -> None:
    rows = RowPool(3, remembers=True)
    remembered(rows)
    owner = Owner([*TEXT[:30], *range(40)]).take_row(rows)
    assert owner.row == 1
    assert owner.compute(rows) == PrefixCopy(0, 30)


def test_a_running_row_is_copied_from_as_far_as_it_is_computed() -> None:
    rows = RowPool(3, remembers=True)
    Owner().take_row(rows).compute(rows, 40)
    assert Owner().take_row(rows).compute(rows) == PrefixCopy(0, 40)


def test_a_prompt_between_two_chunks_takes_over_what_another_row_has_computed_meanwhile() -> None:
    rows = RowPool(2, remembers=True)
    first, second = Owner().take_row(rows), Owner().take_row(rows)
    second.compute(rows, 10)
    first.compute(rows, 90)
    assert second.compute(rows) == PrefixCopy(0, 90)


@pytest.mark.parametrize("holder", ["free", "running"])
def test_another_tenants_ids_are_never_begun_with_and_do_not_choose_the_row(holder: str) -> None:
    rows = RowPool(3, remembers=True)
    other = Owner(tenant="beta").take_row(rows)
    other.compute(rows)
    if holder == "free":
        rows.free(other.row)
    owner = Owner().take_row(rows)
    assert owner.row == 1
    assert owner.compute(rows) is None


def test_fewer_ids_than_are_worth_a_copy_are_computed() -> None:
    rows = RowPool(2, remembers=True)
    remembered(rows)
    assert Owner([*TEXT[: MIN_REUSED_TOKENS - 1], *range(40)]).take_row(rows).compute(rows) is None
    assert Owner([*TEXT[:MIN_REUSED_TOKENS], *range(40)]).take_row(rows).compute(rows) is not None


def test_a_pool_that_does_not_remember_finds_nothing() -> None:
    rows = RowPool(2)
    remembered(rows)
    assert Owner().take_row(rows).compute(rows) is None


def test_what_failed_is_not_used_again() -> None:
    rows = RowPool(1, remembers=True)
    owner = Owner().take_row(rows)
    owner.compute(rows)
    rows.spoil(owner.row)
    rows.free(owner.row)
    assert Owner().take_row(rows).compute(rows) is None


def test_what_was_drawn_but_never_computed_is_not_remembered() -> None:
    rows = RowPool(1, remembers=True)
    owner = Owner().take_row(rows)
    owner.compute(rows, 60)
    rows.free(owner.row)
    assert Owner().take_row(rows).compute(rows) == PrefixCopy(0, 60)


def test_a_row_that_begins_in_a_plan_is_no_source_in_it_and_a_source_does_not_begin_again() -> None:
    rows = RowPool(3, remembers=True)
    remembered(rows)
    first, second = Owner().take_row(rows), Owner().take_row(rows)
    rows.open_plan()
    assert rows.begin(first) == PrefixCopy(0, 99)
    assert rows.begin(second) is None, "the row of the first one is being rewritten in this very step"
    rows.open_plan()
    first.num_computed_tokens = 100
    assert rows.begin(second) == PrefixCopy(0, 99), "one step later it holds what both begin with"


def test_a_row_that_another_copies_from_does_not_begin_again_in_the_same_plan() -> None:
    rows = RowPool(3, remembers=True)
    slow, fast = Owner().take_row(rows), Owner().take_row(rows)
    slow.compute(rows, 60)
    fast.compute(rows, 90)
    late = Owner([*TEXT[:60], *range(40)]).take_row(rows)
    rows.open_plan()
    assert rows.begin(late) == PrefixCopy(slow.row, 60)
    assert rows.begin(slow) is None
    rows.open_plan()
    assert rows.begin(slow) == PrefixCopy(fast.row, 90)


def test_a_row_whose_owner_has_yet_to_begin_is_its_own_source_alone() -> None:
    rows = RowPool(2, remembers=True)
    remembered(rows)
    owner, other = Owner().take_row(rows), Owner().take_row(rows)
    assert other.compute(rows, 10) is None
    assert owner.compute(rows) == PrefixCopy(0, 99)


def test_the_memory_that_was_not_used_for_longest_goes_first() -> None:
    rows = RowPool(3, remembers=True)
    texts = [list(range(start, start + 80)) for start in (0, 100, 200)]
    assert [remembered(rows, text) for text in texts] == [0, 1, 2]
    copied = Owner([*texts[0][:30], *range(500, 520)]).take_row(rows)
    assert copied.row == 0, "the oldest"
    rows.free(copied.row)
    source = Owner([*texts[1][:30], *range(500, 520)]).take_row(rows)
    assert (source.row, source.compute(rows)) == (1, PrefixCopy(1, 30))
    assert rows.forget_least() == 2
    assert rows.forget_least() == 2, "an empty one is worth less than any memory"


def test_a_search_over_thirty_two_long_rows_takes_little_time() -> None:
    rows = RowPool(33, remembers=True)
    text = list(range(1000, 3000))
    owners = [Owner([*text[: 1000 + number], *range(1000)]).take_row(rows) for number in range(32)]
    for owner in owners:
        owner.compute(rows, 2000)
    for owner in owners[::2]:
        rows.free(owner.row)
    began = time.perf_counter()
    owner = Owner([*text, 1]).take_row(rows)
    prefix = owner.compute(rows)
    assert prefix is not None and prefix.num_tokens == 1031
    assert time.perf_counter() - began < 0.1
