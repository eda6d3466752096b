"""Check the search on distributions made by hand; that it finds what transformers finds is in test_beam_real.py."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from inference_api.server.beam import Beam, BeamOptions, BeamSearch

END = 0


def options(width: int = 2, max_tokens: int = 3, **others: object) -> BeamOptions:
    return BeamOptions(width, max_tokens, frozenset({END}), **others)


def logs(*shares: float) -> list[tuple[int, float]]:
    return [(token_id, math.log(share)) for token_id, share in enumerate(shares) if share]


def test_the_likeliest_continuation_may_begin_with_an_unlikely_id() -> None:
    search = BeamSearch(options(max_tokens=2, length_penalty=0.0))
    search.take([logs(0, 0.6, 0.4)])
    assert [beam.token_ids for beam in search.live] == [(1,), (2,)]
    search.take([logs(0, 0.5, 0.5), logs(0, 0.1, 0.9)])
    assert search.is_done
    assert [beam.token_ids for beam in search.final] == [(2, 2), (1, 1)]
    assert search.final[0].value == pytest.approx(math.log(0.36))


def test_ties_go_to_the_earlier_beam_and_the_lower_id() -> None:
    search = BeamSearch(options(width=3, max_tokens=2))
    search.take([logs(0, 0.25, 0.25, 0.25, 0.25)])
    assert [beam.token_ids for beam in search.live] == [(1,), (2,), (3,)]
    search.take([logs(0, 0.5, 0.5)] * 3)
    assert [beam.token_ids for beam in search.final] == [(1, 1), (1, 2), (2, 1)]


def test_an_end_counts_only_among_the_best_and_leaves_its_place_to_others() -> None:
    search = BeamSearch(options(max_tokens=9))
    search.take([logs(0.2, 0.5, 0.3)])
    assert search.final == [] and [beam.token_ids for beam in search.live] == [(1,), (2,)]
    search.take([logs(0.6, 0.3, 0.1), logs(0.1, 0.5, 0.4)])
    assert [beam.token_ids for beam in search.final] == [(1, END)]
    assert [beam.token_ids for beam in search.live] == [(1, 1), (2, 1)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "is_done"),
    [(True, 1.0, True), (False, 0.0, True), (False, 5.0, True), ("never", 0.0, True), ("never", 5.0, False)],
)
def test_a_search_ends_when_no_live_beam_could_be_better(
    early_stopping: bool | str, length_penalty: float, is_done: bool
) -> None:
    search = BeamSearch(options(1, 50, early_stopping=early_stopping, length_penalty=length_penalty))
    search.take([logs(0.5, 0.3, 0.2)])
    assert [beam.token_ids for beam in search.final] == [(END,)]
    assert search.is_done == is_done


def test_the_penalty_prefers_longer_or_shorter_continuations() -> None:
    found = {}
    for penalty in (0.0, 2.0):
        search = BeamSearch(options(2, 2, length_penalty=penalty))
        search.take([logs(0.5, 0.4, 0.1)])
        if not search.is_done:
            search.take([logs(0.9, 0.05, 0.05), logs(0.2, 0.4, 0.4)])
        found[penalty] = search.final[0].token_ids
    assert found == {0.0: (END,), 2.0: (1, END)}


def test_a_wide_search_finds_the_best_of_all_continuations() -> None:
    source = random.Random(5)
    for _ in range(20):
        vocab, length = 4, 3
        table: dict[tuple[int, ...], list[tuple[int, float]]] = {}

        def nexts(before: tuple[int, ...], table: dict = table, vocab: int = vocab) -> list[tuple[int, float]]:
            if before not in table:
                shares = [source.random() + 0.01 for _ in range(vocab)]
                table[before] = [(token_id, math.log(share / sum(shares))) for token_id, share in enumerate(shares)]
            return table[before]

        search = BeamSearch(options(vocab**length, length, length_penalty=0.7))
        while not search.is_done:
            search.take([nexts(beam.token_ids) for beam in search.live])
        scores = {}
        for size in range(1, length + 1):
            for ids in itertools.product(range(vocab), repeat=size):
                ended = ids[-1] == END and END not in ids[:-1]
                if ended or (size == length and END not in ids):
                    total = sum(dict(nexts(ids[:place]))[token_id] for place, token_id in enumerate(ids))
                    scores[ids] = total / size**0.7
        best = sorted(scores, key=lambda ids: -scores[ids])
        assert [beam.token_ids for beam in search.final][:10] == best[:10]


def test_fewer_ids_than_beams_leave_fewer_beams() -> None:
    search = BeamSearch(options(width=4, max_tokens=2))
    search.take([logs(0, 0.7, 0.3)])
    assert search.live == [Beam((1,), math.log(0.7)), Beam((2,), math.log(0.3))]
