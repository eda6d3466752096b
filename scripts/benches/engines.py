"""Set the `fused` engine beside `transformers` in one process, step by step and in turns: no service, no scheduler.

Every row is filled with a prompt for real, so that attention reads what it would read; then steps of 1, 8 and 32 rows
are timed at a short and a long context, and the prefill of a prompt. The kernel of the linear layers is set beside what
its multiply instruction does at best on this processor. Knows engines and plans, nothing of HTTP.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics
import sys
import time

import torch

from benches.real_model import prepare_image
from benches.row_steps import FILL_TOKENS, GREEDY, execute, unlike_ids
from inference_api.backend.engines import fused, transformers
from inference_api.backend.engines.base import Engine, RowPlan, SampleSpec
from inference_api.backend.engines.fused_library import Library, Linear, open_library
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import ModelImage

NUM_ROWS = 32

KERNEL_SHAPE = (3072, 576)
"""Outputs and inputs of the default model's gate and up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: rows a step, contexts, timed steps, and the prompt whose prefill is timed."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    prompt_tokens: int


SIZES = {
    "full": Size(batches=(1, 8, 32), contexts=(64, 1024), steps=15, prompt_tokens=512),
    "quick": Size(batches=(1, 32), contexts=(64, 256), steps=7, prompt_tokens=256),
    "tiny": Size(batches=(1, 2), contexts=(8,), steps=2, prompt_tokens=16),
}


class Rows:
    """The rows of one engine, and how far each is computed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lengths = [0] * engine.info.num_rows

    def fill(self, num_tokens: int) -> None:
        """Compute every row up to `num_tokens`, one row a step."""
        for row, length in enumerate(self._lengths):
            for start in range(length, num_tokens, FILL_TOKENS):
                self._execute([row], min(FILL_TOKENS, num_tokens - start))

    def decode(self, num_rows: int) -> float:
        """Return the seconds of a step of one token in each of the first rows."""
        return self._execute(list(range(num_rows)), 1)

    def prefill(self, num_tokens: int) -> float:
        """Return the seconds of a prompt in one chunk, in a row that is released for it and after it."""
        self._release(NUM_ROWS - 1)
        seconds = self._execute([NUM_ROWS - 1], num_tokens)
        self._release(NUM_ROWS - 1)
        return seconds

    def _release(self, row: int) -> None:
        self._engine.release(row)
        self._lengths[row] = 0

    def _execute(self, rows: list[int], num_tokens: int) -> float:
        plans = []
        for row in rows:
            start = self._lengths[row]
            ids = unlike_ids(row, start, num_tokens)
            plans.append(RowPlan(row, start, ids, SampleSpec(GREEDY, 0, start + num_tokens)))
            self._lengths[row] += num_tokens
        began = time.perf_counter()
        execute(self._engine, plans)
        return time.perf_counter() - began


def run(size_name: str) -> dict[str, object]:
    """Time every kind of step on both engines in turns; return medians in milliseconds."""
    size = SIZES[size_name]
    settings = Settings.from_environ()
    image = ModelImage.open(prepare_image())
    build_folder = settings.cache_path / ARTEFACTS_FOLDER
    context_tokens = max(*size.contexts, size.prompt_tokens) + len(size.batches) * (size.steps + 1)
    context_tokens = min(context_tokens, image.context_tokens)
    threads = settings.torch_threads
    reference = transformers.load(image, num_rows=NUM_ROWS, context_tokens=context_tokens, num_threads=threads)
    fast = fused.load(
        image, num_rows=NUM_ROWS, context_tokens=context_tokens, build_folder=build_folder, num_threads=threads
    )
    engines: dict[str, Engine] = {"transformers": reference, "fused": fast}
    rows = {name: Rows(engine) for name, engine in engines.items()}
    figures: dict[str, object] = {"threads": torch.get_num_threads(), "numeric_path": fast.info.device}
    figures["prefill_tokens_per_second"] = _compare_prefill(rows, size)
    for context in size.contexts:
        for name, those in rows.items():
            print(f"filling the rows of {name} to {context}", file=sys.stderr)
            those.fill(context - 1)
        for num_rows in size.batches:
            figures[f"step_ms_{num_rows}_rows_context_{context}"] = _compare_steps(rows, num_rows, size.steps)
    figures["kernel"] = _kernel(open_library(build_folder))
    return figures


def _compare_prefill(rows: dict[str, Rows], size: Size) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(max(2, size.steps // 3)):
        for name, those in rows.items():
            taken = those.prefill(size.prompt_tokens)
            if turn:  # the first allocates
                seconds[name].append(taken)
    return {name: round(size.prompt_tokens / statistics.median(taken), 1) for name, taken in seconds.items()}


def _compare_steps(rows: dict[str, Rows], num_rows: int, steps: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(steps + 1):
        for name, those in rows.items():
            taken = those.decode(num_rows)
            if turn:
                seconds[name].append(taken)
    figures = {name: round(1000 * statistics.median(taken), 1) for name, taken in seconds.items()}
    print(f"{num_rows} rows: {figures}", file=sys.stderr)
    return figures


def _kernel(library: Library) -> dict[str, float]:
    """Return the best rates of one thread: the multiply instructions alone, and the kernels with them, in GMAC/s."""
    functions = library.functions
    outputs, inputs = KERNEL_SHAPE
    rates: dict[str, float] = {}
    for bits in (4, 8):
        rates[f"{bits}_bits_peak"] = max(functions.fused_peak_macs(bits, 1_200_000) for _ in range(100)) / 1e9
        weight = torch.randint(0, 16, (outputs, inputs)).float()
        packed = torch.empty(functions.fused_packed_bytes(bits, outputs, inputs), dtype=torch.uint8)
        functions.fused_pack(bits, weight.data_ptr(), outputs, inputs, packed.data_ptr())
        linear = Linear(packed.data_ptr(), None, outputs, inputs, bits)
        for num_rows in (1, 8, 32):
            activations, found = torch.randn(num_rows, inputs), torch.empty(num_rows, outputs)
            best = math.inf
            for _ in range(50):
                began = time.perf_counter()
                functions.fused_linear(ctypes.byref(linear), activations.data_ptr(), num_rows, found.data_ptr())
                best = min(best, time.perf_counter() - began)
            rates[f"{bits}_bits_{num_rows}_rows"] = num_rows * outputs * inputs / best / 1e9
    return {name: round(rate, 1) for name, rate in rates.items()}
