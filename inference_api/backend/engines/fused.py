"""Run Llama-shaped models on a CPU with quantized numbers, so that a row's bits depend on nothing but that row.

Lives in the decode thread of PROCESS 2. Linear layers and attention sum integers, exactly; what they add in fp32 they
add in one order: what a row produces is bit-identical whatever its neighbours, its row and the chunking of its prompt
are. Ids are drawn by the common sampler. Knows plans, logits and states; not tenants, sessions, stop rules or text. The
arithmetic is a `Computation`: a C++ library of our own, or plain torch, with the same bits, where that cannot be built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from inference_api.backend.engines.base import EngineInfo, PoolSpec, RowPlan, RowResult, StepPlan, StepResult
from inference_api.backend.engines.code_digest import digest_of_code
from inference_api.backend.engines.fused_computation import Computation, KvCopy, StepTokens
from inference_api.backend.engines.fused_cpp import CppComputation
from inference_api.backend.engines.fused_torch import TorchComputation
from inference_api.backend.engines.pooling import Pools, pooled_tokens
from inference_api.backend.engines.row_lengths import RowLengths
from inference_api.backend.engines.sampler import NON_FINITE, accepted, drafted_specs, row_result, sample
from inference_api.backend.engines.scoring import score_row
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

MAX_DRAFT_TOKENS = 16
"""Drafts a row and step: as many as the setting allows."""

DRAWING = (
    *("sampler.py", "sampling_rules.py", "logit_rules.py", "selection.py", "fused_cpp.py", "philox.py"),
    *("repetition.py", "mirostat.py", "scoring.py", "pooling.py"),
)
"""The code that makes an answer of logits and states; what makes those, the computation's `identity` names."""


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

    Without `native` it computes in torch: slower, and with no need of a compiler or of AVX2. `num_threads` 0 takes what
    torch does; no bit depends on it. Raises ModelError in one line for a model, processor or system that does not do.
    """
    num_threads = num_threads or torch.get_num_threads()
    if context_tokens > image.context_tokens:
        raise ModelError(f"a context of {context_tokens} tokens is over the model's {image.context_tokens}")
    computation: Computation
    if native:
        computation = CppComputation(image, num_rows, context_tokens, build_folder, num_threads)
    else:
        torch.set_num_threads(num_threads)
        computation = TorchComputation(image, num_rows=num_rows, context_tokens=context_tokens)
    path = f"fused {computation.identity} drawing-{digest_of_code(*DRAWING)} torch-{torch.__version__}"
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
        copies_prefixes=True,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        embedding_size=computation.embedding_size,
    )
    return FusedEngine(computation, info)


def leave_processors_to_the_library() -> None:
    """Let torch compute in one thread from now on, in a process whose engine is the library alone.

    After each piece of work that torch shares out its other threads spin for milliseconds, on processors that the
    library's own threads need for the next step.
    """
    torch.set_num_threads(1)


class FusedEngine:
    """Execute plans on a computation; see `Engine` for the contract."""

    def __init__(self, computation: Computation, info: EngineInfo) -> None:
        self._computation = computation
        self._info = info
        self._lengths = RowLengths(info)
        self._pools = Pools(info.context_tokens)
        # Memory is taken as it is used, and few rows have drafts.
        self._logits = torch.empty(info.num_rows * (1 + info.max_draft_tokens), info.vocab_size)

    @property
    def computation(self) -> Computation:
        """What computes its steps; for measuring logits without plans."""
        return self._computation

    @property
    def info(self) -> EngineInfo:
        """Describe this engine; constant."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all rows of `plan`; draw where a row samples, and say what it scores or pools where it does that.

        Rows that only draw share one run of the computation, and so do those that are pooled. One that is scored is
        computed by itself, piece by piece: its logits are many, and no row's bits depend on its company.

        A row whose ids, positions or logits are wrong gets a RowError and leaves the others alone. Raises ValueError
        for a plan that is no plan: rows out of range, out of order or twice.
        """
        sound, results = self._lengths.split(plan)
        plain = [row for row in sound if row.pool is None and row.score is None]
        if plain:
            results.update(self._draw(plain))
        pooled = [(row, row.pool) for row in sound if row.pool is not None]
        if pooled:
            results.update(self._pool(pooled))
        for row in sound:
            if row.score is not None:
                results[row.row] = score_row(row, row.score, self._all_logits, self._computation.selection)
                self._lengths.advance(row)
        return StepResult(tuple(results[row.row] for row in plan.rows if row.row in results))

    def release(self, row: int) -> None:
        """Take note that a row's sequence has left it; what it holds may be the beginning of another's."""
        self._pools.forget(row)

    def scrub(self, row: int) -> None:
        """Zero the slots of a row that have been written."""
        self._computation.scrub(row, self._lengths.take_written(row))
        self._lengths.forget(row)

    def _draw(self, rows: Sequence[RowPlan]) -> dict[int, RowResult]:
        """Compute all tokens of `rows`, and the logits of those that draw; return what is to be said of them.

        What is drafted may be anything: whether it is finite shows in its own logits.
        """
        tokens, known = _lay_out(rows, [_drawing_tokens(row) for row in rows])
        logits = self._logits[: len(tokens.outputs)]  # (outputs, vocab)
        finite = self._computation.run(tokens, logits)
        specs = [spec for row in rows if row.sample for spec in drafted_specs(row.sample, row.draft_ids)]
        draws = iter(sample(logits, specs, self._computation.selection))
        results = {}
        for row, part in zip(rows, known, strict=True):
            drawn = list(islice(draws, 1 + len(row.draft_ids))) if row.sample else []
            standing = accepted(drawn, row.draft_ids)
            self._lengths.advance(row, max(0, len(standing) - 1))
            if not all(finite[part]):
                results[row.row] = RowResult(row.row, error=NON_FINITE)
            elif standing:
                results[row.row] = row_result(row.row, standing)
        return results

    def _pool(self, rows: Sequence[tuple[RowPlan, PoolSpec]]) -> dict[int, RowResult]:
        """Compute all tokens of `rows`, and the states of those that are pooled; return what is to be said of them."""
        wanted = [pooled_tokens(row, pool) for row, pool in rows]
        tokens, known = _lay_out([row for row, _ in rows], wanted)
        states = torch.empty(len(tokens.outputs), self._info.embedding_size)
        finite = self._computation.run_states(tokens, states)
        parts = torch.split(states, [len(indices) for indices in wanted])  # (tokens, hidden) each
        results = {}
        for (row, pool), part, own_states in zip(rows, known, parts, strict=True):
            self._lengths.advance(row)
            result = self._pools.add(row, pool, own_states)
            if not all(finite[part]):
                result = RowResult(row.row, error=NON_FINITE)
            if result is not None:
                results[row.row] = result
        return results

    def _all_logits(self, row: RowPlan) -> Tensor:
        """Compute a row; return the logits (tokens, vocab) at each of its ids."""
        logits = torch.empty(len(row.token_ids), self._info.vocab_size)
        tokens, _ = _lay_out([row], [range(len(row.token_ids))])
        self._computation.run(tokens, logits)
        return logits


def _drawing_tokens(row: RowPlan) -> range:
    """Return the indices of a row's ids and drafts whose logits it draws from."""
    last = len(row.token_ids) - 1
    return range(last, last + 1 + len(row.draft_ids)) if row.sample else range(0)


def _lay_out(rows: Sequence[RowPlan], wanted: Sequence[range]) -> tuple[StepTokens, list[slice]]:
    """Return a step's tokens, whose outputs are the `wanted` ones of each row, and where the rows' known ids are."""
    token_ids: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    outputs: list[int] = []
    known: list[slice] = []
    for row, indices in zip(rows, wanted, strict=True):
        first = len(token_ids)
        known.append(slice(first, first + len(row.token_ids)))
        token_ids += row.token_ids + row.draft_ids
        owners += [row.row] * (len(token_ids) - first)
        positions += range(row.start, row.start + len(token_ids) - first)
        outputs += (first + index for index in indices)
    copies = [
        KvCopy(row.prefix.source_row, row.row, row.prefix.num_tokens)
        for row in rows
        if row.prefix is not None and row.prefix.source_row != row.row
    ]
    return StepTokens(token_ids, owners, positions, outputs, copies), known
