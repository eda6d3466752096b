"""Check that breakers are found in bytes, however a text was cut into ids."""

from __future__ import annotations

import random

from inference_api.backend.byte_breakers import ByteBreakers

TEXTS = [b"a", b"b\n", b"\nb", b"", b"x\ny", b"->", b"-", b">", b"\xf0\x9f", b"\x98\x80"]


def num_after(breakers: list[bytes], *ids: int) -> int:
    return ByteBreakers(TEXTS, breakers).num_after(ids)


def test_what_comes_after_the_id_with_the_end_of_the_last_breaker_counts() -> None:
    assert num_after([b"\n"], 0, 1, 0, 0) == 2
    assert num_after([b"\n"], 1, 2, 0) == 1
    assert num_after([b"\n"], 0, 4) == 0
    assert num_after([b"\n"], 0, 0, 3, 0) == 4
    assert num_after([b"\n", b"a"], 1, 0, 5) == 1
    assert num_after([b"\n"]) == 0


def test_a_breaker_may_span_ids() -> None:
    assert num_after([b"->"], 0, 6, 7, 0) == 1
    assert num_after([b"->"], 0, 5, 0, 0) == 2
    assert num_after(["\U0001f600".encode()], 8, 9, 0, 0, 0) == 3
    assert num_after([b"->"], 0, 6, 0, 7) == 4


def test_ids_without_text_after_a_breaker_count_too() -> None:
    assert num_after([b"\n"], 4, 3, 3) == 2


def test_an_id_that_holds_a_whole_breaker_is_one() -> None:
    breakers = ByteBreakers(TEXTS, [b"\n", b"->"])
    assert [breakers.is_in(token_id) for token_id in range(8)] == [False, True, True, False, True, True, False, False]


def test_ids_that_are_followed_one_after_another_are_found_like_all_at_once() -> None:
    source = random.Random(3)
    for _ in range(300):
        breakers = source.sample([b"\n", b"->", b"b\n\nb", b"\xf0\x9f\x98\x80", b"-", b"ax"], source.randint(1, 4))
        ids = [source.randrange(len(TEXTS)) for _ in range(source.randint(0, 12))]
        followed = ByteBreakers(TEXTS, breakers)
        for count in range(len(ids) + 1):
            if source.random() < 0.6:
                followed.follow(ids[:count])
            guessed = ids[:count] + [source.randrange(len(TEXTS)) for _ in range(source.randint(0, 3))]
            assert followed.num_after(tuple(guessed)) == num_after(breakers, *guessed), (breakers, ids, count, guessed)


def test_what_was_followed_is_not_read_again_for_each_draw() -> None:
    reads: list[int] = []

    class Counted(list[bytes]):
        def __getitem__(self, index: object) -> bytes:
            reads.append(1)
            return super().__getitem__(index)

    breakers = ByteBreakers(Counted(TEXTS), [b"\n", b"->"])
    known_ids = [0] * 2000
    breakers.follow(known_ids)
    num_reads = len(reads)
    for _ in range(10):
        known_ids.append(0)
        breakers.follow(known_ids)
        assert breakers.num_after(tuple(known_ids)) == len(known_ids)
        assert not breakers.is_in(0)
    assert len(reads) - num_reads < 100
