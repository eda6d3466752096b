"""Make in torch what fused_native/rows.h makes of rows of numbers, bit for bit; decode thread of PROCESS 2.

Norms, quantization, rotation and the gate. Int8 activations turn a difference in the last bit into a step of their
own, so these functions do the same additions, multiplications and divisions in the same order: each is an elementwise
operation of fp32, which IEEE 754 rounds in one way, and sums run over eight lanes. A row's bits depend on that row
alone. Knows no layers and no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_api.backend.engines.fused_shape import LANES

_TINIEST = 1e-30
"""Rows whose largest number is below it are zeros: the inverse of their scale would be infinite."""

_LOWEST_POWER, _HIGHEST_POWER = -87.0, 88.0
_LOG2_E = 1.44269504088896341
# Polynomial and split of ln 2: Cephes, single/expf.c.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_COEFFICIENTS = (
    *(1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3),
    *(4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
)
_EXPONENT_BIAS = 127
_FRACTION_BITS = 23


def lane_sum(values: Tensor) -> Tensor:
    """Return the sums (…, 1) of `values` (…, n), n a multiple of 8: each lane in ascending order, then `fold`."""
    vectors = values.reshape(*values.shape[:-1], -1, LANES).movedim(-2, 0).contiguous()  # (n / 8, …, 8)
    lanes = torch.zeros_like(vectors[0])
    for vector in vectors:
        lanes += vector
    return fold(lanes)


def fold(lanes: Tensor) -> Tensor:
    """Return the sums (…, 1) of `lanes` (…, 8), always in the same order."""
    halves = lanes[..., :4] + lanes[..., 4:]
    quarters = halves[..., :2] + halves[..., 2:]
    return quarters[..., :1] + quarters[..., 1:]


def rms_norm(values: Tensor, weights: Tensor, epsilon: float) -> Tensor:
    """Return `values` (…, width) over the root of their mean square, times `weights` (width)."""
    mean = lane_sum(values * values) / values.shape[-1] + epsilon
    # The root of fp32 need not be torch's nearest number. That of fp64 is: no root of an fp32 number lies as near to
    # the middle between two as fp64 may be off.
    return values * mean.double().sqrt().float().reciprocal() * weights


def quantize(values: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return integers up to `limit` for each last dimension (…, n), and the scale (…, 1) that undoes it.

    Where a number is not finite the integers are 0 and the scale is NaN: it spoils what it scales, and nothing beside.
    """
    largest = values.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    sound = finite & (largest >= _TINIEST)
    limits = torch.full_like(largest, limit)  # a number over a tensor would be rounded twice
    integers = torch.where(sound, (values * (limits / largest)).round(), 0.0)
    return integers, torch.where(finite, torch.where(sound, largest / limits, 0.0), torch.nan)


def exponential(values: Tensor) -> Tensor:
    """Return e to the power of `values`, elementwise; exactly 0 below -87; NaN stays NaN."""
    rest = values.clamp(_LOWEST_POWER, _HIGHEST_POWER)
    powers = (rest * _LOG2_E).round()
    rest = rest - powers * _LN2_HIGH
    rest = rest - powers * _LN2_LOW
    result = torch.full_like(rest, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        result = result * rest + coefficient
    result = result * (rest * rest) + (rest + 1.0)
    # What a NaN becomes here does not matter: it is multiplied with one.
    scales = ((powers.int() + _EXPONENT_BIAS) << _FRACTION_BITS).view(torch.float32)
    return (result * scales).masked_fill(values < _LOWEST_POWER, 0.0)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the halves of `heads` (…, head_dim) against each other by angles (…, head_dim / 2)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def gate(gates: Tensor, ups: Tensor) -> Tensor:
    """Return gates / (1 + e^-gates) * ups, elementwise."""
    return gates / (exponential(-gates) + 1.0) * ups
