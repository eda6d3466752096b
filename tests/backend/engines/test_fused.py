"""Hold the `fused` engine to the models it computes, and to its promise: a row's bits depend on that row alone."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import math
import shutil
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from inference_api.backend.engines import fused_cpp, fused_library
from inference_api.backend.engines.base import PrefixCopy, RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.fused import FusedEngine, load
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage
from inference_api.prepare import prepare
from inference_api.sampling_params import SamplingParams
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.fused_checks import is_independent, same_bits, traces_of

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-sliding", "qwen3")
LARGEST_GAP, MEDIAN_GAP = 2e-2, 5e-3
"""Shares of the largest logit by which int16 activations and fp32 sums may move one; 0.009 and 0.003 are seen.

Where fp32 and fp64 fall on two sides of a border, a number of a key or value is another by a whole step, 1/127 of the
largest. So single positions differ by more than half of them do.
"""
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 8
"""Of the tiny llama."""


@pytest.fixture(scope="module")
def load_fused(tiny_image, fused_library_of_tests, fused_build_folder):
    def open_engine(family: str | ModelImage, num_rows: int = 32, num_threads: int = 2) -> FusedEngine:
        image = tiny_image(family) if isinstance(family, str) else family
        threads = torch.get_num_threads()
        try:
            return load(
                image,
                num_rows=num_rows,
                context_tokens=image.context_tokens,
                build_folder=fused_build_folder,
                num_threads=num_threads,
            )
        finally:
            torch.set_num_threads(threads)

    return open_engine


@pytest.fixture(scope="module")
def engines(load_fused):
    """Return the engine of a family with 32 rows; each is loaded once a module."""
    built: dict[str, FusedEngine] = {}

    def engine_of(family: str) -> FusedEngine:
        if family not in built:
            built[family] = load_fused(family)
        return built[family]

    return engine_of


def dequantized(model):
    """Return the fp64 model whose linear layers hold the numbers that int8 weights by group of 32 stand for."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                weight = module.weight.float()
                grouped = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
                scale = grouped.abs().amax(dim=2, keepdim=True) / 127
                numbers = (grouped / scale).round().nan_to_num() * scale
                module.weight.copy_(numbers.view(len(weight), -1)[:, : weight.shape[1]])
    return model


class Int8Cache(DynamicCache):
    """Round keys and values to int8 with a scale for each position and KV head, as the engine's cache does."""

    def update(self, keys, values, *args, **kwargs):
        return super().update(rounded(keys), rounded(values), *args, **kwargs)


def rounded(heads):
    scale = heads.abs().amax(dim=-1, keepdim=True) / 127
    return (heads / scale).round() * scale


def logits_of(engine: FusedEngine, prompt: list[int], chunk_tokens: int) -> torch.Tensor:
    """Return the logits (tokens, vocab) of the last token of every chunk."""
    found = []
    for start in range(0, len(prompt), chunk_tokens):
        token_ids = tuple(prompt[start : start + chunk_tokens])
        engine.execute(StepPlan((RowPlan(3, start, token_ids, SampleSpec(tiny.GREEDY, 0, start + 1)),)))
        found.append(engine._logits[0].clone())
    engine.release(3)
    return torch.stack(found)


def is_near(engine: FusedEngine, model, prompt: list[int]) -> bool:
    with torch.inference_mode():
        expected = dequantized(model)(torch.tensor([prompt]), past_key_values=Int8Cache()).logits[0]  # (tokens, vocab)
    found = logits_of(engine, prompt, 1).double()
    gaps = (found - expected).abs().amax(dim=1) / expected.abs().max()
    return bool(gaps.max() < LARGEST_GAP and gaps.median() < MEDIAN_GAP)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_every_position_are_those_of_the_dequantized_model(family, engines, tiny_checkpoint):
    model, _ = tiny_checkpoint(family)
    for prompt in tiny.random_prompts(3, [70, 30]):
        assert is_near(engines(family), model, prompt)


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_embeddings_are_those_of_the_model(kind, load_fused, byte_tokenizer, tmp_path):
    settings = {**tiny.FAMILIES["llama"][1], "rope_parameters": ROPES[kind], "attention_bias": True, "mlp_bias": True}
    model = tiny.build_model("llama", settings)
    folder = tiny.save_checkpoint(model, tmp_path / kind, byte_tokenizer)
    engine = load_fused(prepare(str(folder), tmp_path / "cache", lambda line: None), num_rows=4)
    assert is_near(engine, model, tiny.random_prompts(1, [70])[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_logits_are_the_same_bits_alone_and_among_31_that_come_and_go(family, engines):
    assert is_independent(engines(family), tiny.random_prompts(40, [1, 40, 5, 60, 17]), 12, seed=3)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 80), min_size=2, max_size=12),
    num_tokens=st.integers(1, 14),
    seed=st.integers(0, 2**31),
)
def test_no_plan_changes_a_rows_bits(engines, lengths, num_tokens, seed):
    prompts = [tiny.random_prompts(1, [length], seed=seed + index)[0] for index, length in enumerate(lengths)]
    assert is_independent(engines("mistral"), prompts, num_tokens, seed)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 7, 64])
def test_a_prompt_longer_than_a_tile_has_the_same_bits_in_any_chunks(
    chunk_tokens, load_fused, byte_tokenizer, tmp_path
):
    settings = {**tiny.FAMILIES["llama"][1], "max_position_embeddings": 300}
    folder = tiny.save_checkpoint(tiny.build_model("llama", settings), tmp_path / "long", byte_tokenizer)
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    engine = load_fused(image, num_rows=4)
    prompt = tiny.random_prompts(1, [290])[0]
    whole = logits_of(engine, prompt, 290)[-1]
    assert same_bits([whole], [logits_of(engine, prompt, chunk_tokens)[-1]])


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_the_number_of_threads_changes_no_bit(num_threads, engines, load_fused):
    prompts = tiny.random_prompts(6, [30, 3])
    one, other = (
        traces_of(engine, [tiny.Job(prompt, 6) for prompt in prompts], 16, seed=1)
        for engine in (engines("llama"), load_fused("llama", 32, num_threads))
    )
    assert all(same_bits(one[choice], other[choice]) for choice in range(6))


def library_with(rows_source: str, sound_library: fused_library.Library, folder) -> fused_library.Library:
    """Return the library with another rows.cpp, which alone is compiled, and quickly: its bits do not matter."""
    source, rest, changed = folder / "rows.cpp", folder / "rest.so", folder / "changed.so"
    source.write_text(rows_source)
    shutil.copy(sound_library.functions._name, rest)  # the file itself is open already, and bound to its own functions
    flags = ["-O1" if flag == "-O3" else flag for flag in fused_library.FLAGS]
    # What is opened first wins wherever a function is defined twice (ld.so(8)), in calls out of `rest` too.
    linked = ["-I", fused_library.SOURCES, source, "-Wl,--no-as-needed", rest, "-o", changed]
    subprocess.run([fused_library.COMPILER, *flags, *linked], check=True)
    return fused_library.Library(fused_library._bind(ctypes.CDLL(str(changed))), "of rows.cpp changed")


def test_a_scale_that_rows_share_is_found_out(tiny_image, fused_library_of_tests, tmp_path, monkeypatch):
    rows = (fused_library.SOURCES / "rows.cpp").read_text()
    own = "    if (largest < kTiniest) return 0.0f;\n"
    shared = "    static float shared = 0.0f;\n    largest = shared = shared > largest ? shared : largest;\n"
    assert own in rows
    for source, is_sound in ((rows, True), (rows.replace(own, shared + own), False)):
        folder = tmp_path / f"{is_sound}"
        folder.mkdir()
        library = library_with(source, fused_library_of_tests, folder)
        monkeypatch.setattr(fused_cpp, "open_library", lambda _, library=library: library)
        engine = load(tiny_image("llama"), num_rows=32, context_tokens=96, build_folder=folder, num_threads=1)
        assert is_independent(engine, tiny.random_prompts(6, [20, 5]), 8, seed=3) == is_sound


def test_the_same_seed_gives_the_same_ids_on_another_row_among_other_neighbours(engines):
    params = SamplingParams(temperature=1.2, top_k=60, top_p=0.95, seed=1234)
    prompt = tiny.random_prompts(1, [13])[0]
    alone = tiny.Job(prompt, 20, params=params)
    tiny.drive(engines("llama"), [alone], 64)
    others = [
        tiny.Job(p, 25, params=SamplingParams(1.0, 0, 1.0, i)) for i, p in enumerate(tiny.random_prompts(12, [3, 30]))
    ]
    crowded = tiny.Job(prompt, 20, arrival=4, params=params)
    tiny.drive(engines("llama"), [*others, crowded], 5)
    assert crowded.row != alone.row
    assert crowded.output == alone.output


def drawn_with_drafts(engine, prompt, params, drafts_of, num_tokens):
    """Return the ids and their logits of a run that drafts `drafts_of(ids)`, and how many ids each step gave."""
    ids, logits, counts = [], [], []
    computed = 0
    while len(ids) < num_tokens:
        known = prompt + ids
        spec = SampleSpec(params, 0, len(known))
        row = RowPlan(4, computed, tuple(known[computed:]), spec, draft_ids=drafts_of(ids))
        neighbour = RowPlan(9, 0, (7,) * (1 + len(ids) % 3), None)
        (result,) = engine.execute(StepPlan((row, neighbour))).rows
        logits += engine._logits[: len(result.token_ids)].clone()
        computed = len(known) + len(result.token_ids) - 1
        counts.append(len(result.token_ids))
        ids += result.token_ids
    return ids[:num_tokens], logits[:num_tokens], counts


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_accepted_and_refused_give_the_ids_and_bits_of_a_run_without(family, temperature, engines):
    params = SamplingParams(temperature, 0, 1.0, 5)
    prompt = tiny.random_prompts(1, [21])[0]
    plain, logits, _ = drawn_with_drafts(engines(family), prompt, params, lambda ids: (), 30)

    def drafts_of(ids):
        right = len(ids) % 5
        after = plain[len(ids) :]
        return (*after[:right], *((token_id + 1) % tiny.VOCAB_SIZE for token_id in after[right : right + 2]))

    ids, drafted, counts = drawn_with_drafts(engines(family), prompt, params, drafts_of, 30)
    assert ids == plain
    assert same_bits(drafted, logits)
    assert {1, 2, 4} <= set(counts)  # none accepted, some, and more


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("num_tokens", [1, 8, 19, 39])
def test_a_copied_prefix_gives_the_bits_of_a_computed_one(family, num_tokens, engines):
    engine, prompt, rest = engines(family), *tiny.random_prompts(2, [40, 12])
    engine.execute(StepPlan((RowPlan(2, 0, tuple(prompt), None),)))
    known = prompt[:num_tokens] + rest
    spec = SampleSpec(tiny.GREEDY, 0, len(known))
    beside = RowPlan(2, 40, (5,), SampleSpec(tiny.GREEDY, 0, 41))  # the source goes on in the same step
    from_another = RowPlan(6, num_tokens, tuple(rest), spec, PrefixCopy(2, num_tokens))
    anew = RowPlan(7, 0, tuple(known), spec)
    in_place = RowPlan(2, num_tokens, tuple(rest), spec, PrefixCopy(2, num_tokens))
    engine.execute(StepPlan((beside, from_another, anew)))
    source, copied, computed = engine._logits[:3].clone()
    engine.execute(StepPlan((in_place,)))
    assert same_bits([copied, engine._logits[0]], [computed, computed])
    engine.execute(StepPlan((RowPlan(2, 0, (*prompt, 5), beside.sample),)))
    assert same_bits([source], [engine._logits[0]])


def test_the_engine_says_what_it_is(engines):
    info = engines("llama").info
    assert (info.engine, info.row_independent) == ("fused", True)
    assert info.device == "cpu (4-bit and int8 weights, int8 and int16 activations, int8 KV, AVX2)"
    heads = 2 * LAYERS * 32 * tiny.CONTEXT_TOKENS * KV_HEADS  # keys and values
    assert info.kv_bytes == heads * (HEAD_DIM + 4)  # int8, and an fp32 scale
    assert info.digest != engines("qwen2").info.digest


def test_a_bad_row_of_a_plan_fails_alone(engines):
    engine = engines("llama")
    good = [RowPlan(row, 0, (1, 2), SampleSpec(tiny.GREEDY, 0, 2)) for row in (0, 2)]
    bad = RowPlan(1, 0, (tiny.VOCAB_SIZE,), None)
    first, second, third = engine.execute(StepPlan((good[0], bad, good[1]))).rows
    assert second.error.code == "invalid_plan"
    assert first.token_ids == third.token_ids != ()
    assert engine.execute(StepPlan((RowPlan(0, 0, (1,), None),))).rows == ()
    with pytest.raises(ValueError, match="do not ascend"):
        engine.execute(StepPlan((good[1], good[0])))


@pytest.fixture
def poisoned(tiny_checkpoint, byte_tokenizer, tmp_path, load_fused):
    """An engine whose embedding of the id 77 is NaN."""
    model = copy.deepcopy(tiny_checkpoint("llama")[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    folder = tiny.save_checkpoint(model, tmp_path / "poisoned", byte_tokenizer)
    return load_fused(prepare(str(folder), tmp_path / "cache", lambda line: None), num_rows=4)


def test_nan_ends_its_row_alone_and_leaves_nothing_behind_in_the_row(poisoned, engines):
    bad, neighbour = tiny.Job([5] * 20 + [77, 6], 10), tiny.Job([9, 8, 7] * 9, 2)
    tiny.drive(poisoned, [bad, neighbour], 64)
    after = tiny.Job([5, 6, 7], 2)
    tiny.drive(poisoned, [after])
    assert (bad.error.code, bad.row, after.row) == ("non_finite_logits", 0, 0)
    for job in (neighbour, after):
        sound = tiny.Job(job.prompt, job.num_tokens)
        tiny.drive(engines("llama"), [sound])
        assert (job.error, job.output) == (None, sound.output)


def test_a_chunk_without_a_draw_that_turns_to_nan_is_reported_at_once(poisoned):
    result = poisoned.execute(StepPlan((RowPlan(2, 0, (1, 77, 3), None),))).rows
    assert [(row.row, row.error.code) for row in result] == [(2, "non_finite_logits")]


def changed(image: ModelImage, folder, **config: object) -> ModelImage:
    """Return the image with another config.json."""
    folder.mkdir()
    shutil.copyfile(image.path / "model.safetensors", folder / "model.safetensors")
    whole = {**json.loads(image.config_path.read_text()), **config}
    (folder / "config.json").write_text(json.dumps(whole))
    return ModelImage(**{**vars(image), "path": folder, "digest": hashlib.sha256(repr(config).encode()).hexdigest()})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "gpt2"}, "the architecture 'gpt2' (it computes llama, mistral, qwen2, qwen3)"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary embeddings of type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary embeddings of a share of 0.5 of the head"),
        ({"intermediate_size": 62}, "intermediate_size 62, which is no multiple of 8"),
        ({"head_dim": 640}, "head_dim 640, which is over 512"),
        ({"num_key_value_heads": 4}, "6 query heads, which are no multiple of 4 KV heads"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["chunked_attention"] * 3},
            "layers of chunked_attention",
        ),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(config, text, tiny_image, tmp_path, load_fused):
    with pytest.raises(ModelError) as caught:
        load_fused(changed(tiny_image("llama"), tmp_path / "image", **config))
    assert str(caught.value) == f"the engine fused does not compute {text}; set INFERENCE_API_ENGINE=transformers"


def test_a_missing_tensor_and_one_of_another_shape_are_named(tiny_image, tmp_path, load_fused):
    image = tiny_image("llama")
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.3\.self_attn\.q_proj\.weight"):
        load_fused(changed(image, tmp_path / "deeper", num_hidden_layers=4))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.gate_proj\.weight is \(64, 48\), not \(72, 48\)"):
        load_fused(changed(image, tmp_path / "wider", intermediate_size=72))


def test_a_context_over_the_models_is_refused_with_both_numbers(tiny_image, tmp_path):
    with pytest.raises(ModelError, match="97 tokens is over the model's 96"):
        load(tiny_image("llama"), num_rows=1, context_tokens=97, build_folder=tmp_path)
