"""Play the scheduler for an engine that a bench has in its own process: fill rows, run steps, overlook no fault.

A step whose rows fail is fast and proves nothing, so that every step of such a bench goes through `execute`. Knows
plans and results; no sequences, no clock and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

from benches.service import BenchError
from inference_api.backend.engines.base import Engine, RowPlan, StepPlan
from inference_api.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)

FILL_TOKENS = 512
"""Prompt tokens a step while rows are filled: the longest chunk that the warm-up would choose."""


def execute(engine: Engine, plans: Sequence[RowPlan]) -> None:
    """Run one step of these rows (blocking); raise BenchError if one of them fails."""
    for row in engine.execute(StepPlan(tuple(plans))).rows:
        if row.error is not None:
            raise BenchError(f"row {row.row} failed: {row.error.code}: {row.error.message}")


def fill(engine: Engine, row: int, ids: Sequence[int]) -> None:
    """Begin a row anew and compute all of `ids` in it, in chunks; nothing is drawn."""
    for start in range(0, len(ids), FILL_TOKENS):
        execute(engine, [RowPlan(row, start, tuple(ids[start : start + FILL_TOKENS]), None)])


def unlike_ids(row: int, start: int, num_tokens: int) -> tuple[int, ...]:
    """Return ids for positions of a row that differ, so that keys and values do too; any vocabulary has them."""
    return tuple((row * 31 + position * 7) % 255 for position in range(start, start + num_tokens))
