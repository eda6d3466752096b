"""Pin the random numbers: the published vectors of Philox4x32-10 and our mapping of (seed, choice, position)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.backend.engines.philox import philox4x32, uniform

ALL = 0xFFFFFFFF


# Random123 1.14, tests/kat_vectors, lines "philox4x32 10".
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL, ALL, ALL, ALL), (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_the_first_two_words_as_a_53_bit_fraction():
    assert uniform(0, 0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**40))
def test_uniform_lies_in_the_half_open_unit_interval(seed, choice, position):
    assert 0.0 <= uniform(seed, choice, position) < 1.0


def test_seed_choice_position_and_stream_each_change_the_number_in_all_their_bits():
    numbers = {uniform(seed, 0, 0) for seed in (0, 1, 2**31, 2**32, 2**63)}
    numbers |= {uniform(0, choice, 0) for choice in (1, 2, 2**31)}
    numbers |= {uniform(0, 0, position) for position in (1, 2, 2**20, 2**32)}
    numbers |= {uniform(0, 0, 0, stream) for stream in (1, 2, 2**31)}
    assert len(numbers) == 15
    assert uniform(0, 0, 0, 0) == uniform(0, 0, 0)


def test_a_negative_seed_is_its_twos_complement():
    assert uniform(-1, 0, 3) == uniform(2**64 - 1, 0, 3)
