"""Warm an engine up before it serves, and tune how many prompt tokens a step may carry.

Runs once in the decode thread. Knows the engine's contract only.
"""

from __future__ import annotations

import statistics
import time

from inference_api.backend.engines.base import Engine, PrefillBudget, RowPlan, SampleSpec, StepPlan
from inference_api.messages import SamplingParams

CHUNK_CANDIDATES = (16, 32, 64, 128, 256, 512)
"""Chunks that are tried, smallest first; the smallest is taken whatever it costs."""

MAX_STEP_RATIO = 2.0
"""A step with a chunk may take this many times a decode step: the stall that a new prompt causes its neighbours."""

MAX_IDLE_STEP_SECONDS = 0.5
"""A step that only prefills may take this long: heartbeats and aborts wait for it."""

_PARAMS = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=0)
_PROMPT_TOKENS = 16


def warm_up(engine: Engine, chunk_tokens: int = 0) -> PrefillBudget:
    """Run every kind of step; return the budget that was measured, or `chunk_tokens` for both if it is set.

    Every row but the last decodes while the last one prefills; all rows are released at the end.
    """
    info = engine.info
    prompt_tokens = min(_PROMPT_TOKENS, info.context_tokens // 4)
    decoding = range(max(1, info.num_rows - 1))
    for row in decoding:
        _run(engine, [_row_plan(row, 0, prompt_tokens)])
    position = prompt_tokens
    seconds = []
    for _ in range(3):
        seconds.append(_run(engine, [_row_plan(row, position, 1) for row in decoding]))
        position += 1
    decode_seconds = statistics.median(seconds)
    budget = PrefillBudget(chunk_tokens, chunk_tokens)
    if not chunk_tokens:
        budget = PrefillBudget(
            _largest_chunk(engine, MAX_STEP_RATIO * decode_seconds, position),
            _largest_chunk(engine, MAX_IDLE_STEP_SECONDS, None),
        )
    for row in range(info.num_rows):
        engine.release(row)
    return budget


def _largest_chunk(engine: Engine, max_seconds: float, position: int | None) -> int:
    """Try chunks in the last row, beside rows that decode at `position` if it is given, until a step is too slow."""
    last_row = engine.info.num_rows - 1
    chosen = CHUNK_CANDIDATES[0]
    for chunk in CHUNK_CANDIDATES:
        if chunk >= engine.info.context_tokens:
            break
        plans = []
        if position is not None:
            plans = [_row_plan(row, position, 1) for row in range(last_row)]
            position += 1
        engine.release(last_row)
        if _run(engine, [*plans, _row_plan(last_row, 0, chunk)]) > max_seconds:
            break
        chosen = chunk
    return chosen


def _row_plan(row: int, start: int, num_tokens: int) -> RowPlan:
    sample = SampleSpec(_PARAMS, 0, start + num_tokens, _PROMPT_TOKENS)
    return RowPlan(row, start, (0,) * num_tokens, sample)


def _run(engine: Engine, plans: list[RowPlan]) -> float:
    """Execute a step; return its seconds."""
    began = time.perf_counter()
    engine.execute(StepPlan(tuple(plans)))
    return time.perf_counter() - began
