"""Zero rows of the KV cache that the `fused` engine's C++ library reads and writes; decode thread of PROCESS 2.

Owns a view of the memory and knows the order of a row's parts there, as fused_native/attention.cpp has it. Not to be
called while the library runs. Apart from fused_packed.py, whose code is part of the packed weights' name.
"""

from __future__ import annotations

import ctypes
import itertools

import torch

from inference_api.backend.engines.fused_library import Model
from inference_api.backend.engines.fused_shape import LANES

_SCALE_BYTES = 4


class LibraryKv:
    """The KV cache of a library's model, which must outlive this object."""

    def __init__(self, model: Model, num_bytes: int) -> None:
        memory = (ctypes.c_uint8 * num_bytes).from_address(model.cache)
        cache = torch.frombuffer(memory, dtype=torch.uint8)
        self._runs = cache.view(model.num_layers, model.num_rows, model.kv_heads, -1)
        # One run: keys, values, the keys' scales, the values' scales; the slots of each part ascend in whole blocks.
        self._slot_bytes = (model.head_dim, model.head_dim, _SCALE_BYTES, _SCALE_BYTES)
        self._num_slots = self._runs.shape[-1] // sum(self._slot_bytes)

    def scrub(self, row: int, num_slots: int) -> None:
        """Zero at least the first slots of a row."""
        wanted = min(self._num_slots, -(-num_slots // LANES) * LANES)
        starts = itertools.accumulate((0, *self._slot_bytes))
        for start, size in zip(starts, self._slot_bytes, strict=False):
            first = start * self._num_slots
            self._runs[:, row, :, first : first + wanted * size].zero_()
