"""Hold the `fused` engine to the real model: a pinned text, one row's bits in company, agreement with fp32, memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_api.backend.engines import fused, transformers
from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.fused_checks import is_independent

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.filterwarnings("default")]

PINNED_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PINNED_TEXT = "The capital of France is Paris.<|im_end|>"
AGREEMENT_TOKENS = 8
AGREEMENT_FLOOR = 0.6
"""Share of greedy ids before the first difference that must agree with fp32: far below what is printed."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "List three uses of a paperclip.",
    "1 2 3 4 5 6",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The mitochondria",
    "Q: Why is the sky blue?\nA:",
    "import numpy as np\n\n",
    "In 1969, two men",
    "Water boils at",
    "The three laws of motion are",
    "A recipe for bread:",
]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def image(model_image_path) -> ModelImage:
    return ModelImage.open(Path(model_image_path))


@pytest.fixture(scope="module")
def growth() -> dict[str, int]:
    return {}


@pytest.fixture(scope="module")
def engine(image, model_cache, growth):
    before = resident_bytes()
    # From the cache that the service starts from, where the weights are packed once.
    engine = fused.load(image, num_rows=32, context_tokens=2048, build_folder=model_cache / ARTEFACTS_FOLDER)
    growth["at_load"] = resident_bytes() - before
    return engine


@pytest.fixture(scope="module")
def prompts(image) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(image.tokenizer_path))
    return [tokenizer.encode(text).ids for text in [PINNED_PROMPT, *PROMPTS]]


def test_the_greedy_text_of_one_prompt_is_pinned(engine, image, prompts):
    job = tiny.Job(prompts[0], 8)
    tiny.drive(engine, [job])
    assert b"".join(image.token_bytes[i] for i in job.output).decode() == PINNED_TEXT


def test_ids_and_logits_are_the_same_bits_alone_and_in_company(engine, prompts):
    assert is_independent(engine, prompts[:10], 6, seed=5)


def test_the_kv_cache_takes_memory_as_it_is_used(engine, growth):
    mapped = engine.info.kv_bytes
    assert mapped == 32 * 2048 * 30 * 2 * 3 * (64 + 4)
    # The packed weights, and the embedding's and the other weights' file pages, which the system may drop.
    assert growth["at_load"] < mapped / 2
    fill_row(engine, 3)  # what other than the cache a step touches is there after it
    before = resident_bytes()
    fill_row(engine, 7)
    grown, share = resident_bytes() - before, mapped / 32 / 2
    assert share * 0.9 < grown < share * 2
    fill_row(engine, 7)
    assert resident_bytes() - before < grown + share / 4


def fill_row(engine, row: int) -> None:
    """Compute a prompt of half the context in `row`."""
    tokens = engine.info.context_tokens // 2
    engine.execute(StepPlan((RowPlan(row, 0, (1,) * tokens, SampleSpec(tiny.GREEDY, 0, tokens)),)))


def test_greedy_ids_mostly_agree_with_fp32_and_the_share_is_printed(engine, image, prompts, capsys):
    reference = transformers.load(image, num_rows=32, context_tokens=128)
    wanted = [tiny.Job(prompt, AGREEMENT_TOKENS) for prompt in prompts[1:]]
    found = [tiny.Job(prompt, AGREEMENT_TOKENS) for prompt in prompts[1:]]
    tiny.drive(reference, wanted, 64)
    tiny.drive(engine, found, 64)
    agreeing = [common_prefix(one.output, other.output) for one, other in zip(wanted, found, strict=True)]
    share = sum(agreeing) / (len(agreeing) * AGREEMENT_TOKENS)
    with capsys.disabled():
        whole = agreeing.count(AGREEMENT_TOKENS)
        print(f"\n{whole} of {len(agreeing)} answers of {AGREEMENT_TOKENS} ids equal fp32's; {share:.3f} of the ids")
    assert share > AGREEMENT_FLOOR


def common_prefix(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), len(first))
