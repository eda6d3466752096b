"""Call a transformers model for the rows of a step, in one of two ways; decode thread of PROCESS 2.

`BatchedRows` computes all rows in one forward on the preallocated row cache. `SoloRows` is the breadth behind it, for
architectures whose attention cannot be led there: a cache object of transformers' own and a forward for each row. The
model is given; nothing of transformers is imported. Knows no plans, no sampling and no pooling.
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

    def all_logits(self, batch: RowBatch, token_ids: list[int]) -> Tensor:
        """Compute the tokens of the one row of `batch`; return the logits (tokens, vocab) at each of them."""
        ...

    def states(self, batch: RowBatch, token_ids: list[int]) -> Tensor | None:
        """Compute the tokens of the one row of `batch`; return the states (tokens, hidden) that its head would see.

        None where the model does not tell.
        """
        ...

    def clear(self, row: int, num_slots: int | None = None) -> None:
        """Drop what a row holds, in its first slots alone if so many are given."""
        ...


class BatchedRows:
    """One forward for all rows of a batch, each at its own position of the row cache."""

    def __init__(self, model: Any, row_kv: RowKV, pass_row_kv: bool) -> None:
        self._model = model
        self._body = model_body(model)
        self._row_kv = row_kv
        # Attention functions are called by name and find the cache among their arguments; bound ones know it already.
        self._extra = {"row_kv": row_kv} if pass_row_kv else {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the row cache."""
        return self._row_kv.num_bytes

    def forward(self, batch: RowBatch, token_ids: list[list[int]]) -> Tensor:
        """Run one forward; return the logits (batch, vocab)."""
        logits: Tensor = self._run(self._model, batch, token_ids, logits_to_keep=1).logits[:, -1]  # (batch, vocab)
        return logits

    def all_logits(self, batch: RowBatch, token_ids: list[int]) -> Tensor:
        """Run one forward of one row; return the logits (tokens, vocab)."""
        logits: Tensor = self._run(self._model, batch, [token_ids]).logits[0]  # (tokens, vocab)
        return logits

    def states(self, batch: RowBatch, token_ids: list[int]) -> Tensor | None:
        """Run one forward of one row up to its head; return the states (tokens, hidden)."""
        return None if self._body is None else last_states(self._run(self._body, batch, [token_ids]))

    def _run(self, model: Any, batch: RowBatch, token_ids: list[list[int]], **options: int) -> Any:
        """Call the model, or its body, on the row cache; return its output."""
        self._row_kv.begin(batch)
        with torch.inference_mode():
            return model(
                input_ids=torch.tensor(token_ids),  # (batch, num_tokens)
                position_ids=batch.positions,
                past_key_values=self._row_kv,
                use_cache=True,
                **options,
                **self._extra,
            )

    def clear(self, row: int, num_slots: int | None = None) -> None:
        """Zero a row's slots."""
        self._row_kv.clear(row, num_slots)


class SoloRows:
    """One forward for each row, on a cache object that the model makes itself. Right for any model, and slow."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._body = model_body(model)
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
            output = self._run(self._model, row, start, row_ids, **self._extra)
            logits.append(output.logits[0, -1])  # (vocab,)
        return torch.stack(logits)

    def all_logits(self, batch: RowBatch, token_ids: list[int]) -> Tensor:
        """Run a forward of one row; return the logits (tokens, vocab)."""
        logits: Tensor = self._run(self._model, batch.rows[0], batch.starts[0], token_ids).logits[0]  # (tokens, vocab)
        return logits

    def states(self, batch: RowBatch, token_ids: list[int]) -> Tensor | None:
        """Run a forward of one row up to its head; return the states (tokens, hidden)."""
        if self._body is None:
            return None
        return last_states(self._run(self._body, batch.rows[0], batch.starts[0], token_ids))

    def _run(self, model: Any, row: int, start: int, token_ids: list[int], **options: int) -> Any:
        """Call the model, or its body, on a row's cache object; return its output."""
        past = self._caches.get(row) if start else None
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([token_ids]), past_key_values=past, use_cache=True, **options)
        self._caches[row] = getattr(output, "past_key_values", None)
        if self._caches[row] is None:
            raise ModelError(f"{type(self._model).__name__} keeps no cache between forwards")
        return output

    def clear(self, row: int, num_slots: int | None = None) -> None:  # noqa: ARG002 - the object goes whole
        """Drop a row's cache object."""
        self._caches.pop(row, None)


def model_body(model: Any) -> Any:
    """Return what a causal language model puts its head on; None for a model without such a part."""
    body = getattr(model, "base_model", None)
    return None if body is model else body


def last_states(output: Any) -> Tensor | None:
    """Return the states (tokens, hidden) of the one entry of a body's output, after its last norm; None without any."""
    states = getattr(output, "last_hidden_state", None)
    return states[0] if isinstance(states, Tensor) else None
