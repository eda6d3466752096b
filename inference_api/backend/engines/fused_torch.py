"""Compute the steps of the `fused` engine in plain torch, where its C++ library cannot be built or run.

Lives in the decode thread of PROCESS 2. Gives the same logits as the library, bit for bit: the same integers, and the
same operations of fp32 in the same order (fused_torch_rows.py, fused_torch_linear.py, fused_torch_attention.py). So a
row's bits depend on that row alone, on any number of threads. Knows tokens, logits and states; not plans, sampling or
sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from inference_api.backend.engines.code_digest import digest_of_code
from inference_api.backend.engines.fused_computation import StepTokens
from inference_api.backend.engines.fused_shape import Shape, read_shape
from inference_api.backend.engines.fused_torch_attention import KvCache
from inference_api.backend.engines.fused_torch_linear import Linear, make_linear
from inference_api.backend.engines.fused_torch_rows import gate, rms_norm, rotate
from inference_api.backend.engines.fused_weights import ImageTensors, rotary_tables
from inference_api.backend.engines.selection import TORCH_SELECTION, Selection
from inference_api.checkpoint import read_json
from inference_api.model_image import ModelImage

NUMERIC_PATH = "4-bit and int8 weights, int8 and int16 activations, int8 KV, torch"

TILE_TOKENS = 128
"""A longer step runs tile by tile through the whole model, which bounds the work space."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """The tokens of one row in a tile: those from `first` to before `end`, at neighbouring positions."""

    row: int
    first: int
    end: int


class TorchComputation:
    """Compute steps on the image's own weights, quantized when loaded; see `Computation`. Blocks for seconds."""

    def __init__(self, image: ModelImage, *, num_rows: int, context_tokens: int) -> None:
        self.numeric_path = NUMERIC_PATH
        code = digest_of_code("fused_torch*.py", "fused_levels.py", "fused_weights.py", "fused_shape.py")
        self.identity = f"{NUMERIC_PATH} code-{code}"
        shape = self._shape = read_shape(read_json(image.config_path))
        self.embedding_size = shape.hidden
        tensors = ImageTensors(image)
        self._layers = [_read_layer(tensors, shape, index) for index in range(len(shape.windows))]
        self._embedding = tensors.embedding(shape)
        self._head = make_linear(tensors.head(shape))
        self._final_norm = tensors.final_norm(shape)
        self._cosines, self._sines = rotary_tables(shape, context_tokens)
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.weight_bytes = self._embedding.nbytes + sum(linear.num_bytes for linear in (*linears, self._head))
        self._cache = KvCache(shape, num_rows, context_tokens)
        self.kv_bytes = self._cache.num_bytes
        self.selection: Selection = TORCH_SELECTION

    def run(self, tokens: StepTokens, logits: Tensor) -> Sequence[int]:
        """Compute tile by tile; see `Computation.run`."""
        return self._run(tokens, logits, self._head)

    def run_states(self, tokens: StepTokens, states: Tensor) -> Sequence[int]:
        """Compute tile by tile; see `Computation.run_states`."""
        return self._run(tokens, states, lambda normed: normed)

    def scrub(self, row: int, num_slots: int) -> None:
        """Zero a row's first slots; see `Computation.scrub`."""
        self._cache.scrub(row, num_slots)

    def _run(self, tokens: StepTokens, results: Tensor, head: Callable[[Tensor], Tensor]) -> Sequence[int]:
        """Fill `results` (outputs, any) with what `head` makes of the normed states; return what is finite."""
        for copy in tokens.copies:
            self._cache.copy(copy)
        finite: list[int] = []
        num_done = 0
        with torch.inference_mode():
            for first in range(0, len(tokens.token_ids), TILE_TOKENS):
                part = slice(first, first + TILE_TOKENS)
                outputs = [index - first for index in tokens.outputs if first <= index < first + TILE_TOKENS]
                hidden, is_finite = self._run_layers(
                    torch.tensor(tokens.token_ids[part]),
                    torch.tensor(tokens.positions[part]),
                    tokens.rows[part],
                    outputs,
                )
                finite += is_finite.tolist()
                if outputs:
                    results[num_done : num_done + len(outputs)] = head(self._norm(hidden, self._final_norm))
                    num_done += len(outputs)
        return finite

    def _run_layers(
        self, token_ids: Tensor, positions: Tensor, rows: Sequence[int], outputs: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states (outputs, hidden) after all layers, and for each token what is finite (tokens)."""
        stretches = _stretches(rows)
        hidden = self._embedding[token_ids]  # (tokens, hidden)
        is_finite = torch.empty(0)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm))  # (tokens, query, key and value heads)
            attended = self._attend(index, stretches, positions, qkv)
            if index + 1 == len(self._layers):
                # Of the last layer the other tokens need keys and values alone.
                is_finite = hidden.isfinite().all(dim=1)
                if not outputs:
                    return hidden[:0], is_finite
                hidden, attended = hidden[outputs], attended[outputs]
            hidden = hidden + layer.output(attended)
            gates, ups = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = hidden + layer.down(gate(gates, ups))
        is_finite[outputs] = hidden.isfinite().all(dim=1)
        return hidden, is_finite

    def _norm(self, values: Tensor, weights: Tensor) -> Tensor:
        return rms_norm(values, weights, self._shape.epsilon)

    def _attend(self, index: int, stretches: Sequence[_Stretch], positions: Tensor, qkv: Tensor) -> Tensor:
        """Store the keys and values of all tokens, then return what each sees (tokens, heads x head_dim)."""
        shape, layer = self._shape, self._layers[index]
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        keys, values = heads[:, shape.heads :].chunk(2, dim=1)
        queries = self._place(heads[:, : shape.heads], layer.query_norm, positions)
        keys = self._place(keys, layer.key_norm, positions)
        attended = torch.empty(len(qkv), shape.heads * shape.head_dim)
        for stretch in stretches:
            part = slice(stretch.first, stretch.end)
            slots = positions[part]
            new = slice(int(slots[0]), int(slots[-1]) + 1)
            self._cache.store(index, stretch.row, new, keys[part], values[part])
            attended[part] = self._cache.attend(index, stretch.row, queries[part], slots, layer.window)
        return attended

    def _place(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Norm heads (tokens, heads, head_dim) and rotate their halves by the angles of their positions."""
        if norm is not None:
            heads = self._norm(heads, norm)
        return rotate(heads, self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1))


def _read_layer(tensors: ImageTensors, shape: Shape, index: int) -> _Layer:
    source = tensors.layer(shape, index)
    return _Layer(
        qkv=make_linear(source.qkv),
        output=make_linear(source.output),
        gate_up=make_linear(source.gate_up),
        down=make_linear(source.down),
        attention_norm=source.attention_norm,
        mlp_norm=source.mlp_norm,
        query_norm=source.query_norm,
        key_norm=source.key_norm,
        window=shape.windows[index],
    )


def _stretches(rows: Sequence[int]) -> list[_Stretch]:
    """Return the runs of equal numbers."""
    borders = [0, *(index for index in range(1, len(rows)) if rows[index] != rows[index - 1]), len(rows)]
    return [_Stretch(rows[first], first, end) for first, end in pairwise(borders)]
