"""Hold embeddings and logprobs of prompts to the real model: what fp32 says, sentences alike and unlike, company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_api.backend.engines import fused
from inference_api.backend.engines.base import PoolSpec, RowPlan, StepPlan
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.messages import Pooling
from inference_api.model_image import ModelImage
from tests.backend.engines.prompt_checks import embedding_of, log_softmax_of, numbers_of, scores_of, states_of

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.filterwarnings("default")]

ALIKE = ("The cat sleeps on the warm sofa.", "A kitten is napping on the cosy couch.")
UNLIKE = "Interest rates rose by half a percent in March."
TEXTS = [
    *(*ALIKE, UNLIKE),
    "Water boils at a lower temperature on high mountains, because the pressure of the air is lower there.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
]
LEAST_COSINE = 0.998
"""0.9994 to 0.9998 are seen: some 2 or 3 % of the length."""
MOST_LOGPROB_GAP = 0.15
"""Median over a text's ids; 0.03 to 0.09 are seen."""


@pytest.fixture(scope="module")
def image(model_image_path) -> ModelImage:
    return ModelImage.open(Path(model_image_path))


@pytest.fixture(scope="module")
def engine(image, model_cache):
    return fused.load(image, num_rows=32, context_tokens=256, build_folder=model_cache / ARTEFACTS_FOLDER)


@pytest.fixture(scope="module")
def prompts(image) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(image.tokenizer_path))
    return [tokenizer.encode(text).ids for text in TEXTS]


def cosine(first: bytes, second: bytes) -> float:
    return float(torch.cosine_similarity(numbers_of(first), numbers_of(second), dim=0))


def test_embeddings_and_logprobs_are_those_of_fp32_up_to_the_engines_rounding(engine, image, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(image.path, dtype=torch.float32).eval()
    for prompt in prompts:
        states = states_of(model, prompt)
        for pooling, expected in ((Pooling.MEAN, states.mean(dim=0)), (Pooling.LAST, states[-1])):
            found = numbers_of(embedding_of(engine, 0, prompt, 256, pooling))
            similarity = float(torch.cosine_similarity(found, expected, dim=0))
            gap = float((found - expected).norm() / expected.norm())
            print(f"{pooling.value}: cosine {similarity:.5f}, distance {gap:.4f} of the length, {len(prompt)} ids")
            assert similarity > LEAST_COSINE
        expected = log_softmax_of(model, prompt)[range(len(prompt) - 1), prompt[1:]]
        scores = torch.tensor([score.logprob for score in scores_of(engine, 0, prompt, 256)]).double()
        gaps = (scores - expected).abs()
        print(f"logprobs: median gap {gaps.median():.4f}, largest {gaps.max():.3f}")
        assert gaps.median() < MOST_LOGPROB_GAP


@pytest.mark.parametrize("pooling", Pooling)
def test_sentences_that_say_the_same_are_nearer_than_others(pooling, engine, prompts):
    first, second, other = (embedding_of(engine, 0, prompt, 256, pooling) for prompt in prompts[:3])
    alike, unlike = cosine(first, second), max(cosine(first, other), cosine(second, other))
    print(f"{pooling.value}: alike {alike:.3f}, unlike {unlike:.3f}")
    assert alike > unlike


def test_an_embedding_is_the_same_bytes_alone_and_among_31_others(engine, prompts):
    alone = embedding_of(engine, 0, prompts[3], 7, Pooling.MEAN)
    pool = PoolSpec(Pooling.MEAN, is_last=True)
    plans = [RowPlan(row, 0, tuple(prompts[row % len(prompts)]), None, pool=pool) for row in range(32)]
    found = {result.row: result.embedding for result in engine.execute(StepPlan(tuple(plans))).rows}
    assert [found[row] for row in range(3, 32, len(prompts))] == [alone] * 6
