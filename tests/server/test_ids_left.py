"""Check the count of ids that may be drawn against a plain walk over the vocabulary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_api.server.ids_left import IdsLeft, count_ids_left

VOCAB = 6
_IDS = st.lists(st.integers(0, VOCAB - 1), max_size=VOCAB * 2)


@given(st.none() | _IDS, st.none() | _IDS, st.none() | _IDS)
def test_each_count_is_that_of_a_walk_over_the_vocabulary(allowed, banned, ends) -> None:
    kept = [one for one in range(VOCAB) if allowed is None or one in allowed]
    drawable = [one for one in kept if one not in (banned or ())]
    going_on = [one for one in drawable if one not in (ends or ())]
    left = count_ids_left(VOCAB, allowed=allowed, banned=banned, ends=ends)
    assert left == IdsLeft(len(kept), len(drawable), len(going_on))


def test_without_rules_the_whole_vocabulary_is_left() -> None:
    assert count_ids_left(50_000) == IdsLeft(50_000, 50_000, 50_000)
