"""Run Llama-shaped models on a CPU with int8 weights, so that a row's bits depend on nothing but that row.

Lives in the decode thread of PROCESS 2. Linear layers multiply int8 weights by int16 activations, exactly; attention
runs over a row's own positions: what a row produces is bit-identical whatever its neighbours, its row and the chunking
of its prompt are. Ids are drawn by the common sampler. Knows plans and logits; not tenants, sessions, stop rules or
text. The arithmetic is a `Computation`: a C++ library of our own, or plain torch where that cannot be built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from inference_api.backend.engines.base import EngineInfo, RowPlan, RowResult, StepPlan, StepResult
from inference_api.backend.engines.fused_computation import Computation, StepTokens
from inference_api.backend.engines.fused_cpp import CppComputation
from inference_api.backend.engines.fused_torch import TorchComputation
from inference_api.backend.engines.row_lengths import RowLengths
from inference_api.backend.engines.sampler import NON_FINITE, row_result, sample
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage


def load(
    image: ModelImage,
    *,
    num_rows: int,
    context_tokens: int,
    build_folder: Path,
    num_threads: int = 0,
    native: bool = True,
) -> FusedEngine:
    """Build or open the library, pack the weights of `image` and map the KV cache; blocks for seconds.

    Without `native` the steps are computed in torch: slower, and with no need of a compiler or of AVX2. `num_threads` 0
    takes as many as torch does; the number never changes a bit. Raises ModelError in one line for a model, a processor
    or a system that the engine cannot run on.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if context_tokens > image.context_tokens:
        raise ModelError(f"a context of {context_tokens} tokens is over the model's {image.context_tokens}")
    computation: Computation
    if native:
        threads = num_threads or torch.get_num_threads()
        computation = CppComputation(image, num_rows, context_tokens, build_folder, threads)
    else:
        computation = TorchComputation(image, num_rows=num_rows, context_tokens=context_tokens)
    path = f"fused {computation.identity} torch-{torch.__version__}"
    info = EngineInfo(
        engine="fused",
        model=image.name,
        device=f"cpu ({computation.numeric_path})",
        num_rows=num_rows,
        context_tokens=context_tokens,
        vocab_size=image.vocab_size,
        row_independent=True,
        digest=hashlib.sha256(f"{image.digest} {path}".encode()).hexdigest(),
        weight_bytes=computation.weight_bytes,
        kv_bytes=computation.kv_bytes,
    )
    return FusedEngine(computation, info)


class FusedEngine:
    """Execute plans on a computation; see `Engine` for the contract."""

    def __init__(self, computation: Computation, info: EngineInfo) -> None:
        self._computation = computation
        self._info = info
        self._lengths = RowLengths(info)
        self._logits = torch.empty(info.num_rows, info.vocab_size)

    @property
    def info(self) -> EngineInfo:
        """Describe this engine; constant."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all rows of `plan` in one step; draw where a row samples.

        A row whose ids, positions or logits are wrong gets a RowError and leaves the others alone. Raises ValueError
        for a plan that is no plan: rows out of range, out of order or twice.
        """
        sound, results = self._lengths.split(plan)
        if sound:
            finite = self._compute(sound)
            drawing = [row for row in sound if row.sample is not None]
            draws = sample(self._logits[: len(drawing)], [row.sample for row in drawing if row.sample])
            for row, draw in zip(drawing, draws, strict=True):
                results[row.row] = row_result(row.row, [draw])
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
        tokens = StepTokens(
            token_ids=[token_id for row in rows for token_id in row.token_ids],
            rows=[row.row for row in rows for _ in row.token_ids],
            positions=[row.start + index for row in rows for index in range(len(row.token_ids))],
            outputs=[end - 1 for row, end in zip(rows, ends, strict=True) if row.sample is not None],
        )
        finite = self._computation.run(tokens, self._logits[: len(tokens.outputs)])
        return [all(finite[start:end]) for start, end in zip(starts, ends, strict=True)]
