"""Call a transformers model for the rows of a step, in one of two ways; decode thread of PROCESS 2.

`BatchedRows` computes all rows in one forward on the preallocated row cache. `SoloRows` is the breadth behind it, for
architectures whose attention cannot be led there: a cache object of transformers' own and a forward for each row. The
model is given; nothing of transformers is imported. Knows no plans and no sampling.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_api.backend.engines.row_kv import RowBatch, RowKV
from inference_api.errors import ModelError


class ModelRows(Protocol):
    """What the engine asks of either way."""

    @property
    def num_bytes(self) -> int:
        """Bytes of KV cache that are allocated for good."""
        ...

    def forward(self, batch: RowBatch, token_ids: list[list[int]]) -> Tensor:
        """Compute the tokens of `batch`; return the logits (batch, vocab) at each row's last one."""
        ...

    def clear(self, row: int) -> None:
        """Drop what a row holds."""
        ...


class BatchedRows:
    """One forward for all rows of a batch, each at its own position of the row cache."""

    def __init__(self, model: Any, row_kv: RowKV, pass_row_kv: bool) -> None:
        self._model = model
        self._row_kv = row_kv
        # Attention functions are called by name and find the cache among their arguments; bound ones know it already.
        self._extra = {"row_kv": row_kv} if pass_row_kv else {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the row cache."""
        return self._row_kv.num_bytes

    def forward(self, batch: RowBatch, token_ids: list[list[int]]) -> Tensor:
        """Run one forward; return the logits (batch, vocab)."""
        self._row_kv.begin(batch)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(token_ids),  # (batch, num_tokens)
                position_ids=batch.positions,
                past_key_values=self._row_kv,
                use_cache=True,
                logits_to_keep=1,
                **self._extra,
            )
        logits: Tensor = output.logits[:, -1]  # (batch, vocab)
        return logits

    def clear(self, row: int) -> None:
        """Zero a row's slots."""
        self._row_kv.clear(row)


class SoloRows:
    """One forward for each row, on a cache object that the model makes itself. Right for any model, and slow."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[int, Any] = {}
        accepted = inspect.signature(model.forward).parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @property
    def num_bytes(self) -> int:
        """Nothing is allocated ahead."""
        return 0

    def forward(self, batch: RowBatch, token_ids: list[list[int]]) -> Tensor:
        """Run a forward for each row; return the logits (batch, vocab). Raises ModelError if no cache comes back."""
        logits = []
        for row, start, row_ids in zip(batch.rows, batch.starts, token_ids, strict=True):
            past = self._caches.get(row) if start else None
            with torch.inference_mode():
                output = self._model(
                    input_ids=torch.tensor([row_ids]), past_key_values=past, use_cache=True, **self._extra
                )
            self._caches[row] = getattr(output, "past_key_values", None)
            if self._caches[row] is None:
                raise ModelError(f"{type(self._model).__name__} keeps no cache between forwards")
            logits.append(output.logits[0, -1])  # (vocab,)
        return torch.stack(logits)

    def clear(self, row: int) -> None:
        """Drop a row's cache object."""
        self._caches.pop(row, None)
