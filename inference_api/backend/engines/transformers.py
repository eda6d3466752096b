"""Run any causal language model of the transformers library on preallocated rows; the breadth and the reference engine.

Lives in the decode thread of PROCESS 2. A step makes one forward (rows, 1) of all rows that compute one token, and one
forward for each row that computes a chunk of its prompt; each row stands at its own position of the row cache. Knows
plans and logits; not tenants, sessions, stop rules or text. Not row independent: fp32 matrix products differ in their
last bits with the number of rows. Never runs code from a checkpoint and never reads pickle files.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch
import transformers
from torch import Tensor

from inference_api.backend.engines import attention_hooks
from inference_api.backend.engines.base import (
    EngineInfo,
    PoolSpec,
    RowPlan,
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
)
from inference_api.backend.engines.model_rows import BatchedRows, ModelRows, SoloRows
from inference_api.backend.engines.pooling import NON_FINITE_STATES, Pools, pooled_tokens
from inference_api.backend.engines.row_kv import RowBatch, RowKV
from inference_api.backend.engines.row_lengths import RowLengths
from inference_api.backend.engines.sampler import row_result, sample
from inference_api.backend.engines.scoring import score_row
from inference_api.checkpoint import one_line
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage
from inference_api.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

TESTED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "falcon", "gpt2", "gpt_neox", "gptj"})
"""Values of `model_type` whose greedy ids are compared with `generate` in the tests."""

_ATTENTION_NAME = "inference_api_rows"
_PLAIN_ATTENTION = "eager"
_BINDERS = {"falcon": attention_hooks.bind_falcon, "gptj": attention_hooks.bind_gptj}
_PROBE_TOKENS = 6
_PROBE_TOLERANCE = 1e-3
_UNSAMPLED = SampleSpec(SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0), choice=0, position=0)
"""Stands for a row that does not sample: the cheapest draw, whose id is dropped and whose logits are still checked."""


def load(
    image: ModelImage, *, num_rows: int, context_tokens: int, dtype: str = "float32", num_threads: int = 0
) -> TransformersEngine:
    """Load the weights of `image` and allocate the KV cache of `num_rows` × `context_tokens` slots; blocks for seconds.

    `num_threads` 0 leaves torch its own choice; the number is part of the digest, for it may change the last bits.

    Raises ModelError in one line for a model that cannot be loaded or does not compute the same in rows.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    if context_tokens > image.context_tokens:
        raise ModelError(f"a context of {context_tokens} tokens is over the model's {image.context_tokens}")
    model = _load_model(image, dtype)
    if model.config.model_type in TESTED_TYPES:
        rows: ModelRows = _batched(model, RowKV(num_rows, context_tokens))
        rows.forward(RowBatch([0], [0], 1), [[0]])  # allocates every layer's KV
    else:
        rows = _choose_untested(model, RowKV(num_rows, context_tokens), image)
    embedding_size = _embedding_size(rows)
    rows.clear(0)
    info = EngineInfo(
        engine="transformers",
        model=image.name,
        device="cpu",
        num_rows=num_rows,
        context_tokens=context_tokens,
        vocab_size=image.vocab_size,
        row_independent=False,
        digest=_digest(image, dtype, rows),
        weight_bytes=sum(tensor.nbytes for tensor in model.parameters()),
        kv_bytes=rows.num_bytes,
        embedding_size=embedding_size,
    )
    return TransformersEngine(rows, info)


def _load_model(image: ModelImage, dtype: str) -> Any:
    """Build the model from the image's own files; a tensor that is missing there is an error, not a random start."""
    transformers.logging.disable_progress_bar()  # the supervisor tells how far the start is
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            image.path,
            dtype=getattr(torch, dtype),
            attn_implementation=_PLAIN_ATTENTION,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"model {image.name} cannot be loaded: {one_line(error)}") from error
    for fault in ("missing_keys", "mismatched_keys"):
        if loading.get(fault):
            names = ", ".join(str(name) for name in sorted(loading[fault], key=str)[:3])
            raise ModelError(f"model {image.name} cannot be loaded: {fault.replace('_', ' ')}: {names}")
    if model.config.vocab_size != image.vocab_size:
        raise ModelError(f"model {image.name} has {model.config.vocab_size} ids, its image {image.vocab_size}")
    return model.eval()


def _batched(model: Any, row_kv: RowKV) -> BatchedRows:
    """Lead the model's attention to the row cache. Raises ModelError if it has no way in."""
    bind = _BINDERS.get(model.config.model_type)
    if bind is not None:
        bind(model, row_kv)
    elif not getattr(model, "_supports_attention_backend", False):
        raise ModelError(f"{type(model).__name__} has no exchangeable attention")
    transformers.AttentionInterface.register(_ATTENTION_NAME, attention_hooks.attend_rows)
    # An implementation without a mask function also keeps transformers from building masks.
    model.config._attn_implementation = _ATTENTION_NAME
    return BatchedRows(model, row_kv, pass_row_kv=bind is None)


def _choose_untested(model: Any, row_kv: RowKV, image: ModelImage) -> ModelRows:
    """Choose the way for a model off the tested list by comparing it with a plain forward. Raises ModelError."""
    token_ids = [index * 7919 % image.vocab_size for index in range(_PROBE_TOKENS)]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]  # (vocab,)
    logger.warning("model type %s is not on the tested list: its greedy ids are not proven", model.config.model_type)
    try:
        rows: ModelRows = _batched(model, row_kv)
        _probe(rows, token_ids, expected)
    except Exception as error:
        logger.warning("it runs one row at a time, which is slow: %s", one_line(error))
        model.config._attn_implementation = _PLAIN_ATTENTION
        rows = SoloRows(model)
        try:
            _probe(rows, token_ids, expected)
        except Exception as failure:
            raise ModelError(f"{type(model).__name__} cannot be served in rows: {one_line(failure)}") from failure
    return rows


def _probe(rows: ModelRows, token_ids: list[int], expected: Tensor) -> None:
    """Compute a prompt as a chunk and single tokens. Raises ModelError if its logits are not `expected` (vocab,)."""
    split = len(token_ids) - 2
    found = rows.forward(RowBatch([0], [0], split), [token_ids[:split]])  # (1, vocab)
    for position in range(split, len(token_ids)):
        found = rows.forward(RowBatch([0], [position], 1), [[token_ids[position]]])  # (1, vocab)
    gap = float((found[0] - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    if not gap < _PROBE_TOLERANCE:
        raise ModelError(f"the logits differ by {gap:.2g} from a plain forward's")


def _embedding_size(rows: ModelRows) -> int:
    """Return the width of the states that a model's head sees; 0 for a model that does not show them."""
    try:
        states = rows.states(RowBatch([0], [0], 1), [0])  # (1, hidden)
    except Exception as error:
        logger.warning("this model makes no embeddings: %s", one_line(error))
        return 0
    return 0 if states is None else states.shape[1]


def _digest(image: ModelImage, dtype: str, rows: ModelRows) -> str:
    path = f"transformers-{transformers.__version__} torch-{torch.__version__} {dtype} {type(rows).__name__}"
    path += f" threads-{torch.get_num_threads()}"
    return hashlib.sha256(f"{image.digest} {path}".encode()).hexdigest()


class TransformersEngine:
    """Execute plans with a transformers model; see `Engine` for the contract."""

    def __init__(self, rows: ModelRows, info: EngineInfo) -> None:
        self._rows = rows
        self._info = info
        self._lengths = RowLengths(info)
        self._pools = Pools(info.context_tokens)
        self._tainted: set[int] = set()

    @property
    def info(self) -> EngineInfo:
        """Describe this engine; constant."""
        return self._info

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward for all rows with one token and one for each longer chunk; draw where a row samples.

        A row whose ids, positions or logits are wrong gets a RowError and leaves the others alone. Raises ValueError
        for a plan that is no plan: rows out of range, out of order or twice.
        """
        sound, results = self._lengths.split(plan)
        plain = [row for row in sound if row.pool is None and row.score is None]
        single = [row for row in plain if len(row.token_ids) == 1]
        for group in ([single] if single else []) + [[row] for row in plain if len(row.token_ids) > 1]:
            results.update(self._run(group))
        for row in sound:
            if row.pool is not None or row.score is not None:
                results.update(self._read(row))
        return StepResult(tuple(results[row.row] for row in plan.rows if row.row in results))

    def release(self, row: int) -> None:
        """Forget a row; its KV slots may be used again from position 0."""
        self._lengths.forget(row)
        self._pools.forget(row)
        if row in self._tainted:
            self._tainted.discard(row)
            self._rows.clear(row)

    def scrub(self, row: int) -> None:
        """Zero the slots of a row that have been written."""
        self._rows.clear(row, self._lengths.take_written(row))

    def _run(self, group: list[RowPlan]) -> dict[int, RowResult]:
        """Run one forward over rows of one length and draw the ids of those that sample."""
        for row in group:
            if row.start == 0:
                self.release(row.row)
        batch = RowBatch([row.row for row in group], [row.start for row in group], len(group[0].token_ids))
        logits = self._rows.forward(batch, [list(row.token_ids) for row in group])  # (group, vocab)
        for row in group:
            self._lengths.advance(row)
        draws = sample(logits, [row.sample or _UNSAMPLED for row in group])
        results = {}
        for row, draw in zip(group, draws, strict=True):
            if draw.error is not None:
                self._tainted.add(row.row)
            if draw.error is not None or row.sample is not None:
                results[row.row] = row_result(row.row, [draw])
        return results

    def _read(self, row: RowPlan) -> dict[int, RowResult]:
        """Compute a row that is pooled or scored, by itself; return what is to be said of it."""
        if row.start == 0:
            self.release(row.row)
        result = None
        if row.pool is not None:
            result = self._pool(row, row.pool)
        elif row.score is not None:
            result = score_row(row, row.score, self._logits_of)
        self._lengths.advance(row)
        if result is None:
            return {}
        if result.error is not None:
            self._tainted.add(row.row)
        return {row.row: result}

    def _pool(self, row: RowPlan, pool: PoolSpec) -> RowResult | None:
        """Compute a row up to its last norm and add its states to what it has pooled; return what is to be said."""
        states = self._rows.states(RowBatch([row.row], [row.start], len(row.token_ids)), list(row.token_ids))
        if states is None:
            raise ValueError("a model that shows no states has a row that is pooled")
        if not bool(states.isfinite().all()):  # of every id: all that follows in the row sees them
            return RowResult(row.row, error=NON_FINITE_STATES)
        wanted = pooled_tokens(row, pool)
        return self._pools.add(row, pool, states[wanted.start : wanted.stop])

    def _logits_of(self, row: RowPlan) -> Tensor:
        """Compute a row; return the logits (tokens, vocab) at each of its ids."""
        return self._rows.all_logits(RowBatch([row.row], [row.start], len(row.token_ids)), list(row.token_ids))
