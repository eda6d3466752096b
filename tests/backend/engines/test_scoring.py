"""Hold the logprobs of known ids to a log-softmax, in pieces whose logits are few at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.engines.base import RowPlan, RowResult, SampleSpec, ScoreSpec
from inference_api.backend.engines.sampler import NON_FINITE, row_result, sample
from inference_api.backend.engines.scoring import SCORED_TOKENS, score_row
from inference_api.sampling_params import SamplingParams, TokenLogprobs

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3, logprobs=2)


class Logits:
    """Logits of every position of a row, and which pieces were asked for."""

    def __init__(self, num_tokens: int, vocab: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.all = torch.randn(num_tokens, vocab, generator=generator) * 4
        self.pieces: list[tuple[int, int]] = []

    def compute(self, piece: RowPlan) -> torch.Tensor:
        self.pieces.append((piece.start, len(piece.token_ids)))
        return self.all[piece.start : piece.start + len(piece.token_ids)].clone()


@settings(deadline=None, max_examples=30)
@given(
    num_tokens=st.integers(1, 300),
    start=st.integers(0, 50),
    num_top=st.integers(0, 20),
    vocab=st.sampled_from([7, 64, 259, 1024]),
    seed=st.integers(0, 99),
    is_last=st.booleans(),
)
def test_scores_are_a_log_softmax_of_few_positions_at_a_time(num_tokens, start, num_top, vocab, seed, is_last) -> None:
    logits = Logits(start + num_tokens, vocab, seed)
    next_ids = tuple((7 * position + seed) % vocab for position in range(num_tokens - is_last))
    if not next_ids:
        return
    plan = RowPlan(0, start, (1,) * num_tokens, None, score=ScoreSpec(next_ids, num_top))
    result = score_row(plan, plan.score, logits.compute)
    assert (result.error, result.token_ids, len(result.scores)) == (None, (), len(next_ids))
    assert sum(count for _, count in logits.pieces) == num_tokens
    assert max(count for _, count in logits.pieces) <= 128
    expected = logits.all[start:].double().log_softmax(dim=1)
    for row, next_id, score in zip(expected, next_ids, result.scores, strict=False):
        assert score.logprob == pytest.approx(float(row[next_id]), abs=1e-5)
        values, ids = row.sort(descending=True, stable=True)
        assert [token_id for token_id, _ in score.top] == ids[:num_top].tolist()
        assert [logprob for _, logprob in score.top] == pytest.approx(values[:num_top].tolist(), abs=1e-5)


def test_pieces_do_not_change_a_bit() -> None:
    logits = Logits(300, 259, 5)
    next_ids = tuple(range(259)) + tuple(range(40))

    def scores(chunks: list[tuple[int, int]]) -> list[TokenLogprobs]:
        found: list[TokenLogprobs] = []
        for first, last in chunks:
            score = ScoreSpec(next_ids[first:last], 4)
            found += score_row(
                RowPlan(0, first, (1,) * (last - first), None, score=score), score, logits.compute
            ).scores
        return found

    assert scores([(0, 299)]) == scores([(0, 1), (1, 100), (100, 299)])


def test_a_row_draws_after_its_last_id_what_it_draws_without_being_scored() -> None:
    logits = Logits(200, 259, 9)
    spec = SampleSpec(SAMPLED, 0, 200)
    plan = RowPlan(0, 0, (1,) * 200, spec, score=ScoreSpec((2,) * 199, 1))
    result = score_row(plan, plan.score, logits.compute)
    assert (result.token_ids, result.logprobs) == drawn(logits.all[-1:], spec)
    assert len(result.scores) == 199


def drawn(logits: torch.Tensor, spec: SampleSpec) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
    result = row_result(0, sample(logits, [spec]))
    return result.token_ids, result.logprobs


@pytest.mark.parametrize("position", [0, 130, 199])
def test_logits_that_are_not_finite_end_the_row_and_nothing_more_of_it_is_computed(position) -> None:
    logits = Logits(200, 259, 9)
    logits.all[position, 100] = math.nan
    plan = RowPlan(0, 0, (1,) * 200, SampleSpec(SAMPLED, 0, 200), score=ScoreSpec((2,) * 199, 1))
    assert score_row(plan, plan.score, logits.compute) == RowResult(0, error=NON_FINITE)
    assert len(logits.pieces) == 1 + position // SCORED_TOKENS
