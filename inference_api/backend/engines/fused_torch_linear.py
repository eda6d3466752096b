"""Compute linear layers in torch as fused_native/linear_*.cpp do, bit for bit; decode thread of PROCESS 2.

Every group of 32 weights has a scale. With eight bits activations are int16 with a scale a row; with four, a group of
weights also has a lowest level, and a group of 32 activations is int8 with a scale. Sums of integers are exact in any
order, because each fits the type that torch adds it in; groups are added in fp32 in ascending order. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from inference_api.backend.engines.fused_levels import GROUP, LOWEST_UNITS, Levels, find_levels, find_units
from inference_api.backend.engines.fused_torch_rows import quantize
from inference_api.backend.engines.fused_weights import LinearWeights

MAX_WEIGHT = 127

ACTIVATION_RANGE = 2**15 - 1
DIGIT = 256
"""fp32 holds the sum of a group's products of a weight and half an activation: 32 x 127 x 128 < 2^24."""

SUM_BITS = 13
"""Of the sum of a group of activations: with a lowest level's 11 they fill the 24 of fp32."""
_FP32_BITS = 24

WORK_NUMBERS = 2**17
"""Groups are multiplied together while their products are no more than these: few tokens then take few calls."""


class EightBitLinear:
    """A linear layer of int8 weights with a scale a group; kept as fp32 for the matrix product of that type."""

    def __init__(self, source: LinearWeights) -> None:
        padding = -source.weight.shape[1] % GROUP
        outputs = len(source.weight)
        grouped = functional.pad(source.weight, (0, padding)).view(outputs, -1, GROUP)  # (outputs, groups, GROUP)
        scales = grouped.abs().amax(dim=2) / MAX_WEIGHT  # (outputs, groups)
        # A broken weight must make its output NaN, which ends the requests that see it, and not a wrong number.
        finite = scales.isfinite()
        numbers = (grouped / scales.unsqueeze(2)).clamp(-MAX_WEIGHT, MAX_WEIGHT).round()
        numbers = numbers.where((finite & (scales > 0)).unsqueeze(2), 0.0)
        self._weight = numbers.permute(1, 2, 0).contiguous()  # (groups, GROUP, outputs)
        self._scales = scales.where(finite, torch.nan).T.unsqueeze(1).contiguous()  # (groups, 1, outputs)
        self._bias = source.bias
        self._padding = padding
        self.num_bytes = _num_bytes(self._weight, self._scales, self._bias)

    def __call__(self, values: Tensor) -> Tensor:
        """Return (tokens, outputs) of `values` (tokens, inputs), fp32."""
        integers, scales = quantize(values, ACTIVATION_RANGE)  # (tokens, inputs), (tokens, 1)
        integers = functional.pad(integers, (0, self._padding))
        low = (integers + DIGIT / 2).remainder(DIGIT) - DIGIT / 2  # -128 to 127
        digits = torch.cat([low, (integers - low) / DIGIT])  # (2 x tokens, inputs)
        digits = digits.view(len(digits), -1, GROUP).transpose(0, 1)  # (groups, 2 x tokens, GROUP)
        outputs = torch.zeros(len(values), self._weight.shape[2])
        num_groups = max(1, WORK_NUMBERS // outputs.numel())
        for first in range(0, len(digits), num_groups):
            part = slice(first, first + num_groups)
            low_sums, high_sums = (digits[part] @ self._weight[part]).double().chunk(2, dim=1)
            for product in (low_sums + DIGIT * high_sums).float().mul_(self._scales[part]):
                outputs += product
        outputs *= scales
        return outputs if self._bias is None else outputs + self._bias


class FourBitLinear:
    """A linear layer whose weights lie on 16 levels a group of 32 inputs; activations are int8 by group."""

    def __init__(self, levels: Levels, bias: Tensor | None) -> None:
        self._levels = levels.numbers.permute(1, 2, 0).contiguous()  # (groups, GROUP, outputs), fp32
        units = find_units(levels)  # (outputs, 1)
        # Whole numbers of a unit, and of LOWEST_UNITS units; multiplied with sums of integers the first stay exact.
        self._scales = (levels.scales / units).round().double().T.unsqueeze(1).contiguous()  # (groups, 1, outputs)
        self._lowest = (levels.lowest / units / LOWEST_UNITS).half().float().T.unsqueeze(1).contiguous()
        self._units = units.T.contiguous()  # (1, outputs)
        self._bias = bias
        self.num_bytes = _num_bytes(self._levels, self._scales, self._lowest, self._units, bias)

    def __call__(self, values: Tensor) -> Tensor:
        """Return (tokens, outputs) of `values` (tokens, inputs), fp32."""
        grouped = values.view(len(values), -1, GROUP).transpose(0, 1)  # (groups, tokens, GROUP)
        integers, scales = quantize(grouped, MAX_WEIGHT)
        # Of exact integers; rounded, so that a product with a lowest level is exact: (groups, tokens, 1).
        sums = _round_sums(scales * (LOWEST_UNITS * integers.sum(dim=2, keepdim=True)))
        outputs = torch.zeros(len(values), self._levels.shape[2])
        num_groups = max(1, WORK_NUMBERS // outputs.numel())
        for first in range(0, len(grouped), num_groups):
            part = slice(first, first + num_groups)
            products = integers[part] @ self._levels[part]  # below 2^24, so exact
            scaled = (products.double() * self._scales[part]).float()  # below 2^31, rounded once
            scaled.mul_(scales[part])
            for product, lowest in zip(scaled, sums[part] * self._lowest[part], strict=True):
                outputs += product
                outputs += lowest
        outputs *= self._units
        return outputs if self._bias is None else outputs + self._bias


Linear = EightBitLinear | FourBitLinear


def make_linear(source: LinearWeights) -> Linear:
    """Return the layer in four bits where they lose nothing, as the library does."""
    levels = find_levels(source.weight)
    return EightBitLinear(source) if levels is None else FourBitLinear(levels, source.bias)


def _round_sums(sums: Tensor) -> Tensor:
    """Return fp32 `sums` rounded to SUM_BITS, halves away from zero."""
    lost = 1 << (_FP32_BITS - SUM_BITS)
    return ((sums.view(torch.int32) + lost // 2) & -lost).view(torch.float32)


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
