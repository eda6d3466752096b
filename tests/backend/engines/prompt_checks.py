"""Take prompts through an engine for what it says of them, and ask a model itself for the same."""

from __future__ import annotations

import struct

import torch

from inference_api.backend.engines.base import Engine, PoolSpec, RowPlan, RowResult, SampleSpec, ScoreSpec, StepPlan
from inference_api.messages import Pooling
from inference_api.sampling_params import TokenLogprobs
from tests.backend.engines import tiny_models as tiny

NUM_TOP = 5


def embedding_of(engine: Engine, row: int, prompt: list[int], chunk_tokens: int, pooling: Pooling) -> bytes:
    """Take a prompt through a row in chunks; return its embedding."""
    results: tuple[RowResult, ...] = ()
    for start in range(0, len(prompt), chunk_tokens):
        assert results == (), "something is said before the end"
        token_ids = tuple(prompt[start : start + chunk_tokens])
        pool = PoolSpec(pooling, is_last=start + len(token_ids) == len(prompt))
        results = engine.execute(StepPlan((RowPlan(row, start, token_ids, None, pool=pool),))).rows
    engine.release(row)
    (result,) = results
    assert (result.row, result.error) == (row, None)
    assert result.embedding is not None
    return result.embedding


def numbers_of(embedding: bytes) -> torch.Tensor:
    """Return the numbers (hidden,) of an embedding."""
    return torch.tensor(struct.unpack(f"<{len(embedding) // 4}f", embedding), dtype=torch.float64)


def scores_of(engine: Engine, row: int, prompt: list[int], chunk_tokens: int) -> list[TokenLogprobs]:
    """Take a prompt through a row in chunks and draw an id after it; return the logprobs of each prompt id but one."""
    scores: list[TokenLogprobs] = []
    for start in range(0, len(prompt), chunk_tokens):
        token_ids = tuple(prompt[start : start + chunk_tokens])
        end = start + len(token_ids)
        score = ScoreSpec(tuple(prompt[start + 1 : end + 1]), NUM_TOP) if start + 1 < len(prompt) else None
        sample = SampleSpec(tiny.GREEDY, 0, end) if end == len(prompt) else None
        (*results,) = engine.execute(StepPlan((RowPlan(row, start, token_ids, sample, score=score),))).rows
        assert [result.error for result in results] == [None] * len(results)
        assert [len(result.token_ids) for result in results if sample] == ([1] if sample else [])
        scores += [found for result in results for found in result.scores]
    engine.release(row)
    return scores


def states_of(model, prompt: list[int]) -> torch.Tensor:
    """Return the states (tokens, hidden) after the last norm, of a forward of the whole."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()


def log_softmax_of(model, prompt: list[int]) -> torch.Tensor:
    """Return the logprobs (tokens, vocab) of a forward of the whole."""
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].double().log_softmax(dim=-1)


def are_near(scores: list[TokenLogprobs], expected: torch.Tensor, prompt: list[int], tolerance: float) -> bool:
    """Say whether scores are those of `expected` (tokens, vocab), and the most likely ids too."""
    found = torch.tensor([score.logprob for score in scores], dtype=torch.float64)
    own = found - expected[range(len(prompt) - 1), prompt[1:]]
    top = torch.tensor([[logprob for _, logprob in score.top] for score in scores], dtype=torch.float64)
    ids = torch.tensor([[token_id for token_id, _ in score.top] for score in scores])
    highest = expected[:-1].topk(NUM_TOP, dim=1).values
    gaps = (own.abs().max(), (top - highest).abs().max(), (top - expected[:-1].gather(1, ids)).abs().max())
    return len(scores) == len(prompt) - 1 and bool(max(gaps) < tolerance)
