"""Hold the torch path's multiplication with addition to the one rounding of the processor's instruction."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from inference_api.backend.engines.fused_torch_rows import multiply_add

pytestmark = pytest.mark.torch


def nearest(exact: Fraction) -> float:
    """Return the fp32 number nearest to `exact`, that with an even fraction of two."""
    if exact == 0:
        return 0.0
    exponent = math.frexp(float(exact))[1] - 24  # fp32's fraction is 24 bits
    step = Fraction(2) ** exponent
    return float(round(exact / step) * step)  # of two as near, round takes the even one


def exactly(left: torch.Tensor, right: torch.Tensor, addend: torch.Tensor) -> list[float]:
    triples = zip(left.tolist(), right.tolist(), addend.tolist(), strict=True)
    return [nearest(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in triples]


def test_random_numbers_are_rounded_once():
    torch.manual_seed(3)
    left, right, addend = torch.randn(3, 4000) * torch.logspace(-8, 8, 4000)
    assert multiply_add(left, right, addend).tolist() == exactly(left, right, addend)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("tail", [2.0**-60, 0.0, -(2.0**-60)])
@pytest.mark.parametrize("last_bit", [0.0, 2.0**-23])
def test_what_fp64_cannot_hold_decides_between_two_numbers(sign, tail, last_bit):
    # The product lies in the middle between two fp32 numbers, and the addend a hair beside it, or the other way round.
    middle = torch.tensor([sign * (1.0 + last_bit), sign * (1.0 + 2.0**-12), sign * tail])
    half = torch.tensor([sign * 2.0**-24, sign * (1.0 + 2.0**-12), sign * tail])
    ones = torch.tensor([1.0, 1.0 + 2.0**-12, 1.0])
    cases = [
        (half[:1], ones[:1], middle[:1]),
        (half[1:2], ones[1:2], half[2:]),
        (middle[1:2], ones[1:2], middle[2:]),
    ]
    for left, right, addend in cases:
        assert multiply_add(left, right, addend).tolist() == exactly(left, right, addend)


def test_rounding_twice_would_be_found_out():
    left = right = torch.tensor([1.0 + 2.0**-12])  # their product is 1 + 2^-11 + 2^-24: a middle
    below = torch.tensor([-(2.0**-60)])
    twice = (left.double() * right.double() + below).float()
    assert multiply_add(left, right, below).tolist() == exactly(left, right, below)
    above = torch.tensor([2.0**-60])
    assert multiply_add(left, right, above).item() > twice.item()


def test_nan_and_infinity_stay_what_they_are():
    nan, inf = math.nan, math.inf
    left, right = torch.tensor([nan, 1.0, 1.0, inf, inf]), torch.tensor([1.0, nan, 1.0, 2.0, 0.0])
    addend = torch.tensor([1.0, 1.0, nan, 5.0, 1.0])
    found = multiply_add(left, right, addend)
    assert found.isnan().tolist() == [True, True, True, False, True]
    assert found[3] == inf
