"""Check the C++ library: its parts against integers and fp64, and how it is built, found again and refused."""

from __future__ import annotations

import ctypes
import os
import select
from pathlib import Path

import pytest
import torch

from inference_api.backend.engines import fused_library
from inference_api.backend.engines.fused_library import Layer, Linear, Model, open_library
from inference_api.errors import ModelError

pytestmark = pytest.mark.torch

ALL_FLAGS = frozenset(fused_library.INSTRUCTION_SETS)


def packed(functions, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Linear, list[torch.Tensor]]:
    outputs, inputs = weight.shape
    data = torch.empty(functions.fused_packed_bytes(outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs)
    functions.fused_pack(weight.data_ptr(), outputs, inputs, data.data_ptr(), scales.data_ptr())
    address = None if bias is None else bias.data_ptr()
    return Linear(data.data_ptr(), scales.data_ptr(), address, outputs, inputs), [data, scales]


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 weights and scales by the rule that the library states."""
    largest = weight.abs().amax(dim=1)
    inverse = torch.full_like(largest, 127) / largest  # 127 / tensor would round twice
    return (weight * inverse.unsqueeze(1)).round().clamp(-127, 127).long(), largest / 127


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 32, 33, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (17, 31), (1, 1), (50, 577), (96, 1536)])
def test_a_linear_layer_equals_integer_arithmetic_exactly(fused_library_of_tests, rows, outputs, inputs):
    functions = fused_library_of_tests.functions
    torch.manual_seed(rows * 7919 + inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    linear, kept = packed(functions, weight, bias)
    limit = functions.fused_activation_range(inputs)
    stride = (inputs + 15) // 16 * 16
    activations = torch.zeros(rows, stride, dtype=torch.int16)
    activations[:, :inputs] = torch.randint(-limit, limit + 1, (rows, inputs)).to(torch.int16)
    scales = torch.rand(rows)
    found = torch.empty(rows, outputs)
    functions.fused_linear(
        ctypes.byref(linear), activations.data_ptr(), scales.data_ptr(), rows, stride, found.data_ptr()
    )
    integers, weight_scales = quantized_weight(weight)
    sums = activations[:, :inputs].long() @ integers.T  # (rows, outputs), int64
    assert torch.equal(kept[1], weight_scales)
    assert torch.equal(found, sums.float() * (scales.unsqueeze(1) * weight_scales) + bias)


@pytest.mark.parametrize("inputs", [1, 2, 576, 1536, 8192, 28672])
def test_the_largest_sums_of_a_layer_do_not_overflow(fused_library_of_tests, inputs):
    functions = fused_library_of_tests.functions
    limit = functions.fused_activation_range(inputs)
    assert 127 <= limit <= 32767
    assert limit * 127 * inputs < 2**31
    weight = torch.ones(16, inputs)
    linear, _kept = packed(functions, weight)
    stride = (inputs + 15) // 16 * 16
    activations = torch.zeros(1, stride, dtype=torch.int16)
    one = torch.ones(1)
    for sign in (1, -1):
        activations[:, :inputs] = sign * limit
        found = torch.empty(1, 16)
        functions.fused_linear(
            ctypes.byref(linear), activations.data_ptr(), one.data_ptr(), 1, stride, found.data_ptr()
        )
        exact = torch.tensor(float(sign * limit * 127 * inputs)) * (torch.tensor(1.0) / 127)
        assert torch.equal(found, exact.expand(1, 16))


@pytest.mark.parametrize("count", [1, 7, 8, 48, 577])
def test_a_quantized_row_comes_back_within_half_a_step(fused_library_of_tests, count):
    functions = fused_library_of_tests.functions
    torch.manual_seed(count)
    values = torch.randn(count) * 3
    found = torch.full(((count + 15) // 16 * 16,), 99, dtype=torch.int16)
    scale = functions.fused_quantize(values.data_ptr(), count, 8000, found.data_ptr())
    assert scale == pytest.approx(float(values.abs().max()) / 8000, rel=1e-6)
    assert int(found.abs().max()) == 8000
    assert not found[count:].any()
    assert float((found[:count] * scale - values).abs().max()) <= scale * 0.501


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_that_says_so(fused_library_of_tests, bad):
    values = torch.zeros(48)
    values[13] = bad
    found = torch.empty(48, dtype=torch.int16)
    scale = fused_library_of_tests.functions.fused_quantize(values.data_ptr(), 48, 8000, found.data_ptr())
    assert scale != scale
    assert not found.any()


def test_zeros_stay_zeros(fused_library_of_tests):
    found = torch.empty(48, dtype=torch.int16)
    zeros = torch.zeros(48)
    assert fused_library_of_tests.functions.fused_quantize(zeros.data_ptr(), 48, 8000, found.data_ptr()) == 0
    assert not found.any()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (9, 3, 64), (4, 2, 40), (7, 1, 16), (8, 2, 32)])
@pytest.mark.parametrize("window", [0, 5])
def test_attention_equals_fp64_on_the_same_fp16_cache(fused_library_of_tests, heads, kv_heads, head_dim, window):
    functions = fused_library_of_tests.functions
    torch.manual_seed(heads)
    positions = 45
    layers = (Layer * 2)(Layer(), Layer(window=window))
    model = Model(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_layers=2, num_rows=3, context_tokens=positions + 4
    )
    model.layers = ctypes.addressof(layers)
    size = functions.fused_cache_halves(ctypes.byref(model))
    caches = [torch.full((size,), float("nan"), dtype=torch.float16) for _ in range(2)]  # what is not written is poison
    model.keys, model.values = (cache.data_ptr() for cache in caches)
    keys, values = (torch.randn(positions, kv_heads, head_dim) * 2 for _ in range(2))
    for position in range(positions):
        functions.fused_store_kv(
            ctypes.byref(model), 1, 2, position, keys[position].data_ptr(), values[position].data_ptr()
        )
    for position in (0, 1, 4, 7, 8, 33, 44):
        queries = torch.randn(heads, head_dim)
        found = torch.empty(heads, head_dim)
        functions.fused_attend(ctypes.byref(model), 1, 2, position, queries.data_ptr(), found.data_ptr())
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            seen_keys = keys[first : position + 1, kv_head].half().double()
            seen_values = values[first : position + 1, kv_head].half().double()
            weights = torch.softmax(seen_keys @ queries[head].double() / head_dim**0.5, dim=0)
            assert torch.allclose(found[head].double(), weights @ seen_values, rtol=1e-5, atol=1e-5)


def test_a_processor_without_the_instructions_is_refused_by_their_names(tmp_path):
    with pytest.raises(ModelError, match=r"this processor lacks: f16c, fma; set INFERENCE_API_ENGINE=transformers"):
        open_library(tmp_path, frozenset({"avx2"}))
    assert not list(tmp_path.iterdir())


def test_a_missing_compiler_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_library.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=r"g\+\+ is not installed: install it .* apt-get install g\+\+") as caught:
        open_library(tmp_path, ALL_FLAGS)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_sources_that_do_not_compile_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    with pytest.raises(ModelError, match=r"g\+\+ cannot compile the engine fused: .*nothing") as caught:
        open_library(tmp_path / "cache", ALL_FLAGS)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_stop_while_it_is_compiled_ends_the_compiler_with_its_children_and_leaves_nothing(tmp_path, monkeypatch):
    slow, pipe, children = tmp_path / "slow-compiler", tmp_path / "pipe", []
    slow.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{pipe}\nwait\n")
    slow.chmod(0o755)
    os.mkfifo(pipe)

    def interrupt(_compiler: object) -> None:
        children.append(os.pidfd_open(int(pipe.read_text())))  # blocks until the compiler has a child
        raise KeyboardInterrupt

    monkeypatch.setattr(fused_library, "COMPILER", str(slow))
    monkeypatch.setattr(fused_library.subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        open_library(tmp_path / "cache", ALL_FLAGS)
    assert not list((tmp_path / "cache").iterdir())
    assert select.select(children, [], [], 5.0)[0] == children
    os.close(children[0])


def test_a_folder_that_cannot_be_made_is_one_line_that_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"cannot be made in .*file: .*; make it writable, or set"):
        open_library(tmp_path / "file", ALL_FLAGS)


def test_a_library_is_built_once_and_again_if_it_is_broken(tmp_path, monkeypatch):
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    monkeypatch.setattr(fused_library, "_bind", lambda functions: functions)
    cache = tmp_path / "cache"
    library = open_library(cache, ALL_FLAGS)
    (built,) = cache.iterdir()
    changed_at = built.stat().st_mtime_ns
    assert open_library(cache, ALL_FLAGS).sha256 == library.sha256
    assert built.stat().st_mtime_ns == changed_at
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / built.name).write_bytes(b"no library")
    assert open_library(broken, ALL_FLAGS).functions.one() == 1
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert open_library(cache, ALL_FLAGS).functions.one() == 2
    assert len(list(cache.iterdir())) == 2


def test_the_library_serves_engines_of_any_process_from_one_folder(fused_library_of_tests):
    assert Path(fused_library_of_tests.functions._name).stem.endswith(fused_library_of_tests.sha256[:16])
