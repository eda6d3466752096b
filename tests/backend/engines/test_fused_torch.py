"""Hold the torch path of the `fused` engine to the bits of its C++ one, and to the same promise of a row's own bits."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch

from inference_api.backend.engines import (
    fused,
    fused_torch,
    fused_torch_attention,
    fused_torch_linear,
    fused_torch_rows,
)
from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.fused import FusedEngine
from inference_api.backend.engines.fused_computation import KvCopy, StepTokens
from inference_api.backend.engines.fused_torch_linear import EightBitLinear, FourBitLinear
from inference_api.backend.engines.fused_weights import LinearWeights
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage
from inference_api.prepare import prepare
from inference_api.sampling_params import SamplingParams
from tests.backend.engines import tiny_models as tiny
from tests.backend.engines.fused_checks import is_independent, same_bits, traces_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("default"),
    pytest.mark.usefixtures("one_torch_thread"),
]

FAMILIES = ("llama", "mistral", "qwen2", "qwen2-sliding", "qwen3")
SIXTEEN_LEVELS = "llama-16-levels"
LONG = "mistral-long"
_LLAMA = tiny.FAMILIES["llama"][1]
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    SIXTEEN_LEVELS: (
        "llama",
        {
            **_LLAMA,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 8,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    # Beyond one span of 512 positions, with a window that begins within a block of 8.
    LONG: ("mistral", {**_LLAMA, "max_position_embeddings": 600, "sliding_window": 530, "num_hidden_layers": 2}),
}
GROUP = 32


@pytest.fixture(scope="module")
def image_of(tiny_image, byte_tokenizer, tmp_path_factory):
    """Return the image of a family, or of one of MODELS; each is built once a module."""
    built: dict[str, ModelImage] = {}

    def image_of(name: str) -> ModelImage:
        if name not in MODELS:
            return tiny_image(name)
        if name not in built:
            model = tiny.build_model(*MODELS[name])
            if name == SIXTEEN_LEVELS:
                put_on_sixteen_levels(model)
            if name == LONG:
                see_all_alike(model)
            folder = tmp_path_factory.mktemp("image")
            checkpoint = tiny.save_checkpoint(model, folder / name, byte_tokenizer)
            built[name] = prepare(str(checkpoint), folder / "cache", lambda line: None)
        return built[name]

    return image_of


def put_on_sixteen_levels(model) -> None:
    """Give each 32 inputs of every linear layer a scale and a lowest weight of fp16, and 16 levels between."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                grouped = module.weight.float().view(module.out_features, -1, GROUP)
                lowest = grouped.amin(dim=2, keepdim=True).half().float()
                scales = ((grouped.amax(dim=2, keepdim=True) - lowest) / 15).half().float()
                levels = ((grouped - lowest) / scales).round().clamp(0, 15)
                levels[..., 0], levels[..., 1] = 0, 15
                module.weight.copy_((scales * levels + lowest).view(module.weight.shape))


def see_all_alike(model) -> None:
    """Make queries so small that every position weighs much, and sums over many do not fit fp32's 24 bits."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(0.01)


@pytest.fixture(scope="module")
def engine_of(image_of, tmp_path_factory):
    """Return the torch engine of a model, which needs no folder to build in; each is loaded once a module."""
    built: dict[str, FusedEngine] = {}
    nowhere = tmp_path_factory.mktemp("nowhere")

    def engine_of(name: str) -> FusedEngine:
        if name not in built:
            image = image_of(name)
            built[name] = fused.load(
                image, num_rows=32, context_tokens=image.context_tokens, build_folder=nowhere, native=False
            )
        return built[name]

    yield engine_of
    assert not list(nowhere.iterdir())


@pytest.fixture(scope="module")
def library_engine_of(image_of, fused_library_of_tests, fused_build_folder):
    """Return the C++ engine of a model; each is loaded once a module."""
    built: dict[str, FusedEngine] = {}

    def library_engine_of(name: str) -> FusedEngine:
        if name not in built:
            image = image_of(name)
            built[name] = fused.load(
                image, num_rows=32, context_tokens=image.context_tokens, build_folder=fused_build_folder
            )
        return built[name]

    return library_engine_of


def make_the_same_bits(first: FusedEngine, second: FusedEngine, prompts: list[list[int]], chunk_tokens: int) -> bool:
    """Say whether both engines give the same ids and logits for greedy and sampled jobs that share their steps."""
    outputs, traces = [], []
    for engine in (first, second):
        jobs = [
            tiny.Job(prompt, 5, params=SamplingParams(1.1, 50, 0.95, index) if index % 2 else tiny.GREEDY)
            for index, prompt in enumerate(prompts)
        ]
        traces.append(traces_of(engine, jobs, chunk_tokens, seed=1))
        outputs.append([job.output for job in jobs])
    return outputs[0] == outputs[1] and all(same_bits(traces[0][i], traces[1][i]) for i in range(len(prompts)))


@pytest.mark.parametrize("name", [*FAMILIES, SIXTEEN_LEVELS])
def test_ids_and_logits_are_those_of_the_library_in_every_bit(name, engine_of, library_engine_of):
    prompts = tiny.random_prompts(5, [60, 1, 33, 7])
    for chunk_tokens in (1, 13, 90):
        assert make_the_same_bits(engine_of(name), library_engine_of(name), prompts, chunk_tokens)


def logits_beyond_one_span(engine: FusedEngine) -> list[torch.Tensor]:
    """Return the logits of the last 70 of 580 positions, computed in two steps."""
    prompt, logits = tiny.random_prompts(1, [580])[0], torch.empty(70, tiny.VOCAB_SIZE)
    for part, outputs in ((slice(0, 100), []), (slice(100, 580), list(range(410, 480)))):
        ids = prompt[part]
        positions = list(range(580))[part]
        assert all(engine._computation.run(StepTokens(ids, [5] * len(ids), positions, outputs), logits[: len(outputs)]))
    return list(logits)


def test_a_context_beyond_one_span_has_the_bits_of_the_library(engine_of, library_engine_of, monkeypatch):
    expected = logits_beyond_one_span(library_engine_of(LONG))
    assert same_bits(logits_beyond_one_span(engine_of(LONG)), expected)
    monkeypatch.setattr(fused_torch_attention, "SPAN", 1024)
    assert not same_bits(logits_beyond_one_span(engine_of(LONG)), expected)


def test_a_changed_order_of_the_fold_is_found_out(engine_of, library_engine_of, monkeypatch):
    def neighbours_first(lanes):
        halves = lanes[..., ::2] + lanes[..., 1::2]
        quarters = halves[..., ::2] + halves[..., 1::2]
        return quarters[..., :1] + quarters[..., 1:]

    monkeypatch.setattr(fused_torch_rows, "fold", neighbours_first)
    assert not make_the_same_bits(engine_of("llama"), library_engine_of("llama"), tiny.random_prompts(1, [30]), 30)


def test_weights_on_sixteen_levels_take_four_bits_and_others_eight(engine_of):
    four, eight = (engine_of(name)._computation for name in (SIXTEEN_LEVELS, "llama"))
    for computation, kind in ((four, FourBitLinear), (eight, EightBitLinear)):
        linears = [getattr(computation._layers[0], name) for name in ("qkv", "output", "gate_up", "down")]
        assert all(isinstance(linear, kind) for linear in (*linears, computation._head))


@pytest.mark.model
def test_logits_of_the_real_model_are_those_of_the_library_in_every_bit(model_image_path, model_cache):
    image = ModelImage.open(Path(model_image_path))
    prompt = tiny.random_prompts(1, [40], vocab_size=image.vocab_size)[0]
    # A prompt at once, then ids one by one.
    steps = [
        StepTokens(prompt[:36], [1] * 36, list(range(36)), list(range(36))),
        *(StepTokens([prompt[index]], [1], [index], [0]) for index in range(36, 40)),
    ]
    found = []
    for native in (True, False):
        engine = fused.load(
            image,
            num_rows=2,
            context_tokens=64,
            build_folder=model_cache / ARTEFACTS_FOLDER,
            num_threads=1,
            native=native,
        )
        logits = torch.empty(40, image.vocab_size)
        assert all(engine._computation.run(steps[0], logits[:36]))
        for index, step in enumerate(steps[1:], 36):
            assert all(engine._computation.run(step, logits[index:]))
        found.append(logits)
    assert same_bits([found[0]], [found[1]])


@pytest.mark.parametrize("name", [*FAMILIES, SIXTEEN_LEVELS])
def test_ids_and_logits_are_the_same_bits_alone_and_among_others_that_come_and_go(name, engine_of):
    assert is_independent(engine_of(name), tiny.random_prompts(10, [1, 40, 5, 60, 17]), 4, seed=3)


@pytest.mark.parametrize("name", ["mistral", SIXTEEN_LEVELS])
def test_a_prompt_longer_than_a_tile_has_the_same_bits_in_any_chunks(name, engine_of, monkeypatch):
    prompt = tiny.random_prompts(1, [90])[0]
    whole = traces_of(engine_of(name), [tiny.Job(prompt, 1)], 90, seed=1)[0]
    monkeypatch.setattr(fused_torch, "TILE_TOKENS", 7)
    for chunk_tokens in (1, 13, 90):
        assert same_bits(traces_of(engine_of(name), [tiny.Job(prompt, 1)], chunk_tokens, seed=1)[0], whole)


def test_groups_of_four_bits_may_be_multiplied_one_by_one_or_together(engine_of, monkeypatch):
    prompt = tiny.random_prompts(1, [20])[0]
    traces = []
    for most in (0, 2**10, 2**30):
        monkeypatch.setattr(fused_torch_linear, "WORK_NUMBERS", most)
        traces.append(traces_of(engine_of(SIXTEEN_LEVELS), [tiny.Job(prompt, 2)], 20, seed=1)[0])
    assert all(same_bits(trace, traces[0]) for trace in traces)


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


@pytest.mark.parametrize("name", ["llama", SIXTEEN_LEVELS])
def test_a_scale_that_rows_share_is_found_out(name, engine_of, monkeypatch):
    def quantize(values, limit):
        largest = torch.full_like(values[..., :1], float(values.abs().max()))
        return (values * (limit / largest)).round(), largest / limit

    monkeypatch.setattr(fused_torch_linear, "quantize", quantize)
    assert not is_independent(engine_of(name), tiny.random_prompts(6, [20, 5]), 4, seed=3)


@pytest.mark.parametrize("inputs", [1, 31, 576, 1536, 8192])
def test_a_layer_of_eight_bits_equals_integer_arithmetic_exactly(inputs):
    torch.manual_seed(inputs)
    weight, bias = torch.randn(19, inputs), torch.randn(19)
    weight[0], weight[1] = 1.0, -1.0  # with the largest activations: the largest sums that there are
    values = torch.cat([torch.randn(5, inputs), torch.ones(1, inputs)])
    layer = EightBitLinear(LinearWeights(weight, bias))
    integers, scales = fused_torch_rows.quantize(values, 32767)
    assert int(integers[-1].min()) == 32767
    padded = torch.nn.functional.pad(integers.long(), (0, -inputs % GROUP)).view(6, -1, GROUP)
    expected = torch.zeros(6, 19)
    for group, numbers in enumerate(layer._weight.long()):
        expected += (padded[:, group] @ numbers).float() * layer._scales[group]
    assert torch.equal(layer(values), expected * scales + bias)


def test_e_to_a_power_is_within_three_units_of_that_of_fp64():
    values = torch.linspace(-86.9, 87.9, 40001)
    exact = values.double().exp()
    assert ((fused_torch_rows.exponential(values).double() - exact).abs() <= exact * 3 * 2**-23).all()
    ends = fused_torch_rows.exponential(torch.tensor([-87.1, -1e30, -math.inf, math.nan]))
    assert ends[:3].tolist() == [0.0] * 3
    assert ends[3].isnan()


@pytest.fixture
def poisoned(tiny_checkpoint, byte_tokenizer, tmp_path, fused_library_of_tests, fused_build_folder):
    """The computations of both paths, of a model whose embedding of the id 77 is NaN."""
    model = copy.deepcopy(tiny_checkpoint("llama")[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = math.nan
    folder = tiny.save_checkpoint(model, tmp_path / "poisoned", byte_tokenizer)
    image = prepare(str(folder), tmp_path / "cache", lambda line: None)
    options = {"num_rows": 3, "context_tokens": 64, "build_folder": fused_build_folder}
    return [fused.load(image, native=native, **options)._computation for native in (False, True)]


def test_nan_spoils_its_own_position_and_those_after_it_alone_on_both_paths(poisoned):
    tokens = StepTokens([5, 6, 77, 8, 5, 6], [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 1], [1, 3, 5])
    again = StepTokens([5, 6, 9, 8], [0] * 4, [0, 1, 2, 3], [3])
    sound = []
    for computation in poisoned:
        logits = torch.empty(3, tiny.VOCAB_SIZE)
        assert list(computation.run(tokens, logits)) == [1, 1, 0, 0, 1, 1]
        assert logits[1].isnan().all()
        assert same_bits([logits[0]], [logits[2]])
        sound.append(logits[0].clone())
        # The NaN that the row held is gone when its positions are written again.
        assert list(computation.run(again, logits)) == [1] * 4
        assert logits[0].isfinite().all()
        sound.append(logits[0].clone())
    assert same_bits(sound[:2], sound[2:])


@pytest.mark.parametrize("name", ["qwen3", "mistral", SIXTEEN_LEVELS])
def test_a_copied_prefix_gives_the_bits_of_a_computed_one_on_both_paths(name, engine_of, library_engine_of):
    prompt, found = list(range(40, 70)), []
    for computation in (engine_of(name)._computation, library_engine_of(name)._computation):
        logits = torch.empty(1, tiny.VOCAB_SIZE)
        computation.run(StepTokens(prompt, [4] * 30, list(range(30)), [29]), logits)
        found.append(logits[0].clone())
        copies = [KvCopy(4, 9, 19), KvCopy(4, 2, 5)]
        computation.run(StepTokens(prompt[19:], [9] * 11, list(range(19, 30)), [10], copies), logits)
        found.append(logits[0].clone())
    assert all(same_bits([logits], [found[0]]) for logits in found)


def test_the_engine_says_which_path_it_took(engine_of, library_engine_of):
    info, native = engine_of("llama").info, library_engine_of("llama").info
    assert (info.engine, info.row_independent) == ("fused", True)
    assert info.device == "cpu (4-bit and int8 weights, int8 and int16 activations, int8 KV, torch)"
    assert native.device == info.device.replace("torch", "AVX2")
    assert info.kv_bytes == native.kv_bytes
    assert info.digest != native.digest


def test_a_context_of_no_whole_block_has_the_bits_of_the_library(image_of, fused_library_of_tests, fused_build_folder):
    prompt = tiny.random_prompts(1, [61])[0]
    plan = StepPlan((RowPlan(0, 0, tuple(prompt), SampleSpec(tiny.GREEDY, 0, 61)),))
    options = {"num_rows": 1, "context_tokens": 61, "build_folder": fused_build_folder}
    engines = [fused.load(image_of("qwen2"), native=native, **options) for native in (True, False)]
    assert engines[0].execute(plan) == engines[1].execute(plan)
    assert same_bits([engines[0]._logits[0]], [engines[1]._logits[0]])
    assert engines[0].info.kv_bytes == engines[1].info.kv_bytes
