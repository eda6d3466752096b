"""Check mirostat: its draws and states against the scalar reference, and surprise that stays at its target."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.mirostat import draw_with_mirostat
from inference_api.backend.engines.sampler import Draw, row_result
from inference_api.sampling_params import SamplingParams
from tests.backend.engines.scalar_sampler import BORDER, mirostat_draw

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]


def mirostat(version: int, tau: float = 5.0, eta: float = 0.1, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(
        temperature, 0, 1.0, 11, mirostat=version, mirostat_tau=tau, mirostat_eta=eta, logprobs=version
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("version", [1, 2])
def test_draws_and_states_are_the_references_step_by_step(version: int, dtype: torch.dtype) -> None:
    source = random.Random(version)
    num_compared = 0
    for vocab in (2, 3, 120, 1500):
        for scale in (0.5, 3.0, 12.0):
            params = mirostat(version, source.choice([0.5, 3.0, 6.0]), source.choice([0.1, 1.0]), 0.7)
            mu: float | None = None
            logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
            for position, row in enumerate(logits.to(dtype)):
                spec = SampleSpec(params, 1, position, mu=mu)
                (draw,) = sampler.sample(row.unsqueeze(0), [spec])
                token_id, next_mu, margin = mirostat_draw(row.tolist(), spec)
                if margin <= BORDER:
                    break
                assert draw.token_id == token_id
                assert draw.mu == pytest.approx(next_mu, abs=1e-9)
                mu = draw.mu
                num_compared += 1
    assert num_compared > 80


@pytest.mark.parametrize("version", [1, 2])
def test_the_surprise_stays_at_its_target(version: int) -> None:
    # Zipf's law, which version 1 takes for granted.
    logits = -1.1 * torch.arange(1, 5001, dtype=torch.float64).log()
    params, mu, surprises = mirostat(version, tau=4.0, eta=0.2), 8.0, []
    for position in range(600):
        number = random.Random(position).random()
        before = mu
        _, mu = draw_with_mirostat(logits, params, mu, number)
        surprises.append((before - mu) / params.mirostat_eta + params.mirostat_tau)
    assert sum(surprises[100:]) / 500 == pytest.approx(4.0, abs=0.1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mu", [-1e6, -1.0, 0.0, 1e-9, 1e6])
def test_any_state_leaves_something_to_draw(version: int, mu: float) -> None:
    generator = torch.Generator().manual_seed(3)
    for logits in (
        torch.zeros(64),
        torch.randn(64, generator=generator) * 3,
        torch.tensor([0.0, 1e30, -1e30]),
        torch.tensor([-torch.inf, 2.0, -torch.inf]),
        torch.tensor([1.5]),
    ):
        token_id, after = draw_with_mirostat(logits, mirostat(version), mu, 0.999)
        assert logits[token_id] > -torch.inf
        assert after == after
        if mu < 0:
            assert token_id == int(logits.argmax())


def test_the_state_comes_back_with_the_row_and_other_rows_have_none() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(2, -1).contiguous()
    specs = [SampleSpec(mirostat(2), 0, 3, mu=2.5), SampleSpec(SamplingParams(1.0, 0, 1.0, 11), 0, 3)]
    with_state, without = sampler.sample(logits, specs)
    assert with_state.mu is not None and without.mu is None
    assert row_result(4, [with_state]).mu == with_state.mu
    assert with_state.logprobs is not None and len(with_state.logprobs.top) == 2
    assert sampler.sample(logits[:1], specs[:1]) == [with_state]


def test_the_first_state_is_twice_the_target() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    first = SampleSpec(mirostat(2, tau=3.0), 0, 3)
    assert sampler.sample(logits, [first]) == sampler.sample(logits, [dataclasses.replace(first, mu=6.0)])


def test_greedy_draws_keep_no_state() -> None:
    (draw,) = sampler.sample(torch.tensor([[0.0, 2.0]]), [SampleSpec(mirostat(1, temperature=0.0), 0, 3)])
    assert draw._replace(logprobs=None) == Draw(1)
