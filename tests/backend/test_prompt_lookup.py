"""Check what a sequence guesses out of its own text, how fast, and when it stops guessing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.prompt_lookup import (
    ACCEPTED_CREDIT,
    MAX_CREDIT,
    PAUSE_TOKENS,
    RUN_LENGTHS,
    START_CREDIT,
    PromptLookup,
)


def _guess(text: bytes, max_tokens: int = 4) -> bytes:
    return bytes(PromptLookup(list(text)).propose(max_tokens))


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        (b"the cat sat. the cat", b" sat"),
        (b"abc1 abc2 abc", b"2 ab"),
        (b"xbc1 abc2 ybc", b"2 yb"),
        (b"abc1 zbc2 abc", b"1 zb"),
        (b"abcabc", b"abca"),
        (b"aaaa", b"aaaa"),
        (b"abababab", b"abab"),
        (b"abcdef", b""),
        (b"a", b""),
        (b"ab", b""),
        (b"aa", b""),
        (b"", b""),
    ],
    ids=repr,
)
def test_a_guess_is_what_followed_the_latest_longest_run_that_the_text_ends_with(text: bytes, guess: bytes) -> None:
    assert _guess(text) == guess


def test_no_more_is_guessed_than_asked_for() -> None:
    assert _guess(b"the cat sat. the cat", 2) == b" s"
    assert _guess(b"the cat sat. the cat", 0) == b""
    assert _guess(b"the cat sat. the cat", -3) == b""


def _reference(text: list[int], max_tokens: int) -> list[int]:
    """Guess by reading the whole text anew."""
    for length in RUN_LENGTHS:
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                longer = list(text)
                while len(longer) < len(text) + max_tokens:
                    longer.append(longer[start + length + len(longer) - len(text)])
                return longer[len(text) :]
    return []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12), st.integers(1, 6))
def test_an_index_that_grows_guesses_as_one_that_is_built_anew(parts: list[list[int]], max_tokens: int) -> None:
    text: list[int] = []
    lookup = PromptLookup(text)
    for part in parts:
        text += part
        assert list(lookup.propose(max_tokens)) == _reference(text, max_tokens)


def test_refused_guesses_use_the_credit_up_and_a_pause_follows() -> None:
    text = list(b"abcabc")
    lookup = PromptLookup(text)
    for _ in range(START_CREDIT // 4):
        assert lookup.propose(4)
        lookup.settle(4, 0)
    assert lookup.propose(4) == ()
    text += [7] * (PAUSE_TOKENS - 1)
    assert lookup.propose(4) == ()
    text.append(7)
    assert lookup.propose(4) == (7, 7, 7, 7)
    lookup.settle(4, 0)
    assert lookup.propose(4) == (), "after a pause half the credit is left"


def test_accepted_guesses_restore_the_credit_up_to_a_bound() -> None:
    lookup = PromptLookup(list(b"abcabc"))
    lookup.settle(4, 1)
    assert lookup._credit == START_CREDIT + ACCEPTED_CREDIT - 3
    for _ in range(9):
        lookup.settle(4, 4)
    assert lookup._credit == MAX_CREDIT


def test_a_guess_in_a_long_text_takes_microseconds() -> None:
    text = [index * 7919 % 1000 for index in range(2000)]
    lookup = PromptLookup(text)
    lookup.propose(4)
    began = time.perf_counter()
    for index in range(1000):
        text.append(index % 7)
        lookup.propose(4)
    assert (time.perf_counter() - began) / 1000 < 200e-6
