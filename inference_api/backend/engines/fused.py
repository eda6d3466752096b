"""Run Llama-shaped models on a CPU, a whole step in one call of a C++ library of our own.

Lives in the decode thread of PROCESS 2. Linear layers multiply int8 weights by int16 activations, exactly; attention
runs over a row's own positions in a fixed order: what a row produces is bit-identical whatever its neighbours, its row
and the chunking of its prompt are. Ids are drawn by the common sampler. Knows plans and logits; not tenants, sessions,
stop rules or text. The arithmetic is in fused_native/, the weights in fused_weights.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from inference_api.backend.engines.base import EngineInfo, RowPlan, RowResult, StepPlan, StepResult
from inference_api.backend.engines.fused_library import Library, Step, open_library
from inference_api.backend.engines.fused_weights import PackedModel
from inference_api.backend.engines.row_lengths import RowLengths
from inference_api.backend.engines.sampler import NON_FINITE, sample
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

NUMERIC_PATH = "int8 weights, int16 activations, fp16 KV, AVX2"


def load(
    image: ModelImage, *, num_rows: int, context_tokens: int, build_folder: Path, num_threads: int = 0
) -> FusedEngine:
    """Build or open the library, pack the weights of `image` and map the KV cache; blocks for seconds.

    `num_threads` 0 takes as many as torch does; the number never changes a bit. Raises ModelError in one line for a
    model, a processor or a system that the engine cannot run on.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if context_tokens > image.context_tokens:
        raise ModelError(f"a context of {context_tokens} tokens is over the model's {image.context_tokens}")
    library = open_library(build_folder)
    model = PackedModel(
        library,
        image,
        num_rows=num_rows,
        context_tokens=context_tokens,
        num_threads=num_threads or torch.get_num_threads(),
    )
    path = f"fused {NUMERIC_PATH} library-{library.sha256} torch-{torch.__version__}"
    info = EngineInfo(
        engine="fused",
        model=image.name,
        device=f"cpu ({NUMERIC_PATH})",
        num_rows=num_rows,
        context_tokens=context_tokens,
        vocab_size=image.vocab_size,
        row_independent=True,
        digest=hashlib.sha256(f"{image.digest} {path}".encode()).hexdigest(),
        weight_bytes=model.weight_bytes,
        kv_bytes=model.kv_bytes,
    )
    return FusedEngine(library, model, info)


class FusedEngine:
    """Execute plans with the fused step; see `Engine` for the contract. Its threads end with it."""

    def __init__(self, library: Library, model: PackedModel, info: EngineInfo) -> None:
        self._functions = library.functions
        self._info = info
        self._lengths = RowLengths(info)
        self._logits = torch.empty(info.num_rows, info.vocab_size)
        self._engine = library.functions.fused_open(ctypes.byref(model.struct))
        if not self._engine:
            raise ModelError("the engine fused cannot start its threads or gets no memory for its work space")
        weakref.finalize(self, _close, library, self._engine, model)

    @property
    def info(self) -> EngineInfo:
        """Describe this engine; constant."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one call of the library for all rows of `plan`; draw where a row samples.

        A row whose ids, positions or logits are wrong gets a RowError and leaves the others alone. Raises ValueError
        for a plan that is no plan: rows out of range, out of order or twice.
        """
        sound, results = self._lengths.split(plan)
        if sound:
            finite = self._compute(sound)
            drawing = [row for row in sound if row.sample is not None]
            drawn, errors = sample(self._logits[: len(drawing)], [row.sample for row in drawing if row.sample])
            for row, token_id, error in zip(drawing, drawn, errors, strict=True):
                results[row.row] = RowResult(row.row, error=error) if error else RowResult(row.row, (token_id,))
            for row, is_finite in zip(sound, finite, strict=True):
                self._lengths.advance(row)
                if not is_finite:
                    results[row.row] = RowResult(row.row, error=NON_FINITE)
        return StepResult(tuple(results[row.row] for row in plan.rows if row.row in results))

    def release(self, row: int) -> None:
        """Forget a row; its KV slots may be used again from position 0."""
        self._lengths.forget(row)

    def _compute(self, rows: Sequence[RowPlan]) -> list[bool]:
        """Compute all tokens of `rows`, and the logits of those that sample; say of each row whether it is finite."""
        ends = list(accumulate(len(row.token_ids) for row in rows))
        starts = [end - len(row.token_ids) for row, end in zip(rows, ends, strict=True)]
        outputs = [end - 1 for row, end in zip(rows, ends, strict=True) if row.sample is not None]
        finite = (ctypes.c_uint8 * ends[-1])()
        arrays: dict[str, ctypes.Array[Any]] = {
            "token_ids": _int32([token_id for row in rows for token_id in row.token_ids]),
            "rows": _int32([row.row for row in rows for _ in row.token_ids]),
            "positions": _int32([row.start + index for row in rows for index in range(len(row.token_ids))]),
            "outputs": _int32(outputs),
            "finite": finite,
        }
        addresses = {name: ctypes.addressof(array) for name, array in arrays.items()}
        step = Step(
            num_tokens=ends[-1], num_outputs=len(outputs), logits=self._logits.data_ptr(), **addresses
        )  # the arrays live until the call has returned
        self._functions.fused_step(self._engine, ctypes.byref(step))
        return [all(finite[start:end]) for start, end in zip(starts, ends, strict=True)]


def _int32(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(numbers))(*numbers)


def _close(library: Library, engine: int, _model: PackedModel) -> None:
    """End the engine's threads; its model's memory may go after that."""
    library.functions.fused_close(engine)
