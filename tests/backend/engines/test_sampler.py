"""Compare the vectorised sampler with a scalar reference, in ids and in distribution."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from inference_api.backend.engines import sampler, sampling_rules
from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.sampler import Draw
from inference_api.sampling_params import SamplingParams
from tests.backend.engines.scalar_sampler import BORDER, probabilities_of, reference_draw

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]


def ids_of(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    """Return the drawn ids; none of the rows may have failed."""
    draws = sampler.sample(logits, specs)
    assert [draw.error for draw in draws] == [None] * len(specs)
    return [draw.token_id for draw in draws]


def spec(temperature=1.0, top_k=0, top_p=1.0, seed=0, choice=0, position=0) -> SampleSpec:
    return SampleSpec(SamplingParams(temperature, top_k, top_p, seed), choice, position)


finite = st.floats(-30, 30, width=32)
tied = st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0])
params = st.builds(
    spec,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 40, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    position=st.integers(0, 4000),
)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.lists(finite, min_size=1, max_size=300), st.lists(tied, min_size=1, max_size=300)), params)
def test_every_draw_equals_the_scalar_reference(logits, drawn):
    expected, margin = reference_draw(logits, drawn)
    assume(margin > BORDER)
    assert sampler.sample(torch.tensor([logits]), [drawn]) == [Draw(expected)]


@pytest.mark.parametrize("step", [0.0, 0.5, 4.0], ids=["continuous", "tied", "mostly-tied"])
@pytest.mark.parametrize(
    "drawn",
    [spec(top_p=0.9), spec(2.0, top_p=0.99), spec(top_k=50), spec(0.7, 3000, 0.8), spec(5.0, 7000), spec(0.1, 0, 0.5)],
)
def test_what_is_kept_of_a_large_vocabulary_equals_the_scalar_reference(step, drawn):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9001, generator=generator) * 2
    if step:
        logits = (logits / step).round() * step
    expected, _ = probabilities_of(logits.tolist(), drawn.params)
    found = set(range(9001))
    values = logits
    if drawn.params.top_k:
        ids = sampling_rules.top_k_ids(logits, drawn.params.top_k)
        found, values = set(ids.tolist()), logits[ids]
    if drawn.params.top_p < 1:
        log_weights = (values.double() - values.max()) / drawn.params.temperature
        kept = sampling_rules.highest_share(log_weights, log_weights.exp(), drawn.params.top_p)
        assert kept.tolist() == sorted(kept.tolist())
        found = {sorted(found)[i] for i in kept.tolist()}
    assert found == set(expected)


@pytest.mark.parametrize(
    "drawn",
    [spec(), spec(0.5), spec(1.3, 7), spec(1.0, 0, 0.8), spec(2.0, 12, 0.9)],
    ids=["all", "cold", "top-k", "top-p", "top-k-top-p"],
)
def test_frequencies_follow_the_reference_probabilities(drawn):
    logits = [random.Random(2).gauss(0, 1.5) for _ in range(20)]
    logits = torch.tensor(logits).tolist()
    draws = 8000
    batch = torch.tensor([logits]).expand(32, -1)
    counts: Counter[int] = Counter()
    for first in range(0, draws, 32):
        specs = [SampleSpec(drawn.params, 0, first + i) for i in range(32)]
        counts.update(ids_of(batch, specs))
    probabilities, _ = probabilities_of(logits, drawn.params)
    assert set(counts) <= set(probabilities)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in probabilities.items())
    freedom = len(probabilities) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_temperature_comes_before_top_p():
    logits = torch.tensor([[math.log(0.6), math.log(0.3), math.log(0.1)]])
    # At temperature 2 the weights are the square roots: 0.473, 0.334, 0.193, so top_p 0.6 keeps two ids. At 1: one.
    drawn = [ids_of(logits, [spec(2.0, 0, 0.6, position=i)])[0] for i in range(2000)]
    assert set(drawn) == {0, 1}
    assert abs(drawn.count(0) / 2000 - 0.5858) < 0.04
    assert {ids_of(logits, [spec(1.0, 0, 0.59, position=i)])[0] for i in range(50)} == {0}


def test_top_p_counts_the_share_of_what_top_k_left():
    logits = torch.tensor([[math.log(0.4), math.log(0.3), math.log(0.2), math.log(0.1)]])
    # Of the two best ids the first has 4/7 = 0.571: top_p 0.55 keeps it alone, of the whole it would need two.
    drawn = {ids_of(logits, [spec(1.0, 2, 0.55, position=i)])[0] for i in range(100)}
    assert drawn == {0}


def test_ties_go_to_the_lowest_ids_in_greedy_top_k_and_top_p():
    logits = torch.zeros(1, 5000)
    assert ids_of(logits, [spec(0.0)]) == [0]
    assert sampling_rules.top_k_ids(logits[0], 3).tolist() == [0, 1, 2]
    zeros = logits[0].double()
    assert sampling_rules.highest_share(zeros, zeros.exp(), 0.5).tolist() == list(range(2500))


def test_top_k_above_the_vocabulary_and_0_mean_no_limit():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    for position in range(20):
        drawn = {ids_of(logits, [spec(1.5, k, position=position)])[0] for k in (0, 300, 301, 10**6)}
        assert len(drawn) == 1


def mixed_batch(num_rows=32, vocab=4099):
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(9)) * 3
    kinds = [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.7, 40, 1.0),
        (1.0, 0, 0.9),
        (0.9, 50, 0.95),
        (3.0, 0, 0.999),
        (1.0, 1, 1.0),
    ]
    specs = [spec(*kinds[i % len(kinds)], seed=i * 77, position=i) for i in range(num_rows)]
    return logits, specs


def test_a_row_draws_the_same_id_alone_in_any_batch_and_at_any_index():
    logits, specs = mixed_batch()
    together = ids_of(logits, specs)
    assert [ids_of(logits[i : i + 1], [specs[i]])[0] for i in range(32)] == together
    order = random.Random(4).sample(range(32), 32)
    shuffled = ids_of(logits[order], [specs[i] for i in order])
    assert shuffled == [together[i] for i in order]


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["continuous", "tied"])
@pytest.mark.parametrize("vocab", [3, 41, 257, 4099])
def test_neighbours_with_another_top_k_change_no_id(vocab, step):
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(5)) * 3
    if step:
        logits = (logits / step).round() * step
    limits = [0, 2, 3, 40, 256, 257, 1000]
    specs = [spec(0.9, limits[i % 7], (1.0, 0.9, 0.5)[i % 3], seed=i, position=i) for i in range(24)]
    alone = [ids_of(logits[i : i + 1], [specs[i]])[0] for i in range(24)]
    for num_rows in (2, 3, 8, 17, 24):
        first = 24 - num_rows
        assert ids_of(logits[first:], specs[first:]) == alone[first:]


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (7, 0.9), (40, 0.5), (256, 1.0), (0, 0.01), (0, 0.04)])
def test_ties_across_the_border_keep_the_lowest_ids_in_a_batch(top_k, top_p):
    logits = torch.zeros(2, 5000)
    logits[:, 4000] = 1.0
    # One id above the border, all others on it: those kept are the lowest, whatever the selection found first.
    probabilities, _ = probabilities_of(logits[0].tolist(), spec(1.0, top_k, top_p).params)
    assert max(set(probabilities) - {4000}) == len(probabilities) - 2
    drawn: set[int] = set()
    for position in range(300):
        drawn.update(ids_of(logits, [spec(1.0, top_k, top_p, seed, 0, position) for seed in (1, 2)]))
    assert drawn <= set(probabilities)
    assert len(drawn) > min(len(probabilities), 5) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_logits_of_a_model_in_inference_mode_are_read_only(dtype):
    logits, specs = mixed_batch()
    expected = ids_of(logits, specs)
    with torch.inference_mode():
        inferred = logits.to(dtype, copy=True)
    assert ids_of(inferred, specs) == expected
    assert torch.equal(inferred, logits.to(dtype))


class Recorder(TorchDispatchMode):
    """Record the name and the largest size of every operation."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = [argument.numel() for argument in args if isinstance(argument, torch.Tensor)]
        self.calls.append((func.__name__, max(sizes, default=0)))
        return func(*args, **(kwargs or {}))


def test_nothing_sorts_the_vocabulary_and_nothing_draws_noise():
    logits = torch.randn(4, 49152, generator=torch.Generator().manual_seed(9)) * 2
    specs = [spec(), spec(0.8, 50), spec(0.8, 0, 0.9), spec(1.5, 30000, 0.999)]
    with Recorder() as recorder:
        sampler.sample(logits, specs)
    sorts = [size for name, size in recorder.calls if "sort" in name and "searchsorted" not in name]
    assert sorts
    assert max(sorts) <= sampling_rules.SMALL
    assert not [name for name, _ in recorder.calls if any(w in name for w in ("rand", "uniform", "expon", "multinom"))]


def test_greedy_rows_pay_for_no_exponential():
    logits, _ = mixed_batch()
    with Recorder() as recorder:
        sampler.sample(logits, [spec(0.0)] * 32)
    assert not [name for name, _ in recorder.calls if "exp" in name or "cumsum" in name]


def test_the_highest_uniform_number_still_gives_an_id_with_weight():
    weights = torch.tensor([0.25, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert sampling_rules.invert(weights, 1.0) == 1
    assert sampling_rules.invert(weights, 0.0) == 0
    assert sampling_rules.invert(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.0) == 1
    assert sampling_rules.invert(weights, 0.34) == 1
