"""Compare the batched sampler with a scalar one on random rows: logits, parameters, batch sizes and neighbours.

Runs under pytest, and as a program: `test_decode.py --batches 1000`. The scalar reference is the one of the
sampler's own tests. A draw that falls within rounding of a border between two ids is counted and not compared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from inference_api.backend.engines import sampler
from inference_api.backend.engines.base import SampleSpec
from inference_api.options import OneLineParser
from inference_api.sampling_params import SamplingParams
from tests.backend.engines.scalar_sampler import BORDER, reference_draw
from tests.live.program import FAILED_STATUS, positive, run_program

VOCABULARIES = (2, 41, 257, 1000)
MAX_ROWS = 32


@dataclass
class Comparison:
    """How many draws were compared, left out, and different."""

    num_compared: int = 0
    num_at_a_border: int = 0
    differences: list[str] = field(default_factory=list)


def random_batch(source: random.Random) -> tuple[torch.Tensor, list[SampleSpec]]:
    """Draw logits (rows, vocab), every fourth time full of ties, and each row's parameters."""
    num_rows, vocab = source.randint(1, MAX_ROWS), source.choice(VOCABULARIES)
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(source.getrandbits(63))) * 3
    if source.random() < 0.25:
        logits = logits.round()
    specs = [
        SampleSpec(
            SamplingParams(
                source.choice([0.0, 0.01, 0.7, 1.0, 2.0, 100.0]),
                source.choice([0, 1, 2, 10, 40, 1000]),
                source.choice([0.01, 0.5, 0.9, 0.99, 1.0]),
                source.getrandbits(63),
            ),
            source.randint(0, 3),
            source.randint(0, 2047),
        )
        for _ in range(num_rows)
    ]
    return logits, specs


def compare(num_batches: int, seed: int) -> Comparison:
    """Sample random batches and draw each of their rows again, alone and in plain Python."""
    source = random.Random(seed)
    result = Comparison()
    for batch in range(num_batches):
        logits, specs = random_batch(source)
        draws = sampler.sample(logits, specs)
        for row, (spec, draw) in enumerate(zip(specs, draws, strict=True)):
            expected, margin = reference_draw(logits[row].tolist(), spec)
            if margin <= BORDER:
                result.num_at_a_border += 1
                continue
            result.num_compared += 1
            if draw != sampler.Draw(expected):
                result.differences.append(f"batch {batch} row {row}: {draw}, not {expected}, for {spec}")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as many batches as the options say; return the exit status."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batches", type=positive, default=300, help="random batches of 1 to 32 rows (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: 0)")
    options = parser.parse_args(arguments)
    result = compare(options.batches, options.seed)
    for difference in result.differences[:10]:
        print(difference)
    counts = {"compared": result.num_compared, "at_a_border": result.num_at_a_border}
    print(f"{result.num_compared} draws compared, {len(result.differences)} different")
    print(json.dumps({"program": "decode", "seed": options.seed, **counts, "different": len(result.differences)}))
    return FAILED_STATUS if result.differences else 0


@pytest.mark.torch
def test_the_batched_sampler_equals_the_scalar_one() -> None:
    result = compare(40, 0)
    assert result.differences == []
    assert result.num_compared > 400
    assert result.num_at_a_border < result.num_compared / 100


if __name__ == "__main__":
    sys.exit(run_program(main))
