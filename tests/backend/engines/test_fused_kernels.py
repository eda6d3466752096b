"""Check the arithmetic of the C++ library, part by part, against integers and fp64."""

from __future__ import annotations

import ctypes

import pytest
import torch

from inference_api.backend.engines.fused_levels import LOWEST_UNITS, find_levels
from inference_api.backend.engines.fused_library import Layer, Linear, Model
from inference_api.backend.engines.fused_torch_linear import SUM_BITS

pytestmark = pytest.mark.torch

GROUP = 32


def packed(functions, weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 8) -> tuple[Linear, object]:
    """Return a layer, and what must live as long as it."""
    outputs, inputs = weight.shape
    data = torch.empty(functions.fused_packed_bytes(bits, outputs, inputs), dtype=torch.uint8)
    functions.fused_pack(bits, weight.data_ptr(), outputs, inputs, data.data_ptr())
    return Linear(data.data_ptr(), None if bias is None else bias.data_ptr(), outputs, inputs, bits), data


def computed(functions, linear: Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Return what the library makes of `inputs` (rows, inputs): (rows, outputs)."""
    found = torch.empty(len(inputs), linear.outputs)
    assert functions.fused_linear(ctypes.byref(linear), inputs.data_ptr(), len(inputs), found.data_ptr())
    return found


def padded(numbers: torch.Tensor) -> torch.Tensor:
    """Return `numbers` (rows, inputs) with zeros up to whole groups."""
    return torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % GROUP))


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 weights (outputs, groups, GROUP) and scales (outputs, groups) by the library's rule."""
    grouped = padded(weight).view(len(weight), -1, GROUP)
    scales = grouped.abs().amax(dim=2) / 127
    return (grouped / scales.unsqueeze(2)).round().clamp(-127, 127).long(), scales


def quantized_rows(functions, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 activations (rows, whole groups) and a scale a row, as the library quantizes them for eight bits."""
    numbers = torch.empty(padded(values).shape, dtype=torch.int16)
    scales = [
        functions.fused_quantize(row.data_ptr(), values.shape[1], 32767, out.data_ptr())
        for row, out in zip(values, numbers, strict=True)
    ]
    return numbers.long(), torch.tensor(scales)


def quantized_groups(functions, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return int8 activations (rows, inputs), scales and sums (rows, groups), as four bits take them."""
    numbers = torch.empty(values.shape, dtype=torch.int8)
    scales, sums = (torch.empty(len(values), values.shape[1] // GROUP) for _ in range(2))
    for row in range(len(values)):
        addresses = [tensor[row].data_ptr() for tensor in (numbers, scales, sums)]
        functions.fused_quantize_groups(values[row].data_ptr(), values.shape[1], *addresses)
    return numbers, scales, sums


def four_bit_weight(outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return a weight on 16 levels a group, and the levels, scales and lowest values that make it."""
    torch.manual_seed(seed)
    levels = torch.randint(0, 16, (outputs, inputs // GROUP, GROUP))
    levels[..., 3], levels[..., 17] = 0, 15
    scales = (torch.rand(outputs, inputs // GROUP, 1) * 0.02 + 0.001).half().float()
    lowest = -(torch.rand(outputs, inputs // GROUP, 1) * 0.06).half().float()  # no more than 64 scales
    return (scales * levels + lowest).view(outputs, inputs), levels, scales, lowest


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 32, 33, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (17, 31), (1, 1), (50, 577), (96, 1536)])
def test_a_layer_of_eight_bits_equals_integer_arithmetic_exactly(fused_library_of_tests, rows, outputs, inputs):
    functions = fused_library_of_tests.functions
    torch.manual_seed(rows * 7919 + inputs)
    weight, bias, values = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, inputs)
    linear, _kept = packed(functions, weight, bias)
    activations, scales = quantized_rows(functions, values)
    integers, weight_scales = quantized_weight(weight)
    expected = torch.zeros(rows, outputs)
    for group in range(integers.shape[1]):
        sums = activations.view(rows, -1, GROUP)[:, group] @ integers[:, group].T  # (rows, outputs), int64
        expected += sums.float() * weight_scales[:, group]
    assert torch.equal(computed(functions, linear, values), expected * scales.unsqueeze(1) + bias)


def test_the_largest_sums_of_a_group_of_eight_bits_do_not_overflow(fused_library_of_tests):
    functions = fused_library_of_tests.functions
    linear, _kept = packed(functions, torch.ones(16, GROUP))
    for sign in (1.0, -1.0):
        found = computed(functions, linear, torch.full((1, GROUP), sign))
        assert torch.allclose(found, torch.full((1, 16), sign * GROUP), rtol=1e-6)


def test_eight_bits_hold_a_model_that_was_quantized_so_without_loss(fused_library_of_tests):
    functions = fused_library_of_tests.functions
    torch.manual_seed(6)
    numbers = torch.randint(-127, 128, (16, 3, GROUP)).float()
    numbers[..., 5] = 127
    weight = (numbers * (torch.rand(16, 3, 1) * 0.01).half().float()).view(16, 96)
    linear, _kept = packed(functions, weight)
    for index in (0, 40, 95):
        values = torch.zeros(1, 96)
        values[0, index] = 32767.0  # its scale is 1
        assert torch.allclose(computed(functions, linear, values)[0] / 32767, weight[:, index], rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 32, 33, 128])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (17, 64), (1, 96), (50, 576), (96, 1536)])
def test_a_layer_of_four_bits_equals_integer_sums_of_each_group(fused_library_of_tests, rows, outputs, inputs):
    functions = fused_library_of_tests.functions
    weight, levels, scales, lowest = four_bit_weight(outputs, inputs, rows)
    bias, values = torch.randn(outputs), torch.randn(rows, inputs) * 3
    assert functions.fused_weight_bits(weight.data_ptr(), outputs, inputs) == 4
    linear, _kept = packed(functions, weight, bias, bits=4)
    numbers, row_scales, row_sums = quantized_groups(functions, values)
    grouped = numbers.view(rows, -1, GROUP).double()
    sums = torch.einsum("rgi,ogi->rog", grouped, levels.double())  # integers
    expected = (sums * scales.squeeze(2).double() * row_scales.unsqueeze(1).double()).sum(dim=2)
    expected += row_sums.double() @ lowest.squeeze(2).T.double() / LOWEST_UNITS + bias
    found = computed(functions, linear, values)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    alone = torch.cat([computed(functions, linear, row.unsqueeze(0)) for row in values])
    assert torch.equal(found, alone)


def test_four_bits_are_taken_only_where_they_lose_nothing(fused_library_of_tests):
    def bits_of(weight: torch.Tensor) -> int:
        return fused_library_of_tests.functions.fused_weight_bits(weight.data_ptr(), *weight.shape)

    weight = four_bit_weight(8, 64)[0]
    assert bits_of(weight) == 4
    assert bits_of(torch.zeros(8, 64)) == 4
    assert bits_of(torch.full((8, 64), -0.5)) == 4
    assert bits_of(weight[:, :48].contiguous()) == 8  # no whole groups
    assert bits_of(torch.randn(8, 64)) == 8
    for distance, bits in ((60.0, 4), (130.0, 8)):  # of the lowest levels in scales; a larger unit would lose scales
        far = (torch.arange(64) % 16 * 0.25 - distance * 0.25).repeat(8, 1)
        assert bits_of(far) == bits
        assert (find_levels(far) is not None) == (bits == 4)
    for index, value in ((5, 0.0123), (200, float("nan")), (511, float("inf")), (511, 1e9)):
        other = weight.clone()
        other.view(-1)[index] = value
        assert bits_of(other) == 8


def test_the_largest_sums_of_a_group_of_four_bits_do_not_overflow(fused_library_of_tests):
    functions = fused_library_of_tests.functions
    weight = torch.full((16, GROUP), 15.0)
    weight[:, 0] = 0.0
    linear, _kept = packed(functions, weight, bits=4)
    for sign in (1.0, -1.0):
        found = computed(functions, linear, torch.full((1, GROUP), sign))
        assert torch.allclose(found, torch.full((1, 16), sign * 15 * (GROUP - 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("base", "smallest"), [(0.0, 1.0), (0.0, 2**-10), (0.0, 2**-14), (100.0, 1.0), (100.0, 2**-10), (-60000.0, 1.0)]
)
def test_groups_of_an_output_may_differ_by_thousands_in_scale_and_lie_far_from_zero(
    fused_library_of_tests, base, smallest
):
    functions = fused_library_of_tests.functions
    torch.manual_seed(11)
    levels = torch.randint(0, 16, (16, 3, GROUP)).float()
    levels[..., 3], levels[..., 17] = 0, 15
    step = 32.0 if base < -1000 else 0.125  # what fp16 tells apart there
    weight = (levels * torch.tensor([step, step * smallest, step]).view(3, 1) + base).view(16, 96)
    linear, _kept = packed(functions, weight, bits=4)
    values = torch.zeros(3, 96)
    for row in range(3):
        values[row, 32 * row : 32 * row + GROUP] = torch.randn(GROUP)
    numbers, scales, _sums = quantized_groups(functions, values)
    grouped = numbers.view(3, 3, GROUP).double() * scales.unsqueeze(2)
    again = grouped.view(3, 96)
    expected, largest = again @ weight.T.double(), again.abs() @ weight.T.abs().double()
    error = (computed(functions, linear, values).double() - expected).abs()
    # A scale is whole to within half of the output's unit: 2^-15 of its largest scale at worst.
    scales_error = again.abs().sum(dim=1, keepdim=True) * step * 15 * 2**-15
    lowest = weight.view(16, 3, GROUP).amin(dim=2).double()
    sums_error = grouped.sum(dim=2).abs() @ lowest.abs().T * 2**-SUM_BITS
    assert (error <= largest * 2e-6 + scales_error + sums_error).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_that_is_not_finite_says_so_and_the_others_do_not(fused_library_of_tests, bad):
    values = torch.randn(1, 96)
    values[0, 40] = bad
    numbers, scales, sums = quantized_groups(fused_library_of_tests.functions, values)
    assert scales.isnan().tolist() == sums.isnan().tolist() == [[False, True, False]]
    assert not numbers[0, 32:64].any()


def test_a_quantized_group_comes_back_within_half_a_step(fused_library_of_tests):
    torch.manual_seed(4)
    values = torch.randn(7, 96) * torch.tensor([1e-35, 1e-6, 1.0, 1e6, 3.0, 0.0, 7.0]).unsqueeze(1)
    numbers, scales, sums = quantized_groups(fused_library_of_tests.functions, values)
    grouped = numbers.view(7, 3, GROUP)
    back = grouped * scales.unsqueeze(2)
    assert ((back - values.view(7, 3, GROUP)).abs().amax(dim=2) <= scales * 0.501 + 1e-30).all()
    whole = scales * (LOWEST_UNITS * grouped.sum(dim=2).float())
    assert ((sums - whole).abs() <= whole.abs() * 2.0**-SUM_BITS).all()
    fractions, _exponents = torch.frexp(sums)
    assert torch.equal(fractions * 2**SUM_BITS, (fractions * 2**SUM_BITS).round())


@pytest.mark.parametrize("count", [1, 7, 8, 48, 577])
def test_a_quantized_row_comes_back_within_half_a_step(fused_library_of_tests, count):
    functions = fused_library_of_tests.functions
    torch.manual_seed(count)
    values = torch.randn(count) * 3
    found = torch.full(((count + 31) // 32 * 32,), 99, dtype=torch.int16)
    scale = functions.fused_quantize(values.data_ptr(), count, 8000, found.data_ptr())
    assert scale == pytest.approx(float(values.abs().max()) / 8000, rel=1e-6)
    assert int(found.abs().max()) == 8000
    assert not found[count:].any()
    assert float((found[:count] * scale - values).abs().max()) <= scale * 0.501


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_that_says_so(fused_library_of_tests, bad):
    values = torch.zeros(48)
    values[13] = bad
    found = torch.empty(64, dtype=torch.int16)
    scale = fused_library_of_tests.functions.fused_quantize(values.data_ptr(), 48, 8000, found.data_ptr())
    assert scale != scale
    assert not found.any()


def test_zeros_stay_zeros(fused_library_of_tests):
    found = torch.empty(64, dtype=torch.int16)
    zeros = torch.zeros(48)
    assert fused_library_of_tests.functions.fused_quantize(zeros.data_ptr(), 48, 8000, found.data_ptr()) == 0
    assert not found.any()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(1, 1, 8), (9, 3, 64), (4, 2, 40), (7, 1, 16), (8, 2, 32)])
@pytest.mark.parametrize("window", [0, 5, 700])
def test_attention_equals_fp64_on_the_same_int8_cache(fused_library_of_tests, heads, kv_heads, head_dim, window):
    functions = fused_library_of_tests.functions
    torch.manual_seed(heads)
    positions = 1100 if window == 700 else 45
    layers = (Layer * 2)(Layer(), Layer(window=window))
    model = Model(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, num_layers=2, num_rows=3, context_tokens=positions + 4
    )
    model.layers = ctypes.addressof(layers)
    size = functions.fused_cache_bytes(ctypes.byref(model))
    cache = torch.full((size // 4,), float("nan"))  # what is not written is poison
    model.cache = cache.data_ptr()
    keys, values = (torch.randn(positions, kv_heads, head_dim) * 2 for _ in range(2))
    for position in range(positions):
        functions.fused_store_kv(
            ctypes.byref(model), 1, 2, position, keys[position].data_ptr(), values[position].data_ptr()
        )
    keys, values = (quantized_heads(functions, numbers) for numbers in (keys, values))
    for position in {0, 1, 4, 7, 8, 33, 44, positions // 2, positions - 1}:
        queries = torch.randn(heads, head_dim)
        found = torch.empty(heads, head_dim)
        functions.fused_attend(ctypes.byref(model), 1, 2, position, queries.data_ptr(), found.data_ptr())
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            seen_keys, seen_values = (numbers[first : position + 1, kv_head] for numbers in (keys, values))
            weights = torch.softmax(seen_keys @ queries[head].double() / head_dim**0.5, dim=0)
            gap = float((found[head].double() - weights @ seen_values).abs().max())
            assert gap < 1e-3, (position, head, gap)


def quantized_heads(functions, heads: torch.Tensor) -> torch.Tensor:
    """Return fp64 heads (positions, heads, head_dim) as int8 and a scale each hold them."""
    head_dim = heads.shape[2]
    numbers = torch.empty((head_dim + GROUP - 1) // GROUP * GROUP, dtype=torch.int16)
    back = torch.empty(heads.shape, dtype=torch.float64)
    for position, head in ((p, h) for p in range(len(heads)) for h in range(heads.shape[1])):
        scale = functions.fused_quantize(heads[position, head].data_ptr(), head_dim, 127, numbers.data_ptr())
        back[position, head] = numbers[:head_dim].double() * scale
    return back
