"""Compare the `transformers` engine with `model.generate` in fp64, exactly, and hold it to an engine's contract."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import pytest
import torch

from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.transformers import load
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage
from inference_api.prepare import prepare
from inference_api.sampling_params import SamplingParams
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.allocations import Allocations

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]


def single(row, start, token_id=1, params=tiny.GREEDY):
    return RowPlan(row, start, (token_id,), SampleSpec(params, 0, start + 1))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute the tiny models in one thread: two would spend a busy machine's time waiting for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llama(tiny_image):
    return load(tiny_image("llama"), num_rows=32, context_tokens=tiny.CONTEXT_TOKENS, dtype="float64")


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_ids_equal_generate_alone_and_with_neighbours_that_come_and_go(family, tiny_image, tiny_checkpoint):
    model, _ = tiny_checkpoint(family)
    engine = load(tiny_image(family), num_rows=32, context_tokens=tiny.CONTEXT_TOKENS, dtype="float64")
    prompts = tiny.random_prompts(36, [1, 40, 5, 60, 17])
    wanted = tiny.all_generated(model, prompts, 20)
    assert len({tuple(ids) for ids in wanted}) > 30
    chunk_sizes = (1, 7, 64)
    for prompt, ids, chunk in zip(prompts, wanted, chunk_sizes, strict=False):
        alone = tiny.Job(prompt, 20)
        tiny.drive(engine, [alone], chunk)
        assert alone.output == ids
    for chunk in chunk_sizes[1:]:
        lengths = random.Random(chunk).choices(range(3, 21), k=36)
        jobs = [tiny.Job(p, n, arrival=i // 2) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
        tiny.drive(engine, jobs, chunk, row_of=max if chunk == 7 else min)
        assert [job.output for job in jobs] == [ids[:n] for ids, n in zip(wanted, lengths, strict=True)]


def test_a_sharded_checkpoint_gives_the_same_ids(tiny_checkpoint, byte_tokenizer, tmp_path):
    model, _ = tiny_checkpoint("llama")
    folder = tiny.save_checkpoint(model, tmp_path / "sharded", byte_tokenizer, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    engine = load(image, num_rows=2, context_tokens=64, dtype="float64")
    prompt = tiny.random_prompts(1, [9])[0]
    job = tiny.Job(prompt, 12)
    tiny.drive(engine, [job])
    assert job.output == tiny.generated(model, prompt, 12)


def test_the_same_seed_gives_the_same_ids_on_another_row_among_other_neighbours(llama):
    params = SamplingParams(temperature=1.2, top_k=60, top_p=0.95, seed=1234)
    prompt = tiny.random_prompts(1, [13])[0]
    alone = tiny.Job(prompt, 20, params=params)
    tiny.drive(llama, [alone], 64)
    others = [
        tiny.Job(p, 25, params=SamplingParams(1.0, 0, 1.0, i)) for i, p in enumerate(tiny.random_prompts(12, [3, 30]))
    ]
    crowded = tiny.Job(prompt, 20, arrival=4, params=params)
    tiny.drive(llama, [*others, crowded], 5)
    assert crowded.row != alone.row
    assert crowded.output == alone.output
    reseeded = tiny.Job(prompt, 20, params=SamplingParams(1.2, 60, 0.95, 1235))
    other_choice = tiny.Job(prompt, 20, params=params, choice=1)
    tiny.drive(llama, [reseeded, other_choice])
    assert len({tuple(job.output) for job in (alone, reseeded, other_choice)}) == 3


def decode_allocations(engine, rows, position) -> Allocations:
    for row in rows:
        engine.release(row)
        engine.execute(StepPlan((RowPlan(row, 0, tuple([5] * position), None),)))
    with Allocations(engine.info.vocab_size) as made:
        engine.execute(StepPlan(tuple(single(row, position) for row in rows)))
    return made


@pytest.mark.parametrize("family", ["llama", "mistral", "falcon-40b", "gpt2", "gptj"])
def test_a_decode_step_is_one_forward_and_allocates_nothing_larger_than_its_tokens_kv(family, tiny_image):
    image = tiny_image(family)
    engine = load(image, num_rows=32, context_tokens=96, dtype="float64")
    short, long = decode_allocations(engine, range(32), 8), decode_allocations(engine, range(32), 90)
    assert short.forwards == long.forwards == 1
    kv_bytes = 32 * image.kv_bytes_per_token * 2  # fp64
    logits_bytes = 32 * image.vocab_size * 8
    bias_bytes = 32 * 96 * 8  # one number a row and slot at most, once a step
    assert max(long.sizes) <= max(kv_bytes, logits_bytes, bias_bytes)
    assert max(long.sizes) <= max(short.sizes)
    one_layers_cache = 32 * 96 * image.kv_bytes_per_token * 2 // 3
    assert sum(long.sizes) - sum(short.sizes) < one_layers_cache / 8


def test_the_cache_is_allocated_at_load_and_never_again(llama, tiny_image):
    image = tiny_image("llama")
    assert llama.info.kv_bytes == 32 * tiny.CONTEXT_TOKENS * image.kv_bytes_per_token * 2
    tensors = {id(tensor): tensor.data_ptr() for pair in llama._rows._row_kv._layers.values() for tensor in pair}
    tiny.drive(llama, [tiny.Job(p, 8) for p in tiny.random_prompts(40, [30, 3])], 16)
    assert tensors == {
        id(tensor): tensor.data_ptr() for pair in llama._rows._row_kv._layers.values() for tensor in pair
    }


@pytest.mark.parametrize("token_id", [-1, tiny.VOCAB_SIZE, 10**9])
def test_an_id_out_of_the_vocabulary_fails_its_row_alone(llama, token_id):
    plan = StepPlan((single(0, 0), single(1, 0, token_id), single(2, 0)))
    first, second, third = llama.execute(plan).rows
    assert second.error.code == "invalid_plan"
    assert str(token_id) in second.error.message
    assert first.token_ids == third.token_ids != ()


def test_a_position_over_the_context_or_past_a_hole_fails_its_row_alone(llama):
    over = RowPlan(1, 0, (1,) * (tiny.CONTEXT_TOKENS + 1), None)
    hole = single(2, 5)
    llama.release(2)
    results = llama.execute(StepPlan((single(0, 0), over, hole))).rows
    assert [result.error is None for result in results] == [True, False, False]
    assert str(tiny.CONTEXT_TOKENS) in results[1].error.message
    assert "does not follow" in results[2].error.message


@pytest.mark.parametrize("rows", [(1, 0), (3, 3), (32,), (-1, 0)])
def test_a_plan_whose_rows_are_out_of_order_or_range_is_refused_whole(llama, rows):
    with pytest.raises(ValueError, match="do not ascend"):
        llama.execute(StepPlan(tuple(single(row, 0) for row in rows)))


def test_a_row_that_samples_nothing_gives_no_result(llama):
    plan = StepPlan((RowPlan(0, 0, (1, 2, 3), None), single(1, 0)))
    assert [result.row for result in llama.execute(plan).rows] == [1]


@pytest.fixture
def poisoned(tiny_checkpoint, byte_tokenizer, tmp_path):
    """An engine whose embedding of the id 77 is NaN."""
    model, _ = tiny_checkpoint("llama")
    embedding = model.get_input_embeddings().weight
    kept = embedding[77].clone()
    with torch.no_grad():
        embedding[77] = math.nan
    try:
        folder = tiny.save_checkpoint(model, tmp_path / "poisoned", byte_tokenizer)
    finally:
        with torch.no_grad():
            embedding[77] = kept
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    return load(image, num_rows=4, context_tokens=64, dtype="float64")


def untouched_prompt(model, length, num_tokens):
    """Return a prompt on which the model never comes to the id 77."""
    prompts = tiny.random_prompts(20, [length], vocab_size=70)
    return next(prompt for prompt in prompts if 77 not in tiny.generated(model, prompt, num_tokens))


def test_nan_logits_end_their_row_alone_and_leave_nothing_behind_in_the_row(poisoned, tiny_checkpoint):
    model, _ = tiny_checkpoint("llama")
    short = untouched_prompt(model, 6, 8)
    long = untouched_prompt(model, 40, 16)
    bad = tiny.Job([5] * 20 + [77, 6], 10)
    neighbour = tiny.Job(long, 16)
    tiny.drive(poisoned, [bad, neighbour], 64)
    assert (bad.error.code, bad.row) == ("non_finite_logits", 0)
    # A short prompt takes over the row; its decode steps share a call with a longer row, which reads beyond it.
    after = [tiny.Job(short, 8), tiny.Job(long, 16)]
    tiny.drive(poisoned, after, 64)
    assert after[0].row == 0
    for job in (neighbour, *after):
        assert job.error is None
        assert job.output == tiny.generated(model, job.prompt, job.num_tokens)


def test_a_chunk_without_a_draw_that_turns_to_nan_is_reported_at_once(poisoned):
    result = poisoned.execute(StepPlan((RowPlan(2, 0, (1, 77, 3), None),))).rows
    assert [(r.row, r.error.code) for r in result] == [(2, "non_finite_logits")]


SMALL = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
UNTESTED = {
    "phi": ({**SMALL, "intermediate_size": 64, "max_position_embeddings": 64}, None),
    "bloom": ({"hidden_size": 48, "n_layer": 2, "n_head": 4}, "no exchangeable attention"),
    "gemma2": (
        {**SMALL, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 64, "attn_logit_softcapping": 2.0},
        "needs softcap in attention",
    ),
}


@pytest.mark.parametrize("model_type", UNTESTED)
def test_a_model_off_the_tested_list_runs_with_a_warning(model_type, byte_tokenizer, tmp_path, caplog):
    settings, solo_because = UNTESTED[model_type]
    model = tiny.build_model(model_type, settings)
    folder = tiny.save_checkpoint(model, tmp_path / model_type, byte_tokenizer)
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    with caplog.at_level("WARNING"):
        engine = load(image, num_rows=3, context_tokens=64, dtype="float64")
    assert f"{model_type} is not on the tested list" in caplog.text
    assert ("one row at a time" in caplog.text) == (solo_because is not None)
    assert (solo_because or "") in caplog.text
    jobs = [tiny.Job(p, 10, arrival=i) for i, p in enumerate(tiny.random_prompts(5, [4, 20]))]
    tiny.drive(engine, jobs, 8)
    assert [job.output for job in jobs] == [tiny.generated(model, job.prompt, 10) for job in jobs]


def test_a_model_that_keeps_no_cache_is_refused(byte_tokenizer, tmp_path):
    model = tiny.build_model("mamba", {"hidden_size": 32, "num_hidden_layers": 1})
    folder = tiny.save_checkpoint(model, tmp_path / "mamba", byte_tokenizer)
    with pytest.raises(ModelError):
        load(prepare(str(folder), tmp_path / "cache", lambda line: None), num_rows=1, context_tokens=8)


def test_a_checkpoint_without_one_of_its_tensors_is_refused_by_name(tiny_image, tmp_path):
    from safetensors.torch import load_file, save_file

    image = tiny_image("llama")
    folder = tmp_path / "image"
    folder.mkdir()
    tensors = load_file(image.path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(image.config_path.read_text())
    broken = ModelImage(**{**vars(image), "path": folder})
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        load(broken, num_rows=1, context_tokens=8)
    assert "\n" not in str(caught.value)


def test_a_truncated_weight_file_is_one_line_that_names_the_model(tiny_image, tmp_path):
    image = tiny_image("llama")
    folder = tmp_path / "image"
    folder.mkdir()
    whole = (image.path / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "config.json").write_text(image.config_path.read_text())
    with pytest.raises(ModelError, match=f"model {image.name} cannot be loaded") as caught:
        load(ModelImage(**{**vars(image), "path": folder}), num_rows=1, context_tokens=8)
    assert "\n" not in str(caught.value)


def test_a_context_over_the_models_is_refused_with_both_numbers(tiny_image):
    with pytest.raises(ModelError, match="97 tokens is over the model's 96"):
        load(tiny_image("gpt2"), num_rows=1, context_tokens=97)


def test_the_digest_names_weights_and_numeric_path(tiny_image):
    image = tiny_image("gpt2")
    digests = {load(image, num_rows=1, context_tokens=8, dtype=dtype).info.digest for dtype in ("float32", "float64")}
    assert len(digests) == 2
    assert load(image, num_rows=2, context_tokens=8).info.digest in digests
    assert json.loads(image.config_path.read_text())["model_type"] == "gpt2"
