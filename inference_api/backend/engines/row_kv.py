"""Hold the KV cache of all user rows and attend to it, for the `transformers` engine in the decode thread of PROCESS 2.

Each layer has one keys and one values tensor (rows, kv_heads, context, head_dim), allocated once; a sequence owns one
row of it, position p in slot p. A forward writes its own tokens' slots and attends over views: nothing is copied or
re-stacked, and GQA heads are folded into queries instead of repeating KV. Knows no model, no plan and no sampling.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inference_api.backend.engines.segments import Segment, plan_segments


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """One attention call: the entries of the batch, the slots they read, and the bias added to their scores."""

    segment: Segment
    first_slot: int
    spread: Tensor | None
    """Offsets of the entries in the segment's rows, if rows that are not in the batch lie between them."""
    bias: Tensor | None


class RowBatch:
    """The rows of one forward: `rows` ascend, each computes `num_tokens` tokens from its own `starts` on.

    More than one token is allowed for a single row only. Biases are made once a forward and shared by all layers.
    """

    def __init__(self, rows: Sequence[int], starts: Sequence[int], num_tokens: int) -> None:
        if num_tokens != 1 and len(rows) != 1:
            raise ValueError(f"{len(rows)} rows of {num_tokens} tokens: a chunk is computed for one row at a time")
        self.rows = tuple(rows)
        self.starts = tuple(starts)
        self.num_tokens = num_tokens
        self.row_index = torch.tensor(self.rows)  # (batch,)
        self.positions = torch.tensor(self.starts).unsqueeze(1) + torch.arange(num_tokens)  # (batch, num_tokens)
        self._segments = plan_segments(self.rows, [start + num_tokens for start in self.starts])
        self._views: dict[tuple[tuple[int, int], int | None], list[View]] = {}

    def views(self, heads: tuple[int, int], window: int | None, alibi: Tensor | None, dtype: torch.dtype) -> list[View]:
        """Return a layer's attention calls. `heads`: KV heads, query heads to each; `alibi`: (heads, context)."""
        key = (heads, window)
        if key not in self._views:
            self._views[key] = [self._view(segment, heads, window, alibi, dtype) for segment in self._segments]
        return self._views[key]

    def _view(
        self, segment: Segment, heads: tuple[int, int], window: int | None, alibi: Tensor | None, dtype: torch.dtype
    ) -> View:
        entries = slice(segment.begin, segment.end)
        span = segment.last_row - segment.first_row + 1
        spread = None if span == segment.end - segment.begin else self.row_index[entries] - segment.first_row
        first_slot = 0 if window is None else max(0, min(self.starts[entries]) - window + 1)
        slots = torch.arange(first_slot, segment.length)  # (slots,)
        queries = self.positions[entries].unsqueeze(2)  # (entries, num_tokens, 1)
        hidden = slots > queries  # (entries, num_tokens, slots)
        if window is not None:
            hidden |= slots <= queries - window
        if alibi is None and spread is None and not bool(hidden.any()):
            return View(segment, first_slot, None, None)
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        if spread is not None:  # rows outside the batch see nothing; what comes out for them is dropped
            whole = torch.full((span, *bias.shape[1:]), -torch.inf, dtype=dtype)
            whole[spread] = bias
            bias = whole
        table = None if alibi is None else alibi[:, first_slot : segment.length].to(dtype)
        return View(segment, first_slot, spread, _folded(bias, heads, table))


def _folded(bias: Tensor, heads: tuple[int, int], alibi: Tensor | None) -> Tensor:
    """Fold a bias (span, num_tokens, slots) like the queries: (span, kv_heads or 1, group × num_tokens or 1, slots)."""
    num_kv_heads, group = heads
    span, num_tokens, num_slots = bias.shape
    if alibi is not None:
        per_head = bias.view(span, 1, 1, num_tokens, num_slots) + alibi.view(1, num_kv_heads, group, 1, num_slots)
        return per_head.view(span, num_kv_heads, group * num_tokens, num_slots)
    if num_tokens == 1 or group == 1:
        return bias.unsqueeze(1)
    return bias.repeat(1, group, 1).unsqueeze(1)


class RowKV:
    """The cache object that a transformers model is called with; `begin` sets the rows of the forward that follows."""

    def __init__(self, num_rows: int, context_tokens: int) -> None:
        self._num_rows = num_rows
        self.context_tokens = context_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._batch: RowBatch | None = None
        self.alibi: Tensor | None = None
        """Bias by distance (heads, context) of a model that has no positions; set while it is loaded."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' keys and values."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    @property
    def batch(self) -> RowBatch:
        """The rows of the running forward."""
        if self._batch is None:
            raise RuntimeError("no forward is running")
        return self._batch

    def begin(self, batch: RowBatch) -> None:
        """Set the rows of the forward that follows."""
        self._batch = batch

    def clear(self, row: int, num_slots: int | None = None) -> None:
        """Zero a row, or its first slots.

        After NaN may have got into it all of them: masked slots still take part in a product with 0.
        """
        with torch.inference_mode():  # the tensors were made in it
            for keys, values in self._layers.values():
                keys[row, :, :num_slots].zero_()
                values[row, :, :num_slots].zero_()

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Tell transformers that nothing is cached: rows differ, and positions are always given."""
        return 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object) -> tuple[Tensor, Tensor]:
        """Write the batch's new `keys`, `values` (batch, kv_heads, num_tokens, head_dim); return the whole layer's."""
        if layer_idx not in self._layers:
            self._layers[layer_idx] = (self._allocate(keys), self._allocate(values))
        batch = self.batch
        for cached, new in zip(self._layers[layer_idx], (keys, values), strict=True):
            if batch.num_tokens == 1:
                cached[batch.row_index, :, batch.positions[:, 0]] = new[:, :, 0]
            else:
                start = batch.starts[0]
                cached[batch.rows[0], :, start : start + batch.num_tokens] = new[0]
        return self._layers[layer_idx]

    def _allocate(self, like: Tensor) -> Tensor:
        """Return zeros (rows, kv_heads, context, head_dim) on pages that the kernel zeroes when they are first written.

        `torch.zeros` writes them now: 6 s of a start with the default model. That they are zero matters:
        slots behind a row's end are multiplied with 0, which leaves NaN as it is.
        """
        shape = (self._num_rows, like.shape[1], self.context_tokens, like.shape[3])
        pages = mmap.mmap(-1, math.prod(shape) * like.element_size())
        return torch.frombuffer(pages, dtype=like.dtype).view(shape)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None, window: int | None = None
    ) -> Tensor:
        """Attend with `query` (batch, heads, num_tokens, head_dim) over each row's own positions of a whole layer.

        Returns (batch, num_tokens, heads, head_dim). `scaling` None is head_dim ** -0.5.
        """
        num_entries, num_heads, num_tokens, head_dim = query.shape
        num_kv_heads = keys.shape[1]
        heads = (num_kv_heads, num_heads // num_kv_heads)
        folded = query.reshape(num_entries, num_kv_heads, -1, head_dim)  # (batch, kv_heads, group × num_tokens, dim)
        outputs = []
        for view in self.batch.views(heads, window, self.alibi, query.dtype):
            segment = view.segment
            part = folded[segment.begin : segment.end]
            rows = slice(segment.first_row, segment.last_row + 1)
            slots = slice(view.first_slot, segment.length)
            if view.spread is not None:
                part = torch.zeros(rows.stop - rows.start, *part.shape[1:], dtype=part.dtype).index_copy_(
                    0, view.spread, part
                )
            output = scaled_dot_product_attention(
                part, keys[rows, :, slots], values[rows, :, slots], attn_mask=view.bias, scale=scaling
            )
            outputs.append(output if view.spread is None else output[view.spread])
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.reshape(num_entries, num_heads, num_tokens, values.shape[3]).transpose(1, 2)
