"""Check how a mask meets the logits: what it settles is what would be drawn, and others pay nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import MaskError, SampleSpec
from inference_api.backend.engines.logit_rules import settled_id
from inference_api.sampling_params import SamplingParams

NUM_ROWS = 24


class FixedMask:
    """Allow the same ids at every position; the length of its bits is that of a vocabulary."""

    def __init__(self, ids: Sequence[int], vocab: int) -> None:
        self._bits = sum(1 << token_id for token_id in ids).to_bytes((vocab + 7) // 8, "little")

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self._bits


class LostMask:
    """A mask of an answer that has left its form."""

    def allowed(self, ids: Sequence[int]) -> bytes:
        raise MaskError("it cannot go on.")


def spec_of(mask: object, **options: object) -> SampleSpec:
    params = msgspec.structs.replace(SamplingParams(1.0, 0, 1.0, 5), **options)
    return SampleSpec(params, 0, 3, 1, (1, 2, 3), mask=mask)


@pytest.mark.parametrize("vocab", [50, 812, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_mask_settles_is_what_would_be_drawn(vocab: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab)
    logits = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(vocab), dtype=dtype) * 3
    specs, dense = [], []
    for row in range(NUM_ROWS):
        allowed = sorted(rng.sample(range(vocab), [1, 2, vocab // 2, vocab - 1][row % 4]))
        mask = FixedMask(allowed, vocab)
        options = {"temperature": [0.0, 1.0][row // 4 % 2], "seed": row, "logprobs": 1}
        specs.append(spec_of(mask, **options))
        # One that is not allowed anyway: it changes nothing but that the row has to be drawn.
        barred = next((token_id for token_id in range(vocab) if token_id not in allowed), vocab - 1)
        dense.append(spec_of(mask, **options, banned_ids=(barred,)))
    assert sampler.sample(logits, specs) == sampler.sample(logits, dense)
    assert all(settled_id(spec, 0, vocab, is_greedy=False) is None for spec in dense)


def test_a_greedy_row_takes_its_highest_id_where_the_form_allows_it() -> None:
    assert settled_id(spec_of(FixedMask([3, 9], 16)), 9, 16, is_greedy=True) == 9
    assert settled_id(spec_of(FixedMask([3, 9], 16)), 4, 16, is_greedy=True) is None
    assert settled_id(spec_of(FixedMask([3, 9], 16)), 9, 16, is_greedy=False) is None


def test_the_only_id_is_taken_whatever_the_row_would_draw() -> None:
    assert settled_id(spec_of(FixedMask([3], 16)), 9, 16, is_greedy=False) == 3
    assert settled_id(spec_of(FixedMask([], 16)), 9, 16, is_greedy=False) is None


@pytest.mark.parametrize("options", [{"mirostat": 2}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}])
def test_a_row_with_other_rules_or_a_state_is_always_drawn(options: dict[str, object]) -> None:
    assert settled_id(spec_of(FixedMask([3], 16), **options), 3, 16, is_greedy=True) is None


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

    def counted(rows: torch.Tensor, *rest: object) -> object:
        copied.append(rows.shape[0])
        return draw_changed(rows, *rest)

    monkeypatch.setattr(sampler, "_draw_changed", counted)
    plain = [spec_of(None, seed=row) for row in range(8)]
    beside = [*plain[:7], spec_of(FixedMask(range(100), 4096))]
    assert sampler.sample(logits, beside)[:7] == sampler.sample(logits, plain)[:7]
    assert copied == [1] and torch.equal(logits, before)


class TurningMask:
    """Allow a third of a vocabulary, another one after each id."""

    def __init__(self, vocab: int) -> None:
        self._masks = [FixedMask(range(turn, vocab, 3), vocab) for turn in range(3)]

    def allowed(self, ids: Sequence[int]) -> bytes:
        return self._masks[len(ids) % 3].allowed(ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_under_a_mask_are_drawn_as_single_steps_would(temperature: float) -> None:
    prompt, vocab, num_steps = (3, 1, 2), 50, 6
    mask, params = TurningMask(vocab), SamplingParams(temperature, 20, 0.9, 5, logprobs=2)
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
