"""Find the 16 levels that a quantized model's weights lie on; at load in PROCESS 2, where torch computes the steps.

GGUF's Q4_0 and Q4_1 give each 32 inputs of an output a scale and a lowest value, and each weight one of 16 levels. A
model image holds the fp32 numbers that this makes; where they are found to be such, four bits hold them without loss.
The same rules as in fused_native/linear_four.cpp. Knows no model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
TOP_LEVEL = 15
MAX_SCALE = 2**15 - 1
MAX_HALF = 65504.0
LOWEST_UNITS = 32.0
"""Units of an output that a lowest level counts in: as many as let it be an fp16 where a scale is an int16.

It may then be 64 times the output's largest scale and more; beyond, a larger unit would hold the scales less well.
"""

TOLERANCE = 1e-6
"""Of a group's largest weight: what fp32 rounds away when a weight is made of its level."""


class Levels(NamedTuple):
    """A weight (outputs, inputs) = scales x numbers + lowest, by group of inputs."""

    numbers: Tensor
    """(outputs, groups, GROUP), 0 to TOP_LEVEL."""
    scales: Tensor
    """(outputs, groups), of fp16 precision."""
    lowest: Tensor
    """(outputs, groups), of fp16 precision."""


def find_levels(weight: Tensor) -> Levels | None:
    """Return the levels of `weight` (outputs, inputs), fp32; None if four bits do not hold it without loss."""
    outputs, inputs = weight.shape
    if inputs % GROUP or not weight.isfinite().all():
        return None
    grouped = weight.view(outputs, -1, GROUP)
    lowest, highest = grouped.amin(dim=2), grouped.amax(dim=2)  # (outputs, groups)
    scales = ((highest - lowest) / TOP_LEVEL).half().float()
    numbers = ((grouped - lowest.unsqueeze(2)) / scales.unsqueeze(2)).round()
    numbers = numbers.where(scales.unsqueeze(2) > 0, 0.0)
    again = scales.unsqueeze(2) * numbers + lowest.unsqueeze(2)
    largest = lowest.abs().maximum(highest.abs()).unsqueeze(2)
    fits = (lowest.half().float() == lowest).all() and (numbers <= TOP_LEVEL).all()
    found = Levels(numbers, scales, lowest)
    return found if fits and _holds_scales(found) and ((again - grouped).abs() <= TOLERANCE * largest).all() else None


def _holds_scales(levels: Levels) -> bool:
    """Tell whether each unit is the smallest that the scales let it be: a larger one holds them less well."""
    largest = levels.scales.amax(dim=1, keepdim=True)  # (outputs, 1)
    return bool(((largest == 0) | (2 * largest > MAX_SCALE * find_units(levels))).all())


def find_units(levels: Levels) -> Tensor:
    """Return (outputs, 1): the smallest power of two of which every scale is an int16, every lowest level 32 fp16."""
    smallest = torch.maximum(
        levels.scales.amax(dim=1, keepdim=True) / MAX_SCALE,
        levels.lowest.abs().amax(dim=1, keepdim=True) / (MAX_HALF * LOWEST_UNITS),
    ).clamp_min(torch.finfo(torch.float32).tiny)
    fractions, exponents = torch.frexp(smallest)  # fractions from 0.5 to below 1
    return torch.ldexp(torch.ones_like(smallest), exponents - (fractions == 0.5).int())
