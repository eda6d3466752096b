"""Hold the torch path of the `fused` engine to its C++ one, and to the promise that a row's bits depend on it alone."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from inference_api.backend.engines import fused, fused_torch
from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.fused import FusedEngine
from inference_api.backend.engines.fused_computation import StepTokens
from inference_api.backend.engines.fused_torch import TorchComputation
from inference_api.backend.engines.fused_weights import LinearWeights
from inference_api.errors import ModelError
from inference_api.prepare import prepare
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.fused_checks import is_independent, same_bits, traces_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_torch_thread"),
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-sliding", "qwen3")
LOGIT_TOLERANCE = 1e-3
"""Share of the largest logit by which the two paths may differ."""


@pytest.fixture(scope="module")
def engine_of(tiny_image, tmp_path_factory):
    """Return the torch engine of a family, which needs no folder to build in; each is loaded once a module."""
    built: dict[str, FusedEngine] = {}
    nowhere = tmp_path_factory.mktemp("nowhere")

    def engine_of(family: str) -> FusedEngine:
        if family not in built:
            image = tiny_image(family)
            built[family] = fused.load(
                image, num_rows=32, context_tokens=image.context_tokens, build_folder=nowhere, native=False
            )
        return built[family]

    yield engine_of
    assert not list(nowhere.iterdir())


def logits_of(engine: FusedEngine, prompt: list[int]) -> torch.Tensor:
    """Return the logits (tokens, vocab) after every id of a prompt, computed one by one."""
    found = []
    for start, token_id in enumerate(prompt):
        engine.execute(StepPlan((RowPlan(0, start, (token_id,), SampleSpec(tiny.GREEDY, 0, start + 1)),)))
        found.append(engine._logits[0].clone())
    engine.release(0)
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_every_position_are_those_of_the_library(
    family, engine_of, tiny_image, fused_library_of_tests, fused_build_folder
):
    native = fused.load(tiny_image(family), num_rows=1, context_tokens=96, build_folder=fused_build_folder)
    prompt = tiny.random_prompts(1, [60])[0]
    expected = logits_of(native, prompt)
    gap = (logits_of(engine_of(family), prompt) - expected).abs().max() / expected.abs().max()
    assert gap < LOGIT_TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_logits_are_the_same_bits_alone_and_among_others_that_come_and_go(family, engine_of):
    assert is_independent(engine_of(family), tiny.random_prompts(10, [1, 40, 5, 60, 17]), 6, seed=3)


def test_a_prompt_longer_than_a_tile_has_the_same_bits_in_any_chunks(engine_of, monkeypatch):
    prompt = tiny.random_prompts(1, [90])[0]
    whole = traces_of(engine_of("mistral"), [tiny.Job(prompt, 1)], 90, seed=1)[0]
    monkeypatch.setattr(fused_torch, "TILE_TOKENS", 7)
    for chunk_tokens in (1, 13, 90):
        assert same_bits(traces_of(engine_of("mistral"), [tiny.Job(prompt, 1)], chunk_tokens, seed=1)[0], whole)


def test_the_number_of_threads_changes_no_bit(engine_of):
    threads = torch.get_num_threads()
    prompts = tiny.random_prompts(4, [30, 3])
    traces = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            traces.append(traces_of(engine_of("llama"), [tiny.Job(prompt, 3) for prompt in prompts], 16, seed=1))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(traces[0][choice], traces[1][choice]) for choice in range(4))


def test_a_scale_that_rows_share_is_found_out(engine_of, monkeypatch):
    def quantized(self, values):
        largest = torch.full((len(values), 1), float(values.abs().max()))
        return (values * (self._range / largest)).round(), largest / self._range

    monkeypatch.setattr(fused_torch._Linear, "_quantized", quantized)
    assert not is_independent(engine_of("llama"), tiny.random_prompts(6, [20, 5]), 4, seed=3)


@pytest.mark.parametrize("inputs", [1, 31, 576, 1536, 8192])
def test_a_linear_layer_equals_integer_arithmetic_exactly(inputs):
    torch.manual_seed(inputs)
    weight, bias = torch.randn(19, inputs), torch.randn(19)
    weight[0], weight[1] = 1.0, -1.0  # with the largest activations: the largest sums that there are
    weight[2] = 1 - torch.randint(0, 2, (inputs,)) / 127
    weight[2, 0] = 1.0
    layer = fused_torch._Linear(LinearWeights(weight, bias))
    digits = (127 - torch.randint(0, 2, (1, inputs))) / layer._range  # with those: the largest odd sums of a digit
    digits[0, 0] = 1.0
    values = torch.cat([torch.randn(5, inputs), digits, torch.ones(1, inputs)])
    integers, scales = layer._quantized(values)
    assert int(integers[-1].min()) == layer._range
    assert layer._range * 127 * inputs < 2**31
    sums = integers.long() @ layer._weight.long().T
    assert torch.equal(layer(values), sums.float() * (scales * layer._scales) + bias)


def test_e_to_a_power_is_that_of_fp64():
    values = torch.linspace(-80, 80, 4001, dtype=torch.float64)
    assert torch.allclose(fused_torch._exponential(values), values.exp(), rtol=1e-10, atol=0)
    assert fused_torch._exponential(torch.tensor([math.nan], dtype=torch.float64)).isnan().all()


def test_a_layer_too_wide_for_exact_sums_is_refused():
    with pytest.raises(ModelError, match=r"140000 inputs is too wide .* set INFERENCE_API_ENGINE=transformers"):
        fused_torch._Linear(LinearWeights(torch.ones(1, 140000), None))


@pytest.fixture
def poisoned(tiny_checkpoint, byte_tokenizer, tmp_path):
    """The torch path of a model whose embedding of the id 77 is NaN."""
    model = copy.deepcopy(tiny_checkpoint("llama")[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    folder = tiny.save_checkpoint(model, tmp_path / "poisoned", byte_tokenizer)
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    return TorchComputation(image, num_rows=3, context_tokens=64)


def test_nan_spoils_its_own_position_and_those_after_it_alone(poisoned, engine_of):
    tokens = StepTokens([5, 6, 77, 8, 5, 6], [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 1], [1, 3, 5])
    logits = torch.empty(3, tiny.VOCAB_SIZE)
    assert list(poisoned.run(tokens, logits)) == [1, 1, 0, 0, 1, 1]
    assert logits[1].isnan().all()
    assert same_bits([logits[0]], [logits[2]])
    # The NaN that the row held is gone when its positions are written again.
    again = StepTokens([5, 6, 9, 8], [0] * 4, [0, 1, 2, 3], [3])
    assert list(poisoned.run(again, logits)) == [1] * 4
    assert logits[0].isfinite().all()


def test_a_copied_prefix_gives_the_bits_of_a_computed_one(engine_of):
    computation = engine_of("qwen3")._computation
    prompt, logits = list(range(40, 60)), torch.empty(1, tiny.VOCAB_SIZE)
    computation.run(StepTokens(prompt, [4] * 20, list(range(20)), [19]), logits)
    computed = logits[0].clone()
    computation.copy_prefix(4, 9, 19)
    computation.run(StepTokens(prompt[19:], [9], [19], [0]), logits)
    assert same_bits([logits[0]], [computed])


def test_the_engine_says_which_path_it_took(engine_of, tiny_image, fused_library_of_tests, fused_build_folder):
    image = tiny_image("llama")
    native = fused.load(image, num_rows=32, context_tokens=96, build_folder=fused_build_folder).info
    info = engine_of("llama").info
    assert (info.engine, info.row_independent) == ("fused", True)
    assert info.device == "cpu (int8 weights, int16 activations, fp16 KV, torch)"
    assert info.kv_bytes == native.kv_bytes
    assert info.digest != native.digest
