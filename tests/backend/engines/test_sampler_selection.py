"""Check that a selection which fails ends the rows that asked for one, and leaves the others what they draw."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.engines.selection import Head, TorchSelection, Wish
from inference_api.sampling_params import SamplingParams

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]


class LackingSelection(TorchSelection):
    """Have no memory for wishes of the rows in `lacking`."""

    def __init__(self, *lacking: int) -> None:
        self._lacking = lacking

    def heads(self, logits: torch.Tensor, wishes: Sequence[Wish]) -> list[Head]:
        if any(wish.row in self._lacking for wish in wishes):
            raise MemoryError("the library gets no memory for a selection")
        return super().heads(logits, wishes)


def spec(**options: object) -> SampleSpec:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3, **options}
    return SampleSpec(SamplingParams(**given), 0, 7)


def test_a_selection_that_fails_ends_the_rows_that_wished_for_it_and_no_others() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(2))
    specs = [
        spec(temperature=0.0),
        spec(top_k=20),
        spec(top_k=30),
        spec(top_p=0.9),
        spec(top_k=400),
        spec(temperature=0.0),
    ]
    whole = sampler.sample(logits, specs)
    found = sampler.sample(logits, specs, LackingSelection(1))
    for row in (1, 2):  # they are selected together
        assert found[row].error is not None and found[row].error.code == "sampling_failed"
        assert found[row].error.message == "Sampling failed for this request: MemoryError"
    assert [found[row] for row in (0, 3, 4, 5)] == [whole[row] for row in (0, 3, 4, 5)]


def test_logprobs_that_cannot_be_selected_end_the_rows_that_ask_for_them() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(2))
    specs = [spec(temperature=0.0), spec(temperature=0.0, logprobs=2), spec(top_k=20)]
    whole = sampler.sample(logits, specs)
    found = sampler.sample(logits, specs, LackingSelection(1))
    assert found[1].error is not None and found[1].error.code == "sampling_failed"
    assert [found[0], found[2]] == [whole[0], whole[2]]


def test_rows_whose_options_change_logits_fail_alone_too() -> None:
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(2))
    specs = [spec(temperature=0.0), spec(top_k=20, logit_bias={5: 1.0})]
    found = sampler.sample(logits, specs, LackingSelection(0))
    assert [draw.error is None for draw in found] == [True, False]
    assert found[0] == sampler.sample(logits, specs)[0]
