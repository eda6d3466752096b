"""Check what the sampler is told of a row: its highest ids and its weights by block, the same beside any neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from inference_api.backend.engines.fused_cpp import CppComputation
from inference_api.backend.engines.sampling_rules import BLOCK, draw_by_block
from inference_api.backend.engines.selection import TORCH_SELECTION, Selection, Wish, first_highest

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

VOCABULARIES = (1, 2, 63, 64, 65, 300, 4096, 5000, 64 * 400)


@pytest.fixture(scope="module", params=["torch", "library"])
def selection(request: pytest.FixtureRequest) -> Iterator[Selection]:
    """Return torch's selection, and that of the library, of an engine with two threads."""
    if request.param == "torch":
        yield TORCH_SELECTION
        return
    image = request.getfixturevalue("tiny_image")("llama")
    request.getfixturevalue("fused_library_of_tests")
    folder = request.getfixturevalue("fused_build_folder")
    computation = CppComputation(image, 1, 8, folder, 2)
    yield computation.selection
    del computation  # its threads, which the selection shares, end when nobody holds it


def make_logits(vocab: int, step: float) -> torch.Tensor:
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    return (logits / step).round() * step if step else logits


@pytest.mark.parametrize("step", [0.0, 0.5, 5.0], ids=["continuous", "tied", "mostly-tied"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_head_is_complete_above_its_last_logit(vocab: int, step: float, selection: Selection) -> None:
    logits = make_logits(vocab, step)
    for num_ids in sorted({min(n, vocab) for n in (1, 2, 41, 65, 257)}):
        heads = selection.heads(logits, [Wish(row, num_ids) for row in range(4)])
        for row, head in zip(logits, heads, strict=True):
            values, order = (part[:num_ids].tolist() for part in row.sort(descending=True, stable=True))
            assert head.logits == values and [float(row[i]) for i in head.ids] == values
            num_above = sum(value > values[-1] for value in values)
            assert head.ids[:num_above] == order[:num_above]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_block_weights_are_the_sums_of_the_weights(vocab: int, selection: Selection) -> None:
    logits = make_logits(vocab, 0.0)
    for row, head in enumerate(selection.heads(logits, [Wish(row, 1, 0.7) for row in range(4)])):
        weights = ((logits[row].double() - logits[row].max()) / 0.7).exp()
        expected = [float(block.sum()) for block in weights.split(BLOCK)]
        assert head.block_weights is not None
        assert head.block_weights.tolist() == pytest.approx(expected, rel=2e-6)


def test_rows_that_are_not_wished_for_and_neighbours_change_nothing(selection: Selection) -> None:
    logits = make_logits(5000, 0.5)
    together = selection.heads(logits, [Wish(row, 41) for row in range(4)])
    assert selection.heads(logits, [Wish(2, 41)]) == [together[2]]
    assert selection.heads(logits[2:3].clone(), [Wish(0, 41)]) == [together[2]]
    assert selection.heads(logits, []) == []


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("step", [0.0, 5.0])
def test_the_lowest_of_the_highest_ids_is_found(vocab: int, step: float, selection: Selection) -> None:
    logits = make_logits(vocab, step)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert first_highest(logits) == selection.highest_ids(logits) == expected


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_logit_that_is_no_number_has_no_highest_id_wherever_it_stands(
    vocab: int, broken: float, selection: Selection
) -> None:
    for place in sorted({0, vocab // 2, vocab - 1}):
        logits = make_logits(vocab, 0.5)
        expected: list[int | None] = [row.index(max(row)) for row in logits.tolist()]
        logits[1, place] = broken
        expected[1] = None
        assert selection.highest_ids(logits) == expected


@pytest.mark.parametrize("vocab", [n for n in VOCABULARIES if n > 1])
def test_both_zeros_are_one_number(vocab: int, selection: Selection) -> None:
    logits = torch.full((4, vocab), -1.0)
    logits[0, vocab // 2], logits[0, -1] = -0.0, 0.0
    logits[1, vocab // 2], logits[1, -1] = 0.0, -0.0
    logits[2] = -0.0
    logits[2, -1] = 0.0
    logits[3, -1] = -0.0
    assert selection.highest_ids(logits) == [vocab // 2, vocab // 2, 0, vocab - 1]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equal_logits_and_the_largest_numbers_give_the_lowest_id(vocab: int, selection: Selection) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.full((3, vocab), -largest)
    logits[1] = 2.5
    logits[2, vocab // 3 :] = largest
    assert selection.highest_ids(logits) == [0, 0, vocab // 3]


@pytest.mark.parametrize("vocab", [3, 64, 65, 700])
def test_a_draw_by_block_is_the_inverse_of_the_cumulative_distribution(vocab: int) -> None:
    row = make_logits(vocab, 0.0).double()[0]
    (head,) = TORCH_SELECTION.heads(row.unsqueeze(0), [Wish(0, 1, 1.3)])
    cumulative = ((row - row.max()) / 1.3).exp().cumsum(0)
    assert head.block_weights is not None
    for index in range(2000):
        number = (index + 0.5) / 2000
        expected = int(torch.searchsorted(cumulative, cumulative[-1:] * number, right=True))
        assert draw_by_block(row, head.block_weights, head.logits[0], 1.3, number) == expected


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
def test_a_draw_by_block_at_either_end_is_an_id_with_weight(number: float) -> None:
    row = torch.full((130,), -1e30)
    row[3] = row[70] = 0.0
    (head,) = TORCH_SELECTION.heads(row.unsqueeze(0), [Wish(0, 1, 1.0)])
    assert head.block_weights is not None
    assert draw_by_block(row, head.block_weights, 0.0, 1.0, number) == (3 if number == 0 else 70)
