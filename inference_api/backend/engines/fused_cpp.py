"""Compute the steps of the `fused` engine in one call of its C++ library; decode thread of PROCESS 2.

Owns the library's engine: its threads, its work space, and the packed weights that it reads. The arithmetic is in
fused_native/. Knows tokens, logits and states; not plans, sampling or sequences.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference_api.backend.engines.fused_computation import StepTokens
from inference_api.backend.engines.fused_kv import LibraryKv
from inference_api.backend.engines.fused_library import NUMERIC_PATH, Copy, Library, Step, open_library
from inference_api.backend.engines.fused_packed import PackedModel, packed_weights
from inference_api.backend.engines.sampling_rules import BLOCK
from inference_api.backend.engines.selection import Head, Masked, Selection, Wish, all_allowed
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage


class CppComputation:
    """Run the library's step; see `Computation`. Building or opening it blocks for seconds; its threads end with it."""

    def __init__(
        self, image: ModelImage, num_rows: int, context_tokens: int, build_folder: Path, num_threads: int
    ) -> None:
        library = open_library(build_folder)
        sizes = {"num_rows": num_rows, "context_tokens": context_tokens, "num_threads": num_threads}
        model = PackedModel(library, image, packed_weights(library, image, build_folder), **sizes)
        self.numeric_path = NUMERIC_PATH
        self.identity = f"{NUMERIC_PATH} packing-{library.packing}"  # which names the library too
        self.embedding_size = model.struct.hidden
        self.weight_bytes = model.weight_bytes
        self.kv_bytes = model.kv_bytes
        self._kv = LibraryKv(model.struct, model.kv_bytes)
        self._functions = library.functions
        self._engine = library.functions.fused_open(ctypes.byref(model.struct))
        if not self._engine:
            raise ModelError("the engine fused cannot start its threads or gets no memory for its work space")
        self.selection: Selection = CppSelection(library.functions, self._engine)
        weakref.finalize(self, _close, library, self._engine, model)

    def run(self, tokens: StepTokens, logits: Tensor) -> Sequence[int]:
        """Make one call of the library, which releases the GIL; see `Computation.run`."""
        return self._call(tokens, logits=logits.data_ptr())

    def run_states(self, tokens: StepTokens, states: Tensor) -> Sequence[int]:
        """Make one call of the library; see `Computation.run_states`."""
        return self._call(tokens, states=states.data_ptr())

    def scrub(self, row: int, num_slots: int) -> None:
        """Zero a row's first slots; see `Computation.scrub`."""
        self._kv.scrub(row, num_slots)

    def _call(self, tokens: StepTokens, **outputs: int) -> Sequence[int]:
        """Call the library with the address of what it fills; return what is finite."""
        num_tokens = len(tokens.token_ids)
        finite = (ctypes.c_uint8 * num_tokens)()
        arrays: dict[str, ctypes.Array[Any]] = {
            "token_ids": _int32(tokens.token_ids),
            "rows": _int32(tokens.rows),
            "positions": _int32(tokens.positions),
            "outputs": _int32(tokens.outputs),
            "finite": finite,
            "copies": (Copy * len(tokens.copies))(*(Copy(*copy) for copy in tokens.copies)),
        }
        addresses = {name: ctypes.addressof(array) for name, array in arrays.items()}
        step = Step(
            num_tokens=num_tokens,
            num_outputs=len(tokens.outputs),
            num_copies=len(tokens.copies),
            **outputs,
            **addresses,
        )  # the arrays live until the call has returned
        self._functions.fused_step(self._engine, ctypes.byref(step))
        return list(finite)


class CppSelection:
    """Select the highest ids and heads with the library's threads; see `Selection`."""

    nucleus = 256

    def __init__(self, functions: ctypes.CDLL, engine: int) -> None:
        self._functions = functions
        self._engine = engine

    def highest_ids(self, logits: Tensor) -> list[int | None]:
        """Return the lowest id of each row's highest logit; see `Selection.highest_ids`."""
        num_rows, vocab = logits.shape
        ids = (ctypes.c_int32 * num_rows)()
        self._functions.fused_highest(self._engine, logits.data_ptr(), vocab, num_rows, ctypes.addressof(ids))
        return [None if token_id < 0 else token_id for token_id in ids]

    def masked(self, logits: Tensor, rows: Sequence[int], masks: Sequence[bytes | None]) -> Masked:
        """Copy rows under their masks; see `Selection.masked`."""
        vocab = logits.shape[1]
        copied = torch.empty(len(rows), vocab)
        ids = (ctypes.c_int32 * len(rows))()
        self._functions.fused_mask(
            self._engine,
            logits.data_ptr(),
            vocab,
            len(rows),
            _int32(rows),
            b"".join(all_allowed(vocab) if bits is None else bits for bits in masks),
            copied.data_ptr(),
            ctypes.addressof(ids),
        )
        return Masked(copied, [None if token_id < 0 else token_id for token_id in ids])

    def heads(self, logits: Tensor, wishes: Sequence[Wish]) -> list[Head]:
        """Return a head for each wish; see `Selection.heads`. Raises MemoryError."""
        if not wishes:
            return []
        vocab = logits.shape[1]
        count = min(max(wish.num_ids for wish in wishes), vocab)
        values = torch.empty(len(wishes), count)
        ids = torch.empty(len(wishes), count, dtype=torch.int32)
        weights = torch.empty(len(wishes), -(-vocab // BLOCK), dtype=torch.float64)
        sound = self._functions.fused_select(
            self._engine,
            logits.data_ptr(),
            vocab,
            len(wishes),
            _int32([wish.row for wish in wishes]),
            count,
            (ctypes.c_float * len(wishes))(*(wish.temperature for wish in wishes)),
            *(tensor.data_ptr() for tensor in (values, ids, weights)),
        )
        if not sound:
            raise MemoryError("the library gets no memory for a selection")
        rows = zip(values.tolist(), ids.tolist(), weights, wishes, strict=True)
        return [Head(high, high_ids, sums if wish.temperature else None) for high, high_ids, sums, wish in rows]


def _int32(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(numbers))(*numbers)


def _close(library: Library, engine: int, _model: PackedModel) -> None:
    """End the engine's threads; its model's memory may go after that."""
    library.functions.fused_close(engine)
