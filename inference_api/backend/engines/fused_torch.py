"""Compute the steps of the `fused` engine in plain torch, where its C++ library cannot be built or run.

Lives in the decode thread of PROCESS 2. The same quantization as the library's; logits within 1e-3 of it. What it may
use is bound by its promise, that a row's bits depend on that row alone: every sum is one of integers that its type
holds exactly, in any order; all else is elementwise and of operations that IEEE 754 rounds correctly, so that no
blocking, vector length or number of threads can be seen. Knows tokens and logits; not plans, sampling or sequences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from inference_api.backend.engines.fused_computation import StepTokens
from inference_api.backend.engines.fused_shape import Shape, read_shape
from inference_api.backend.engines.fused_weights import (
    ImageTensors,
    LinearWeights,
    refuse_too_wide,
    rotary_tables,
)
from inference_api.checkpoint import read_json
from inference_api.model_image import ModelImage

NUMERIC_PATH = "int8 weights, int16 activations, fp16 KV, torch"

MAX_WEIGHT = 127
TILE_TOKENS = 128
"""A longer step runs tile by tile through the whole model, which bounds the work space."""

DIGIT = 256
MAX_INPUTS = 1024
"""fp32 holds a sum of so many products of a weight and half an activation: 1,024 x 127 x 128 < 2^24."""

SCORE_BITS = 20
"""fp64 holds a score: 2 x 20 bits, and heads of up to 2^13 numbers."""
NORM_BITS = 18
"""fp64 holds a sum of squares: 2 x 18 bits, and 2^17 numbers."""
BLEND_BITS = 16
"""fp64 holds a blend of values: 2 x 16 bits, and 2^21 positions."""
WEIGHT_BITS = 30
"""fp64 holds the sum of the weights of 2^23 positions."""

_TINIEST = 1e-30
_EXPONENT_BIAS = 1023
_FRACTION_BITS = 52
_LOWEST_EXPONENT = -700.0
_TAYLOR = tuple(1.0 / math.factorial(degree) for degree in range(9, -1, -1))
"""Of e^x: for |x| <= ln(2) / 2 what is left out is below 1e-11."""


class _Linear:
    """A linear layer of int8 weights, which are kept as fp32 for the matrix product of that type."""

    def __init__(self, source: LinearWeights) -> None:
        largest = source.weight.abs().amax(dim=1, keepdim=True)  # (outputs, 1)
        finite = largest.isfinite()
        scaled = source.weight * (torch.full_like(largest, MAX_WEIGHT) / largest)
        sound = finite & (largest > 0)
        self._weight = torch.where(sound, scaled.clamp(-MAX_WEIGHT, MAX_WEIGHT).round(), 0.0)  # (outputs, inputs)
        # A broken weight must make its output NaN, which ends the requests that see it, and not a wrong number.
        self._scales = torch.where(finite, largest / MAX_WEIGHT, torch.nan).squeeze(1)  # (outputs)
        self._bias = source.bias
        self._inputs = source.weight.shape[1]
        self._range = min((2**31 - 1) // (MAX_WEIGHT * self._inputs), 2**15 - 1)
        refuse_too_wide(self._inputs, self._range)
        tensors = (self._weight, self._scales, self._bias)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def __call__(self, values: Tensor) -> Tensor:
        """Return (tokens, outputs) of `values` (tokens, inputs), fp32."""
        integers, scales = self._quantized(values)  # (tokens, inputs), (tokens, 1)
        low = (integers + DIGIT / 2).remainder(DIGIT) - DIGIT / 2  # -128 to 127
        digits = torch.cat([low, (integers - low) / DIGIT])  # (2 x tokens, inputs)
        sums = torch.zeros(len(digits), len(self._weight), dtype=torch.float64)
        for first in range(0, self._inputs, MAX_INPUTS):
            part = slice(first, first + MAX_INPUTS)
            sums += functional.linear(digits[:, part], self._weight[:, part])
        low_sums, high_sums = sums.chunk(2)
        outputs = (low_sums + DIGIT * high_sums).float() * (scales * self._scales)
        return outputs if self._bias is None else outputs + self._bias

    def _quantized(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return integers, and the scale of each token that undoes it: NaN where a number is not finite."""
        largest = values.abs().amax(dim=1, keepdim=True)  # (tokens, 1)
        finite = largest.isfinite()
        limit = torch.full_like(largest, self._range)
        sound = finite & (largest >= _TINIEST)
        integers = torch.where(sound, (values * (limit / largest)).round(), 0.0)
        return integers, torch.where(finite, torch.where(sound, largest / limit, 0.0), torch.nan)


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Linear
    output: _Linear
    gate_up: _Linear
    down: _Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of one row in a tile: those from `first` to before `end`, at neighbouring positions."""

    row: int
    first: int
    end: int


class TorchComputation:
    """Compute steps on the image's own weights, quantized when loaded; see `Computation`. Blocks for seconds."""

    def __init__(self, image: ModelImage, *, num_rows: int, context_tokens: int) -> None:
        self.numeric_path = NUMERIC_PATH
        self.identity = NUMERIC_PATH
        shape = self._shape = read_shape(read_json(image.config_path))
        tensors = ImageTensors(image)
        self._layers = [_read_layer(tensors, shape, index) for index in range(len(shape.windows))]
        self._embedding = tensors.embedding(shape)
        self._head = _Linear(tensors.head(shape))
        self._final_norm = tensors.final_norm(shape)
        self._cosines, self._sines = rotary_tables(shape, context_tokens)
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.weight_bytes = self._embedding.nbytes + sum(linear.num_bytes for linear in (*linears, self._head))
        slots = (len(shape.windows), num_rows, shape.kv_heads, context_tokens, shape.head_dim)
        # Memory that nobody has written takes none.
        self._keys, self._values = (torch.empty(slots, dtype=torch.float16) for _ in range(2))
        self.kv_bytes = self._keys.nbytes + self._values.nbytes

    def run(self, tokens: StepTokens, logits: Tensor) -> Sequence[int]:
        """Compute tile by tile; see `Computation.run`."""
        finite: list[int] = []
        num_done = 0
        with torch.inference_mode():
            for first in range(0, len(tokens.token_ids), TILE_TOKENS):
                part = slice(first, first + TILE_TOKENS)
                hidden = self._run_layers(
                    torch.tensor(tokens.token_ids[part]), torch.tensor(tokens.positions[part]), tokens.rows[part]
                )  # (tokens, hidden)
                finite += hidden.isfinite().all(dim=1).tolist()
                outputs = [index - first for index in tokens.outputs if first <= index < first + TILE_TOKENS]
                if outputs:
                    drawn = self._norm(hidden[outputs], self._final_norm)
                    logits[num_done : num_done + len(outputs)] = self._head(drawn)
                    num_done += len(outputs)
        return finite

    def copy_prefix(self, source_row: int, row: int, num_tokens: int) -> None:
        """Copy the keys and values of a row's first positions to another row."""
        for cache in (self._keys, self._values):
            cache[:, row, :, :num_tokens] = cache[:, source_row, :, :num_tokens]

    def _run_layers(self, token_ids: Tensor, positions: Tensor, rows: Sequence[int]) -> Tensor:
        spans = _spans(rows)
        hidden = self._embedding[token_ids]  # (tokens, hidden)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._norm(hidden, layer.attention_norm))  # (tokens, query, key and value heads)
            hidden = hidden + layer.output(self._attend(index, spans, positions, qkv))
            gates, ups = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=1)
            hidden = hidden + layer.down(gates / (1 + _exponential(-gates.double()).float()) * ups)
        return hidden

    def _norm(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return `values` (…, width) over the root of their mean square, times `weights` (width)."""
        integers, scales = _integers(values.double(), NORM_BITS)
        squares = (integers * integers).sum(dim=-1, keepdim=True) * scales * scales
        factor = 1 / (squares / values.shape[-1] + self._shape.epsilon).sqrt()
        return values * factor.float() * weights

    def _attend(self, index: int, spans: Sequence[_Span], positions: Tensor, qkv: Tensor) -> Tensor:
        """Store the keys and values of all tokens, then return what each sees (tokens, heads x head_dim)."""
        shape, layer = self._shape, self._layers[index]
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        keys, values = heads[:, shape.heads :].chunk(2, dim=1)
        queries = self._place(heads[:, : shape.heads], layer.query_norm, positions)
        keys = self._place(keys, layer.key_norm, positions)
        attended = torch.empty(len(qkv), shape.heads * shape.head_dim)
        for span in spans:
            part = slice(span.first, span.end)
            slots = positions[part]
            new = slice(int(slots[0]), int(slots[-1]) + 1)
            self._keys[index, span.row, :, new] = keys[part].transpose(0, 1).half()
            self._values[index, span.row, :, new] = values[part].transpose(0, 1).half()
            first = max(0, int(slots[0]) - layer.window + 1) if layer.window else 0
            seen = slice(first, new.stop)
            seen_keys, seen_values = (cache[index, span.row, :, seen].double() for cache in (self._keys, self._values))
            hidden = _hidden_slots(slots, seen, layer.window)
            attended[part] = _blend(queries[part].double(), seen_keys, seen_values, hidden)
        return attended

    def _place(self, heads: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Norm heads (tokens, heads, head_dim) and rotate their halves by the angles of their positions."""
        if norm is not None:
            heads = self._norm(heads, norm)
        first, second = heads.chunk(2, dim=2)
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=2)


def _read_layer(tensors: ImageTensors, shape: Shape, index: int) -> _Layer:
    source = tensors.layer(shape, index)
    return _Layer(
        qkv=_Linear(source.qkv),
        output=_Linear(source.output),
        gate_up=_Linear(source.gate_up),
        down=_Linear(source.down),
        attention_norm=source.attention_norm,
        mlp_norm=source.mlp_norm,
        query_norm=source.query_norm,
        key_norm=source.key_norm,
        window=shape.windows[index],
    )


def _spans(rows: Sequence[int]) -> list[_Span]:
    """Return the runs of equal numbers."""
    borders = [0, *(index for index in range(1, len(rows)) if rows[index] != rows[index - 1]), len(rows)]
    return [_Span(rows[first], first, end) for first, end in pairwise(borders)]


def _hidden_slots(positions: Tensor, seen: slice, window: int) -> Tensor:
    """Return (positions, slots): which of the slots `seen` a query at each position does not see."""
    slots = torch.arange(seen.start, seen.stop)
    hidden = slots > positions.unsqueeze(1)
    return hidden | (slots <= positions.unsqueeze(1) - window) if window else hidden


def _blend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Return what each token sees (tokens, heads x head_dim), fp32.

    In fp64: `queries` (tokens, heads, head_dim), `keys` and `values` (KV heads, slots, head_dim); `hidden` (tokens,
    slots) is what a token does not see.
    """
    num_tokens, _, head_dim = queries.shape
    grouped = queries.view(num_tokens, len(keys), -1, head_dim).permute(1, 2, 0, 3)  # (KV heads, group, tokens, dim)
    queries, query_scales = _integers(grouped.flatten(1, 2), SCORE_BITS)
    keys, key_scales = _integers(keys, SCORE_BITS)
    values, value_scales = _integers(values, BLEND_BITS)
    scores = queries @ keys.mT * query_scales * key_scales.mT / math.sqrt(head_dim)  # (KV heads, group x tokens, slots)
    hidden = hidden.repeat(scores.shape[1] // num_tokens, 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = _exponential(scores - scores.amax(dim=2, keepdim=True)).masked_fill(hidden, 0.0)
    totals = (weights * 2**WEIGHT_BITS).round().sum(dim=2, keepdim=True) / 2**WEIGHT_BITS
    shares, share_scales = _integers((weights * value_scales.mT).masked_fill(hidden, 0.0), BLEND_BITS)
    blended: Tensor = (shares @ values * share_scales / totals).float()  # (KV heads, group x tokens, head_dim)
    return blended.view(len(keys), -1, num_tokens, head_dim).permute(2, 0, 1, 3).reshape(num_tokens, -1)


def _integers(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return integers of up to `bits` bits for each last dimension (…, n) of fp64, and the scale (…, 1) of each.

    Where a number is not finite the integers are 0 and the scale is NaN: it spoils what it scales, and nothing beside.
    """
    largest = values.abs().amax(dim=-1, keepdim=True)
    finite = largest.isfinite()
    scales = largest / 2**bits
    integers = torch.where(finite & (scales > 0), (values / scales).round(), 0.0)
    return integers, torch.where(finite, scales, torch.nan)


def _exponential(values: Tensor) -> Tensor:
    """Return e to the power of fp64 `values`, elementwise, of products and sums alone; torch's own has two kernels."""
    values = values.clamp(_LOWEST_EXPONENT, -_LOWEST_EXPONENT)
    powers = (values / math.log(2)).round()
    rest = values - powers * math.log(2)  # within half of ln 2
    result = torch.full_like(rest, _TAYLOR[0])
    for coefficient in _TAYLOR[1:]:
        result = result * rest + coefficient
    return result * ((powers.long() + _EXPONENT_BIAS) << _FRACTION_BITS).view(torch.float64)
