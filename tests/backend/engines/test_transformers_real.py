"""Hold the `transformers` engine to `model.generate` on the real model, in fp32, and pin one greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.transformers import load
from inference_api.model_image import ModelImage, required_bytes
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.allocations import Allocations

pytestmark = [pytest.mark.torch, pytest.mark.model, pytest.mark.filterwarnings("default")]

NUM_TOKENS = 6
NEAR_TIE = 1e-3
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "List three uses of a paperclip.",
    "El agua hierve a",
    "1 2 3 4 5 6",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "The mitochondria",
    "Q: Why is the sky blue?\nA:",
    "import numpy as np\n\n",
    "In 1969, two men",
]
PINNED_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
PINNED_TEXT = "The capital of France is Paris.<|im_end|>"


@pytest.fixture(scope="module")
def image(model_image_path) -> ModelImage:
    return ModelImage.open(Path(model_image_path))


@pytest.fixture(scope="module")
def engine(image):
    return load(image, num_rows=32, context_tokens=1280)


@pytest.fixture(scope="module")
def reference(image):
    """The unchanged model, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(image.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(image) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(image.tokenizer_path))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def near_ties(reference, jobs, wanted) -> int:
    """Count jobs that leave `generate`'s ids at a near tie of the two best logits; fail on any other difference."""
    count = 0
    for job, ids in zip(jobs, wanted, strict=True):
        assert job.error is None
        for index, (found, expected) in enumerate(zip(job.output, ids, strict=False)):
            if found != expected:
                with torch.inference_mode():
                    logits = reference(torch.tensor([job.prompt + ids[:index]])).logits[0, -1]
                best = logits.topk(2).values
                assert float(best[0] - best[1]) < NEAR_TIE
                count += 1
                break
    return count


def test_greedy_ids_equal_generate_alone_and_with_31_neighbours(engine, reference, prompts):
    wanted = [tiny.generated(reference, prompt, NUM_TOKENS) for prompt in prompts]
    alone = [tiny.Job(prompt, NUM_TOKENS) for prompt in prompts[:3]]
    for job in alone:
        tiny.drive(engine, [job], 64)
    assert near_ties(reference, alone, wanted[:3]) == 0
    repeated = [index for _ in range(3) for index in range(len(prompts))]
    jobs = [
        tiny.Job(prompts[index], NUM_TOKENS - (3 * turn) % 5, arrival=turn // 8) for turn, index in enumerate(repeated)
    ]
    tiny.drive(engine, jobs, 7)
    # 08: at most 1 % of requests; of 33 that is none.
    assert near_ties(reference, jobs, [wanted[index] for index in repeated]) == 0


def test_the_greedy_text_of_one_prompt_is_pinned(engine, image):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(image.tokenizer_path))
    prompt = tokenizer.encode(PINNED_PROMPT).ids
    job = tiny.Job(prompt, 8)
    tiny.drive(engine, [job])
    assert b"".join(image.token_bytes[i] for i in job.output).decode() == PINNED_TEXT
    assert job.output[-1] in image.stop_ids


def test_what_the_image_says_it_needs_is_what_the_engine_holds(engine, image):
    assert required_bytes(image, 32, 1280) == engine.info.weight_bytes + engine.info.kv_bytes


def decode_step(engine, num_rows: int, position: int) -> None:
    """Decode one token a row at `position`."""
    for row in range(num_rows):
        engine._lengths.computed[row] = position
    plans = tuple(RowPlan(row, position, (5,), SampleSpec(tiny.GREEDY, 0, position + 1)) for row in range(num_rows))
    assert len(engine.execute(StepPlan(plans)).rows) == num_rows


def test_a_longer_context_costs_a_decode_step_no_memory(engine, image):
    made = []
    for position in (63, 1023):
        with Allocations(image.vocab_size) as step:
            decode_step(engine, 32, position)
        made.append(step)
    for row in range(32):
        engine.release(row)
    assert [step.forwards for step in made] == [1, 1]
    logits_bytes = 32 * image.vocab_size * 4
    step_kv_bytes = 32 * image.kv_bytes_per_token
    assert {size for size in made[1].sizes if size > step_kv_bytes} == {logits_bytes}
    one_layers_cache = 32 * 1024 * image.kv_bytes_per_token // 30
    assert sum(made[1].sizes) - sum(made[0].sizes) < one_layers_cache / 8
