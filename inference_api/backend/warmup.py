"""Warm an engine up before it serves, and tune how many prompt tokens a step may carry.

Runs once in the decode thread. Knows the engine's contract only.
"""

from __future__ import annotations

import math
import time

from inference_api.backend.engines.base import Engine, PrefillBudget, RowPlan, SampleSpec, StepPlan
from inference_api.errors import SettingError
from inference_api.sampling_params import SamplingParams

CHUNK_CANDIDATES = (32, 64, 128, 256, 512)
"""Chunks that are tried, smallest first; the smallest is taken whatever it costs."""

MAX_STEP_RATIO = 2.0
"""A step with a chunk may take this many times a decode step: the stall that a new prompt causes its neighbours."""

MAX_IDLE_STEP_SECONDS = 0.5
"""A step that only prefills may take this long: heartbeats and aborts wait for it."""

CLOSE_CALL = 1.2
"""A step up to so many times too slow is timed again."""

NUM_DECODE_STEPS = 3
"""Decode steps that are timed; the fastest counts, because noise only ever adds."""

_PARAMS = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, seed=0)


def warm_up(engine: Engine, chunk_tokens: int = 0, watchdog_seconds: float = math.inf) -> PrefillBudget:
    """Run every kind of step; return the budget: `chunk_tokens` if it is set, the engine's own, or the measured one.

    Every row but the last decodes while the last one prefills; every step starts its rows anew, and all are released
    at the end. Raises SettingError if an honest step comes near the watchdog's time: it would kill a sound backend.
    """
    if engine.info.prefill_budget is not None:
        return PrefillBudget(chunk_tokens, chunk_tokens) if chunk_tokens else engine.info.prefill_budget
    decode_seconds = min(_step_seconds(engine, 0, decoding=True) for _ in range(NUM_DECODE_STEPS))
    if MAX_STEP_RATIO * decode_seconds > watchdog_seconds:
        raise SettingError(
            f"a step of {engine.info.num_rows} rows takes {decode_seconds:.1f} s and may take twice that, but "
            f"INFERENCE_API_WATCHDOG_SECONDS is {watchdog_seconds:g}: raise it, or lower INFERENCE_API_ROWS"
        )
    if chunk_tokens:
        _step_seconds(engine, min(chunk_tokens, engine.info.context_tokens - 1), decoding=True)
        return PrefillBudget(chunk_tokens, chunk_tokens)
    beside_tokens = _largest_chunk(engine, CHUNK_CANDIDATES[0], MAX_STEP_RATIO * decode_seconds, decoding=True)
    alone_tokens = _largest_chunk(engine, beside_tokens, MAX_IDLE_STEP_SECONDS, decoding=False)
    return PrefillBudget(beside_tokens, alone_tokens)


def _largest_chunk(engine: Engine, smallest: int, max_seconds: float, *, decoding: bool) -> int:
    """Try chunks from `smallest` on until a step is too slow; a close call is tried twice, for it may be noise."""
    chosen = smallest
    for chunk in CHUNK_CANDIDATES:
        if chunk < smallest:
            continue
        if chunk >= engine.info.context_tokens:
            break
        seconds = _step_seconds(engine, chunk, decoding=decoding)
        if max_seconds < seconds < CLOSE_CALL * max_seconds:
            seconds = _step_seconds(engine, chunk, decoding=decoding)
        if seconds > max_seconds:
            break
        chosen = chunk
    return chosen


def _step_seconds(engine: Engine, chunk: int, *, decoding: bool) -> float:
    """Time a step: one id in every row but the last if `decoding`, `chunk` ids in the last; release the rows."""
    last_row = engine.info.num_rows - 1
    plans = [_row_plan(row, 1) for row in range(last_row)] if decoding else []
    if chunk or not plans:
        plans.append(_row_plan(last_row, max(1, chunk)))
    began = time.perf_counter()
    engine.execute(StepPlan(tuple(plans)))
    seconds = time.perf_counter() - began
    for plan in plans:
        engine.release(plan.row)
    return seconds


def _row_plan(row: int, num_tokens: int) -> RowPlan:
    return RowPlan(row, 0, (0,) * num_tokens, SampleSpec(_PARAMS, 0, num_tokens, num_tokens))
