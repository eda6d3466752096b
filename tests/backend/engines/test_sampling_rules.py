"""Check that a whole vocabulary's weights are added in one order, whatever number of threads torch has."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from inference_api.backend.engines.sampling_rules import draw_of_all, highest_share, total_of
from inference_api.sampling_params import SamplingParams

pytestmark = pytest.mark.torch

VOCAB = 49_152
THREADS = (1, 2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_logits(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def weights_of(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    logits = make_logits(seed).double()
    log_weights = logits - logits.max()
    return log_weights, log_weights.exp()


def sums_of(weights: torch.Tensor) -> list[float]:
    found = []
    for number in THREADS:
        torch.set_num_threads(number)
        found.append(float(weights.sum()))
    return found


def test_a_total_is_the_same_bits_with_any_number_of_threads_where_torchs_own_is_not() -> None:
    pairs = []
    for seed in range(20):
        _, weights = weights_of(seed)
        pairs.append(sums_of(weights))
        totals = []
        for number in THREADS:
            torch.set_num_threads(number)
            totals.append(total_of(weights))
        assert totals[0] == totals[1] == pytest.approx(pairs[-1][0], rel=1e-12)
    assert any(one != two for one, two in pairs)  # or this would prove nothing
    assert total_of(torch.zeros(0, dtype=torch.float64)) == 0.0


def test_a_share_on_the_border_keeps_the_same_ids_with_any_number_of_threads() -> None:
    num_tried = 0
    for seed in range(8):
        keys, weights = weights_of(seed)
        one, two = sums_of(weights)
        if one == two:
            continue
        num_tried += 1
        torch.set_num_threads(1)
        low, high = 0.5, 0.6
        fewest = highest_share(keys, weights, low).numel()
        while (middle := (low + high) / 2) not in (low, high):  # ends with two neighbouring shares and a border between
            if highest_share(keys, weights, middle).numel() == fewest:
                low = middle
            else:
                high = middle
        shares = [math.nextafter(low, 0.0), low, high, math.nextafter(high, 1.0)]
        alone = [highest_share(keys, weights, share).tolist() for share in shares]
        assert len(alone[1]) < len(alone[2])
        torch.set_num_threads(2)
        assert [highest_share(keys, weights, share).tolist() for share in shares] == alone
    assert num_tried > 2


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_p": 1.0, "typical_p": 0.7}])
def test_a_draw_is_the_same_with_any_number_of_threads(options: dict[str, float]) -> None:
    for seed in range(2):
        logits = make_logits(seed)
        params = SamplingParams(temperature=1.3, top_k=0, seed=0, **options)
        drawn = []
        for number in THREADS:
            torch.set_num_threads(number)
            drawn.append([draw_of_all(logits, params, (index + 0.5) / 4) for index in range(4)])
        assert drawn[0] == drawn[1]
