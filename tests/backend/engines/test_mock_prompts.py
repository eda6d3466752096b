"""Check what the mock says of a prompt: made up, the same in any chunks and rows, different for different ones."""

from __future__ import annotations

import struct

import pytest

from inference_api.backend.engines.base import PoolSpec, RowPlan, RowResult, SampleSpec, ScoreSpec, StepPlan
from inference_api.backend.engines.mock import EMBEDDING_SIZE, MockEngine, MockScript
from inference_api.messages import Pooling
from inference_api.sampling_params import SamplingParams, TokenLogprobs
from tests.backend.factories import DIGITS, NOISE, make_image

PROMPT = b"hello there"
VOCAB_SIZE = 259


def results_of(engine: MockEngine, row: int, prompt: bytes, chunk_tokens: int, pooling: Pooling | None) -> list:
    """Take a prompt through a row in chunks, pooled or else scored with two likely ids; return what is said of it."""
    found: list[RowResult] = []
    for start in range(0, len(prompt), chunk_tokens):
        token_ids = tuple(prompt[start : start + chunk_tokens])
        pool = None if pooling is None else PoolSpec(pooling, start + chunk_tokens >= len(prompt))
        next_ids = tuple(prompt[start + 1 : start + 1 + chunk_tokens]) if pooling is None else ()
        score = ScoreSpec(next_ids, 2) if next_ids else None
        found += engine.execute(StepPlan((RowPlan(row, start, token_ids, None, pool=pool, score=score),))).rows
    engine.release(row)
    return found


@pytest.mark.parametrize("pooling", Pooling)
def test_an_embedding_comes_with_the_last_id_and_depends_on_every_id_alone(pooling: Pooling) -> None:
    engine = MockEngine(make_image(), 4, 256, NOISE)
    assert engine.info.embedding_size == EMBEDDING_SIZE
    (result,) = results_of(engine, 0, PROMPT, 3, pooling)
    numbers = struct.unpack(f"<{EMBEDDING_SIZE}f", result.embedding)
    assert all(-1 <= number < 1 for number in numbers)
    assert results_of(engine, 3, PROMPT, 64, pooling)[0].embedding == result.embedding
    others = [results_of(engine, 0, other, 3, pooling)[0].embedding for other in (b"hello thera", b"jello there")]
    assert len({result.embedding, *others}) == 3


def test_both_poolings_differ() -> None:
    engine = MockEngine(make_image(), 1, 256, NOISE)
    assert len({results_of(engine, 0, PROMPT, 64, pooling)[0].embedding for pooling in Pooling}) == 2


def test_scores_are_the_same_in_any_chunks_and_the_id_itself_is_first_or_second() -> None:
    engine = MockEngine(make_image(), 4, 256, NOISE)
    whole = [score for result in results_of(engine, 0, PROMPT, 64, None) for score in result.scores]
    assert whole == [score for result in results_of(engine, 2, PROMPT, 3, None) for score in result.scores]
    assert len(whole) == len(PROMPT) - 1
    for position, (next_id, score) in enumerate(zip(PROMPT[1:], whole, strict=True)):
        assert score.top[(position + 1) % 2] == (next_id, score.logprob)
        assert score.top == sorted(score.top, key=lambda entry: -entry[1])


@pytest.mark.parametrize("next_id", [0, 1, 258])
def test_likely_ids_are_of_the_vocabulary_and_stand_there_once(next_id: int) -> None:
    engine = MockEngine(make_image(), 1, 256, NOISE)
    plan = RowPlan(0, 0, (1, 2), None, score=ScoreSpec((next_id, next_id), 20))
    (result,) = engine.execute(StepPlan((plan,))).rows
    for score in result.scores:
        ids = [token_id for token_id, _ in score.top]
        assert len(set(ids)) == 20
        assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)


def test_a_scored_row_draws_beside_its_scores() -> None:
    engine = MockEngine(make_image(), 1, 256, DIGITS)
    spec = SampleSpec(SamplingParams(1.0, 40, 0.9, 7, logprobs=0), 0, 2, 2)
    plan = RowPlan(0, 0, (5, 6), spec, score=ScoreSpec((6,), 0))
    (result,) = engine.execute(StepPlan((plan,))).rows
    assert result.token_ids[:1] == (ord("2"),)
    assert result.logprobs is not None
    assert result.scores == (TokenLogprobs(-0.125, []),)


@pytest.mark.parametrize("pooling", [None, Pooling.MEAN])
def test_a_scripted_fault_ends_a_prompt_that_draws_nothing_too(pooling: Pooling | None) -> None:
    engine = MockEngine(make_image(), 1, 256, MockScript("noise", faults={b"POISON": "nan"}))
    (result,) = results_of(engine, 0, b"with POISON in it", 64, pooling)
    assert result.error is not None
