"""Price the rules of sampling: steps of all rows with one of them, in turns with greedy steps of the same rows.

One process, the `fused` engine, every row filled with a text of its own, so that the distributions are a model's on
plain language. Every step computes the same position of every row anew: nothing drifts from the first turn to the
last. Knows engines and parameters; nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benches.figures import table
from benches.quality import text_windows
from benches.real_model import prepare_image
from benches.row_steps import GREEDY, execute, fill
from benches.service import BenchError
from inference_api.backend.engines import fused
from inference_api.backend.engines.base import Engine, PrefixCopy, RowPlan, SampleSpec
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage
from inference_api.sampling_params import SamplingParams

BASE = "greedy"


def _sampled(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **options: Any) -> SamplingParams:
    return SamplingParams(temperature, top_k, top_p, 0, **options)


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}
RULES = {
    BASE: GREEDY,
    "temperature": _sampled(),
    "top_k": _sampled(top_k=40),
    "top_p": _sampled(top_p=0.9),
    "top_k_and_top_p": _sampled(top_k=40, top_p=0.9),
    "min_p": _sampled(min_p=0.05),
    "typical_p": _sampled(typical_p=0.9),
    "penalties": _sampled(temperature=0.0, **PENALTIES),
    "dry": _sampled(temperature=0.0, dry_multiplier=0.8),
    "top_n_sigma": _sampled(top_n_sigma=1.0),
    "xtc": _sampled(xtc_probability=1.0),
    "top_k_and_xtc": _sampled(top_k=40, xtc_probability=1.0),
    "mirostat_1": _sampled(mirostat=1),
    "mirostat_2": _sampled(mirostat=2),
    "logprobs": _sampled(temperature=0.0, logprobs=5),
    "everything": _sampled(0.8, 40, 0.9, min_p=0.05, typical_p=0.9, logit_bias={0: 1.0}, logprobs=5, **PENALTIES),
}
"""What all rows of a step are drawn with; penalties and logprobs beside greedy draws, so that they stand alone."""

COLUMNS = ("rule", "median ms", "fastest ms", "over greedy", "of the fastest")


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: rows, positions that each holds, and turns."""

    num_rows: int
    context: int
    turns: int


SIZES = {"full": Size(32, 128, 60), "quick": Size(32, 128, 15), "tiny": Size(2, 16, 2)}


def run(size_name: str) -> dict[str, object]:
    """Time a step with each rule in turns, print the table, and return medians and fastest in milliseconds."""
    size, settings, image = SIZES[size_name], Settings.from_environ(), ModelImage.open(prepare_image())
    texts = [ids for ids in text_windows(image, size.context) if len(ids) == size.context][: size.num_rows]
    if len(texts) < size.num_rows:
        raise BenchError(f"the text has {len(texts)} windows of {size.context} ids, {size.num_rows} rows need one each")
    engine = fused.load(
        image,
        num_rows=size.num_rows,
        context_tokens=size.context,
        build_folder=settings.cache_path / ARTEFACTS_FOLDER,
        num_threads=settings.torch_threads,
    )
    for row, ids in enumerate(texts):
        fill(engine, row, ids)
    figures = _figures(_take_turns(engine, texts, size.turns))
    print(table(COLUMNS, [(rule, *found.values()) for rule, found in figures.items()]))
    facts = {"numeric_path": engine.info.device, "rows": size.num_rows, "context": size.context, "turns": size.turns}
    return {**facts, "step": figures}


def _take_turns(engine: Engine, texts: Sequence[Sequence[int]], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each rule's steps; every turn begins with another rule, and the first is not counted."""
    seconds: dict[str, list[float]] = {rule: [] for rule in RULES}
    order = list(RULES)
    for turn in range(turns + 1):
        for rule in order:
            taken = _step_seconds(engine, texts, RULES[rule], turn)
            if turn:
                seconds[rule].append(taken)
        order.append(order.pop(0))
        print(f"turn {turn} of {turns}", file=sys.stderr)
    return seconds


def _step_seconds(engine: Engine, texts: Sequence[Sequence[int]], params: SamplingParams, turn: int) -> float:
    """Time a step that computes the last position of every row once more and draws an id in each."""
    plans = []
    for row, ids in enumerate(texts):
        # Another choice draws another random number.
        spec = SampleSpec(params, turn * len(texts) + row, len(ids), len(ids) // 2, ids)
        last = len(ids) - 1
        plans.append(RowPlan(row, last, tuple(ids[last:]), spec, prefix=PrefixCopy(row, last)))
    began = time.perf_counter()
    execute(engine, plans)
    return time.perf_counter() - began


def _figures(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return each rule's median and fastest step in milliseconds, and what they are over those of greedy steps."""
    medians = {rule: statistics.median(taken) for rule, taken in seconds.items()}
    fastest = {rule: min(taken) for rule, taken in seconds.items()}
    return {
        rule: {
            "median_ms": round(1000 * medians[rule], 2),
            "fastest_ms": round(1000 * fastest[rule], 2),
            "over_greedy": round(medians[rule] / medians[BASE] - 1, 4),
            "fastest_over_greedy": round(fastest[rule] / fastest[BASE] - 1, 4),
        }
        for rule in seconds
    }
