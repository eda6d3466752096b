"""Check how a mask meets the logits: what it settles is what would be drawn, and others pay nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import msgspec
import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import MaskError, SampleSpec
from inference_api.backend.engines.logit_rules import only_id
from inference_api.sampling_params import SamplingParams

NUM_ROWS = 24


class FixedMask:
    """Allow the same ids at every position; the length of its bits is that of a vocabulary."""

    def __init__(self, ids: Sequence[int], vocab: int) -> None:
        self._bits = sum(1 << token_id for token_id in ids).to_bytes((vocab + 7) // 8, "little")

    def forced_id(self, ids: Sequence[int]) -> int | None:
        return None

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        return bool(self.allowed(ids)[token_id // 8] >> token_id % 8 & 1)

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self._bits


class LostMask:
    """A mask of an answer that has left its form."""

    def forced_id(self, ids: Sequence[int]) -> int | None:
        raise MaskError("it cannot go on.")

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        raise MaskError("it cannot go on.")

    def allowed(self, ids: Sequence[int]) -> bytes:
        raise MaskError("it cannot go on.")


def spec_of(mask: object, **options: object) -> SampleSpec:
    params = msgspec.structs.replace(SamplingParams(1.0, 0, 1.0, 5), **options)
    return SampleSpec(params, 0, 3, 1, (1, 2, 3), mask=mask)


class AskedMask(FixedMask):
    """A fixed mask that counts how often its bits are asked for."""

    num_asked = 0

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        return bool(self._bits[token_id // 8] >> token_id % 8 & 1)

    def allowed(self, ids: Sequence[int]) -> bytes:
        self.num_asked += 1
        return super().allowed(ids)


@pytest.mark.parametrize("vocab", [50, 812, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_drawn_without_a_mask_first_keeps_to_it(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    logits = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype) * 3
    specs, dense, allowed = [], [], []
    for row in range(NUM_ROWS):
        allowed.append(sorted(rng.sample(range(vocab), [1, 2, vocab // 2, vocab - 1][row % 4])))
        mask = FixedMask(allowed[-1], vocab)
        options = {"temperature": [0.0, 1.0][row // 4 % 2], "seed": row, "logprobs": 1}
        specs.append(spec_of(mask, **options))
        # One that is not allowed anyway: it changes nothing but that the row has to be drawn under its mask.
        barred = next((token_id for token_id in range(vocab) if token_id not in allowed[-1]), vocab - 1)
        dense.append(spec_of(mask, **options, banned_ids=(barred,)))
    draws = sampler.sample(logits, specs)
    for row, (draw, same) in enumerate(zip(draws, sampler.sample(logits, dense), strict=True)):
        assert draw.token_id in allowed[row]
        assert draw == same or (specs[row].params.temperature and len(allowed[row]) > 1)
    assert all(only_id(spec, vocab) is None for spec in dense)


def test_the_bits_of_a_mask_are_asked_for_only_if_it_takes_no_try() -> None:
    logits = torch.zeros(1, 64)
    logits[0, 9] = 30.0
    for options, highest in (({"temperature": 0.0}, 9), ({}, 9), ({"temperature": 0.0}, 8), ({}, 8)):
        mask = AskedMask([3, highest], 64)
        (draw,) = sampler.sample(logits, [spec_of(mask, **options)])
        assert draw.token_id == 9 if highest == 9 else draw.token_id in (3, 8)
        assert (mask.num_asked == 0) is (highest == 9)


class ForcingMask(AskedMask):
    """A mask that foretells the only id."""

    def forced_id(self, ids: Sequence[int]) -> int | None:
        return 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_forced_id_is_taken_without_a_draw(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", None)
    mask = ForcingMask([3], 64)
    assert sampler.sample(torch.zeros(1, 64), [spec_of(mask, temperature=temperature)])[0].token_id == 3
    assert mask.num_asked == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_tries_and_the_draw_after_them_give_each_id_its_share_under_the_mask(share: float) -> None:
    allowed, num_draws = [1, 2, 5, 9], 6000
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()  # (allowed,)
    shares = torch.full((12,), (1 - share) / 8).double()
    shares[allowed] = weights * share
    mask = FixedMask(allowed, 12)
    specs = [dataclasses.replace(spec_of(mask), position=position) for position in range(num_draws)]
    draws = sampler.sample(shares.log().float().expand(num_draws, 12).contiguous(), specs)
    counts = torch.bincount(torch.tensor([draw.token_id for draw in draws]), minlength=12).double()
    assert counts.sum() == counts[allowed].sum() == num_draws
    expected = weights * num_draws
    assert float(((counts[allowed] - expected) ** 2 / expected).sum()) < 16.27  # chi-square, 3 degrees, 0.1 %


def test_the_only_id_is_taken_whatever_the_row_would_draw() -> None:
    assert only_id(spec_of(FixedMask([3], 16)), 16) == 3
    assert only_id(spec_of(FixedMask([], 16)), 16) is None
    assert only_id(spec_of(FixedMask([3, 9], 16)), 16) is None


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}])
def test_a_row_with_other_rules_or_a_state_is_always_drawn(options: dict[str, object]) -> None:
    assert only_id(spec_of(FixedMask([3], 16), **options), 16) is None
    assert not spec_of(FixedMask([3], 16), **options).tries_before_mask


def test_a_mask_that_is_lost_or_of_another_vocabulary_is_told_of() -> None:
    logits = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    greedy = {"temperature": 0.0}
    lost, short = sampler.sample(logits, [spec_of(LostMask(), **greedy), spec_of(FixedMask([3], 8), **greedy)])
    assert lost.error is not None and "it cannot go on." in lost.error.message
    assert short.error is not None and "by 1 bytes, where 2 hold the vocabulary" in short.error.message


def test_rows_beside_a_mask_are_neither_copied_nor_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(8, 4096, generator=torch.Generator().manual_seed(2)) * 3
    before = logits.clone()
    copied: list[int] = []
    draw_changed = sampler._draw_changed

    def counted(logits: torch.Tensor, rows: Sequence[int], *rest: object) -> object:
        copied.extend(rows)
        return draw_changed(logits, rows, *rest)

    monkeypatch.setattr(sampler, "_draw_changed", counted)
    plain = [spec_of(None, seed=row) for row in range(8)]
    beside = [*plain[:7], spec_of(FixedMask(range(4000, 4002), 4096))]
    assert sampler.sample(logits, beside)[:7] == sampler.sample(logits, plain)[:7]
    assert copied == [7] and torch.equal(logits, before)


class TurningMask:
    """Allow a third of a vocabulary, another one after each id."""

    def __init__(self, vocab: int) -> None:
        self._masks = [FixedMask(range(turn, vocab, 3), vocab) for turn in range(3)]

    def forced_id(self, ids: Sequence[int]) -> int | None:
        return None

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        return token_id % 3 == len(ids) % 3

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self._masks[len(ids) % 3].allowed(ids)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 20, 0.9), (1.0, 0, 1.0)])
def test_drafts_under_a_mask_are_drawn_as_single_steps_would(temperature: float, top_k: int, top_p: float) -> None:
    prompt, vocab, num_steps = (3, 1, 2), 50, 6
    mask, params = TurningMask(vocab), SamplingParams(temperature, top_k, top_p, 5, logprobs=2)
    # Stands for a model: the logits at a position depend on the position alone.
    logits = torch.randn(len(prompt) + num_steps, vocab, generator=torch.Generator().manual_seed(4))
    known, singly = list(prompt), []
    for _ in range(num_steps):
        spec = SampleSpec(params, 0, len(known), 3, tuple(known), mask=mask)
        singly += sampler.sample(logits[len(known) : len(known) + 1], [spec])
        known.append(singly[-1].token_id)
    drafts = known[3:8]
    specs = sampler.drafted_specs(SampleSpec(params, 0, 3, 3, prompt, mask=mask), drafts)
    assert sampler.accepted(sampler.sample(logits[3:9], specs), drafts) == singly
