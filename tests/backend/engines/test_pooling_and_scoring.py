"""Hold embeddings and the logprobs of prompts to what each model says itself, on every family and in any chunks."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from inference_api.backend.engines import fused
from inference_api.backend.engines import transformers as rows_engine
from inference_api.backend.engines.base import Engine, PoolSpec, RowPlan, RowResult, SampleSpec, ScoreSpec, StepPlan
from inference_api.backend.engines.model_rows import SoloRows
from inference_api.messages import Pooling
from inference_api.prepare import prepare
from inference_api.sampling_params import TokenLogprobs
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.prompt_checks import (
    NUM_TOP,
    are_near,
    embedding_of,
    log_softmax_of,
    numbers_of,
    scores_of,
    states_of,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_torch_thread"),
]

LEAST_COSINE = 0.995
"""Between what the quantized engine pools and the fp64 model; 0.998 is seen, for the last of 30 ids."""


@pytest.fixture(scope="module")
def rows_engine_of(tiny_image):
    """Return the `transformers` engine of a family in fp64; each is loaded once a module."""
    built: dict[str, Engine] = {}

    def engine_of(family: str) -> Engine:
        if family not in built:
            image = tiny_image(family)
            built[family] = rows_engine.load(image, num_rows=4, context_tokens=tiny.CONTEXT_TOKENS, dtype="float64")
        return built[family]

    return engine_of


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_transformers_engine_pools_and_scores_what_a_forward_of_the_whole_says(
    family, rows_engine_of, tiny_checkpoint
):
    engine, (model, _) = rows_engine_of(family), tiny_checkpoint(family)
    (prompt,) = tiny.random_prompts(1, [24])
    states = states_of(model, prompt)
    assert engine.info.embedding_size == states.shape[1]
    for chunk_tokens in (3, 24):
        for pooling, expected in ((Pooling.MEAN, states.mean(dim=0)), (Pooling.LAST, states[-1])):
            found = numbers_of(embedding_of(engine, 2, prompt, chunk_tokens, pooling))
            assert (found - expected).abs().max() < 1e-6
        assert are_near(scores_of(engine, 1, prompt, chunk_tokens), log_softmax_of(model, prompt), prompt, 1e-6)


def test_a_model_that_runs_one_row_at_a_time_pools_and_scores_the_same(rows_engine_of, tiny_checkpoint):
    model, _ = tiny_checkpoint("gpt2")
    info = dataclasses.replace(rows_engine_of("gpt2").info, embedding_size=rows_engine._embedding_size(SoloRows(model)))
    engine = rows_engine.TransformersEngine(SoloRows(model), info)
    (prompt,) = tiny.random_prompts(1, [24])
    expected = states_of(model, prompt).mean(dim=0)
    for chunk_tokens in (5, 24):
        assert (numbers_of(embedding_of(engine, 2, prompt, chunk_tokens, Pooling.MEAN)) - expected).abs().max() < 1e-6
        assert are_near(scores_of(engine, 1, prompt, chunk_tokens), log_softmax_of(model, prompt), prompt, 1e-6)


class Headless(torch.nn.Module):
    """A model that shows no states: nothing that its head stands on."""


def test_a_model_that_shows_no_states_makes_no_embeddings():
    assert rows_engine._embedding_size(SoloRows(Headless())) == 0


FUSED_FAMILIES = ("llama", "mistral", "qwen3")


@pytest.fixture(scope="module")
def fused_engine_of(tiny_image, fused_library_of_tests, fused_build_folder):
    """Return the `fused` engine of a family on its library or in torch; each is loaded once a module."""
    built: dict[tuple[str, bool], Engine] = {}

    def engine_of(family: str, *, native: bool) -> Engine:
        if (family, native) not in built:
            built[family, native] = fused.load(
                tiny_image(family),
                num_rows=32,
                context_tokens=tiny.CONTEXT_TOKENS,
                build_folder=fused_build_folder,
                num_threads=2 if native else 1,
                native=native,
            )
        return built[family, native]

    return engine_of


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_both_paths_of_the_fused_engine_give_the_same_bits_in_any_chunks_and_rows(family, fused_engine_of):
    library, fallback = (fused_engine_of(family, native=native) for native in (True, False))
    (prompt,) = tiny.random_prompts(1, [50])
    for pooling in Pooling:
        found = {
            embedding_of(engine, row, prompt, chunk_tokens, pooling)
            for engine, row, chunk_tokens in ((library, 0, 50), (library, 9, 1), (library, 31, 7), (fallback, 3, 13))
        }
        assert len(found) == 1
    scores = scores_of(library, 0, prompt, 50)
    assert scores == scores_of(library, 5, prompt, 7) == scores_of(fallback, 2, prompt, 13)


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_the_fused_engine_pools_what_the_model_says_up_to_its_rounding(family, fused_engine_of, tiny_checkpoint):
    engine, (model, _) = fused_engine_of(family, native=True), tiny_checkpoint(family)
    for prompt in tiny.random_prompts(3, [30]):
        states = states_of(model, prompt)
        for pooling, expected in ((Pooling.MEAN, states.mean(dim=0)), (Pooling.LAST, states[-1])):
            found = numbers_of(embedding_of(engine, 0, prompt, 30, pooling))
            assert len(found) == engine.info.embedding_size
            assert torch.cosine_similarity(found, expected, dim=0) > LEAST_COSINE


@pytest.mark.parametrize("native", [True, False])
def test_the_fused_engine_scores_with_the_logits_that_it_would_draw_from(native, fused_engine_of):
    engine = fused_engine_of("mistral", native=native)
    (prompt,) = tiny.random_prompts(1, [30])
    logits = []
    for position, token_id in enumerate(prompt):
        engine.execute(StepPlan((RowPlan(4, position, (token_id,), SampleSpec(tiny.GREEDY, 0, position + 1)),)))
        logits.append(engine._logits[0].clone())
    expected = torch.stack(logits).double().log_softmax(dim=-1)  # (tokens, vocab)
    assert are_near(scores_of(engine, 1, prompt, 30), expected, prompt, 1e-5)


@pytest.mark.parametrize("native", [True, False])
def test_rows_that_draw_are_pooled_and_are_scored_share_steps_and_change_no_bit_of_each_other(native, fused_engine_of):
    engine = fused_engine_of("llama", native=native)
    prompts = tiny.random_prompts(6, [41, 9, 30])
    alone = [
        embedding_of(engine, 0, prompts[0], 41, Pooling.MEAN),
        embedding_of(engine, 0, prompts[1], 9, Pooling.LAST),
        scores_of(engine, 0, prompts[2], 30),
        drawn_alone(engine, prompts[3]),
        embedding_of(engine, 0, prompts[4], 9, Pooling.MEAN),
        scores_of(engine, 0, prompts[5], 30),
    ]
    found: dict[int, RowResult] = {}
    scores: dict[int, list[TokenLogprobs]] = {2: [], 5: []}
    for start in range(0, 41, 5):
        plans = [plan for row, prompt in enumerate(prompts) for plan in plans_of(row, prompt, start)]
        for result in engine.execute(StepPlan(tuple(plans))).rows:
            found[result.row] = result
            scores.get(result.row, []).extend(result.scores)
    together = [found[0].embedding, found[1].embedding, scores[2], found[3].token_ids, found[4].embedding, scores[5]]
    assert together == alone


def plans_of(row: int, prompt: list[int], start: int) -> list[RowPlan]:
    """Return the plan of a row for the chunk of five ids at `start`, if there is one: six rows, three kinds."""
    token_ids = tuple(prompt[start : start + 5])
    if not token_ids:
        return []
    is_last = start + 5 >= len(prompt)
    pool = {0: Pooling.MEAN, 1: Pooling.LAST, 4: Pooling.MEAN}.get(row)
    next_ids = tuple(prompt[start + 1 : start + 6]) if row in (2, 5) else ()
    sample = SampleSpec(tiny.GREEDY, 0, len(prompt)) if row == 3 and is_last else None
    return [
        RowPlan(
            row,
            start,
            token_ids,
            sample,
            pool=None if pool is None else PoolSpec(pool, is_last),
            score=ScoreSpec(next_ids, NUM_TOP) if next_ids else None,
        )
    ]


def drawn_alone(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    plan = RowPlan(0, 0, tuple(prompt), SampleSpec(tiny.GREEDY, 0, len(prompt)))
    (result,) = engine.execute(StepPlan((plan,))).rows
    engine.release(0)
    return result.token_ids


def test_nan_ends_a_pooled_and_a_scored_row_alone_and_the_row_is_sound_again(
    fused_engine_of, tiny_checkpoint, byte_tokenizer, fused_build_folder, tmp_path
):
    model = copy.deepcopy(tiny_checkpoint("llama")[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    folder = tiny.save_checkpoint(model, tmp_path / "poisoned", byte_tokenizer)
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    sizes = {"num_rows": 4, "context_tokens": tiny.CONTEXT_TOKENS}
    poisoned = (
        fused.load(image, build_folder=fused_build_folder, num_threads=1, **sizes),
        fused.load(image, build_folder=fused_build_folder, num_threads=1, native=False, **sizes),
        rows_engine.load(image, dtype="float64", **sizes),
    )
    for engine in poisoned:
        rows = [
            RowPlan(0, 0, (5, 77, 6), None, pool=PoolSpec(Pooling.MEAN, is_last=False)),
            RowPlan(1, 0, (5, 77, 6), None, score=ScoreSpec((77, 6), NUM_TOP)),
            RowPlan(2, 0, (5, 8, 6), None, pool=PoolSpec(Pooling.LAST, is_last=True)),
            RowPlan(3, 0, (5, 77, 6), None, pool=PoolSpec(Pooling.LAST, is_last=False)),
        ]
        results = engine.execute(StepPlan(tuple(rows))).rows
        assert [(result.row, result.error is None) for result in results] == [(row, row == 2) for row in range(4)]
        for row in range(4):
            engine.release(row)
        again = [embedding_of(engine, row, [5, 8, 6], 3, Pooling.LAST) for row in range(4)]
        assert again == [results[2].embedding] * 4


def test_a_plan_that_pools_or_scores_wrongly_fails_alone(fused_engine_of, rows_engine_of):
    pool, score = PoolSpec(Pooling.MEAN, is_last=True), ScoreSpec((1,), NUM_TOP)
    for engine in (fused_engine_of("llama", native=True), rows_engine_of("llama")):
        rows = (
            RowPlan(0, 0, (1, 2), SampleSpec(tiny.GREEDY, 0, 2), pool=pool),
            RowPlan(1, 0, (1, 2), None, pool=pool, score=score),
            RowPlan(2, 0, (1, 2), None, score=ScoreSpec((1, 2, 3), NUM_TOP)),
            RowPlan(3, 0, (1, 2), None, score=ScoreSpec((1, tiny.VOCAB_SIZE), NUM_TOP)),
        )
        results = engine.execute(StepPlan(rows)).rows
        assert [result.error and result.error.code for result in results] == ["invalid_plan"] * 4
        engine.execute(StepPlan((RowPlan(0, 0, (1, 2), None),)))
        (late,) = engine.execute(StepPlan((RowPlan(0, 2, (3,), None, pool=pool),))).rows
        assert late.error.message == "Position 2 does not follow the ids that were pooled."
        engine.release(0)
