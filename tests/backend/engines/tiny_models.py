"""Build tiny random models of every tested family, their images, and a driver that plays the scheduler."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from inference_api.backend.engines.base import Engine, RowError, RowPlan, SampleSpec, StepPlan
from inference_api.sampling_params import SamplingParams

CONTEXT_TOKENS = 96
VOCAB_SIZE = 259
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)

_LLAMA_LIKE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
}
_FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT_TOKENS,
}
_NEOX = {name: value for name, value in _LLAMA_LIKE.items() if name != "num_key_value_heads"}
_GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT_TOKENS}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "mistral": ("mistral", {**_LLAMA_LIKE, "sliding_window": 16}),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen2-sliding": (
        "qwen2",
        {**_LLAMA_LIKE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 16}),
    "falcon-7b": ("falcon", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon-40b": ("falcon", {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon-alibi": (
        "falcon",
        {
            **_FALCON,
            "tie_word_embeddings": False,
            "alibi": True,
            "multi_query": False,
            "new_decoder_architecture": False,
        },
    ),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", {**_NEOX, "rotary_pct": 0.5}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
}


def build_model(model_type: str, settings: dict[str, object], seed: int = 5):
    """Build a model with random fp64 weights, large enough that its greedy ids vary."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=256, pad_token_id=256, **settings
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25 if "embed" not in name else 1.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def save_checkpoint(model, folder: Path, tokenizer: Path, **options: object) -> Path:
    """Write a Hugging Face checkpoint with the byte-level tokenizer."""
    model.save_pretrained(folder, **options)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    return folder


def generated(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy ids of `model.generate`, the end-of-sequence id not stopping it."""
    return all_generated(model, [prompt], num_tokens)[0]


def all_generated(model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return what `generated` does of each prompt; those of one length share their forwards, and nothing is padded.

    For fp64: in fp32 the last bits differ with the size of a batch.
    """
    import torch

    found: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        indexes = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        token_ids = torch.tensor([prompts[index] for index in indexes])
        with torch.inference_mode():
            output = model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
            )
        found.update(zip(indexes, output[:, length:].tolist(), strict=True))
    return [found[index] for index in range(len(prompts))]


@dataclasses.dataclass
class Job:
    """One sequence that the driver takes through an engine."""

    prompt: list[int]
    num_tokens: int
    arrival: int = 0
    params: SamplingParams = GREEDY
    choice: int = 0
    row: int = -1
    computed: int = 0
    output: list[int] = dataclasses.field(default_factory=list)
    error: RowError | None = None

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.num_tokens


def drive(engine: Engine, jobs: list[Job], chunk_tokens: int = 32, row_of: Callable[[set[int]], int] = min) -> None:
    """Take jobs through an engine as a scheduler would: rows handed out and reused, prompts in chunks."""
    free = set(range(engine.info.num_rows))
    waiting = list(jobs)
    running: list[Job] = []
    step = 0
    while waiting or running:
        for job in [job for job in waiting if job.arrival <= step][: len(free)]:
            waiting.remove(job)
            job.row = row_of(free)
            free.remove(job.row)
            running.append(job)
        running.sort(key=lambda job: job.row)
        plans = []
        for job in running:
            token_ids = tuple(job.known[job.computed : job.computed + chunk_tokens])
            last = job.computed + len(token_ids) == len(job.known)
            spec = SampleSpec(job.params, job.choice, len(job.known)) if last else None
            plans.append(RowPlan(job.row, job.computed, token_ids, spec))
            job.computed += len(token_ids)
        results = {result.row: result for result in engine.execute(StepPlan(tuple(plans))).rows}
        for job in list(running):
            if result := results.get(job.row):
                job.output.extend(result.token_ids)
                job.error = result.error
            if job.done:
                engine.release(job.row)
                free.add(job.row)
                running.remove(job)
        step += 1


def random_prompts(count: int, lengths: Iterable[int], seed: int = 11, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Return prompts of random ids; the lengths are taken in turn."""
    generator = random.Random(seed)
    sizes = list(lengths)
    return [[generator.randrange(vocab_size) for _ in range(sizes[i % len(sizes)])] for i in range(count)]
