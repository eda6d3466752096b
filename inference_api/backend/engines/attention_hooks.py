"""Lead the attention of transformers models to the row cache; used once, while the `transformers` engine loads.

Most families call an attention function by name (`attend_rows`). Falcon and GPT-J compute attention inside their
modules: for them a forward of our own is bound to each module, with the same projections and the same rotary embedding.
Falcon then keeps its few KV heads instead of one copy a query head. Torch only: the modules are given, not imported.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from inference_api.backend.engines.row_kv import RowKV
from inference_api.errors import ModelError

_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "is_causal", "position_embeddings", "return_dict"}
)
"""Arguments that transformers hands to attention functions and that mean nothing to a causal one without dropout."""


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    row_kv: RowKV,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Serve as attention function of transformers: `key`, `value` are a whole layer's, as `RowKV.update` returned them.

    Raises ModelError for a feature that it does not have, such as soft-capped scores, rather than leave it out.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if unknown:
        raise ModelError(f"{type(module).__name__} needs {', '.join(unknown)} in attention, which is not supported")
    return row_kv.attend(query, key, value, scaling, sliding_window), None


def bind_falcon(model: Any, row_kv: RowKV) -> None:
    """Bind the row cache to a FalconForCausalLM, in its three shapes and with or without ALiBi."""
    for module in model.modules():
        if type(module).__name__ == "FalconAttention":
            module.forward = types.MethodType(_falcon_forward, module)
    if model.config.alibi:
        # The model would build its bias from a padding mask; the whole table is made once, and divided as it does.
        num_heads = model.config.num_attention_heads
        table = alibi_table(num_heads, row_kv.context_tokens)
        row_kv.alibi = table / (model.config.hidden_size // num_heads) ** 0.5
        model.transformer.use_alibi = False


def alibi_table(num_heads: int, num_positions: int) -> Tensor:
    """Return Falcon's ALiBi bias (heads, positions), rounded to bf16 as in transformers' `build_alibi_tensor`.

    Slopes: Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022, section 3, and its code for other head counts.
    """
    power = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is not above num_heads
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    table = torch.tensor(slopes).unsqueeze(1).bfloat16() * torch.arange(num_positions)
    return table.float()


def _falcon_forward(
    self: Any,
    hidden_states: Tensor,
    *_unused: object,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    layer_past: RowKV | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Stand in for FalconAttention.forward: KV heads are stored once, not broadcast to every query head."""
    row_kv = _required(layer_past)
    num_entries, num_tokens, _ = hidden_states.shape
    fused = self.query_key_value(hidden_states)  # (batch, tokens, kv_groups × (group + 2) × head_dim)
    grouped = fused.view(num_entries, num_tokens, self.num_kv_heads, -1, self.head_dim)
    query, key, value = grouped[..., :-2, :], grouped[..., -2, :], grouped[..., -1, :]
    query = query.flatten(2, 3).transpose(1, 2)  # (batch, heads, tokens, head_dim)
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # (batch, kv_heads, tokens, head_dim)
    if not self.config.alibi and position_embeddings is not None:
        cos, sin = (part.unsqueeze(1) for part in position_embeddings)
        query, key = query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin
    keys, values = row_kv.update(key, value, self.layer_idx)
    attended = row_kv.attend(query, keys, values, self.inv_norm_factor)
    return self.dense(attended.flatten(2)), None


def bind_gptj(model: Any, _row_kv: RowKV) -> None:
    """Bind the row cache to a GPTJForCausalLM."""
    for module in model.modules():
        if type(module).__name__ == "GPTJAttention":
            module.forward = types.MethodType(_gptj_forward, module)


def _gptj_forward(
    self: Any,
    hidden_states: Tensor,
    layer_past: RowKV | None = None,
    position_ids: Tensor | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Stand in for GPTJAttention.forward, which copies its whole position table for every row."""
    row_kv = _required(layer_past)
    heads = (*hidden_states.shape[:2], self.num_attention_heads, self.head_dim)
    query, key, value = (part(hidden_states).view(heads) for part in (self.q_proj, self.k_proj, self.v_proj))
    table = self.embed_positions[position_ids].to(query.dtype)  # (batch, tokens, rotary_dim)
    sin, cos = (part.repeat_interleave(2, dim=-1).unsqueeze(2) for part in table.chunk(2, dim=-1))
    rotary_dim = self.pos_embd_dim if self.rotary_dim is None else self.rotary_dim

    def rotated(part: Tensor) -> Tensor:
        turning, rest = part[..., :rotary_dim], part[..., rotary_dim:]
        return torch.cat([turning * cos + _rotate_pairs(turning) * sin, rest], dim=-1).transpose(1, 2)

    keys, values = row_kv.update(rotated(key), value.transpose(1, 2), self.layer_idx)
    attended = row_kv.attend(rotated(query), keys, values, self.head_dim**-0.5)
    return self.out_proj(attended.flatten(2)), None


def _rotate_half(part: Tensor) -> Tensor:
    first, second = part.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_pairs(part: Tensor) -> Tensor:
    return torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)


def _required(row_kv: RowKV | None) -> RowKV:
    if row_kv is None:
        raise RuntimeError("the model was called without its row cache")
    return row_kv
