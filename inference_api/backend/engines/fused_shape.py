"""Say which models the `fused` engine computes, and read their shape from a config.json.

Runs in PROCESS 2 while an engine is chosen and loaded, and in scripts/doctor. Refuses by name what the engine does not
compute. Pure: knows neither torch nor files nor weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from inference_api.errors import ModelError

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "rope_theta": 10000.0,
}
_QWEN = {"intermediate_size": 22016, "num_key_value_heads": 32, "sliding_window": 4096}
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008},
    "mistral": {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
"""What a config.json means that leaves a key out: the defaults of transformers' config classes, release 5.23."""

FAMILIES = tuple(_FAMILY_DEFAULTS)
"""Values of `model_type` that the engine computes."""

_ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rotary embeddings that the engine computes, and the numbers that each needs beside its `rope_theta`."""

EMBEDDING = "model.embed_tokens.weight"
"""The tensor (vocab, hidden) that a token's hidden state begins with."""

LANES = 8
"""Widths that norms and attention run over are multiples of it."""

MAX_HEAD_DIM = 512
"""kMaxHeadDim of fused_native/attention.h."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What config.json says of a model, as far as the engine needs it."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """A layer each: positions that a query sees, its own included; 0 for all before it."""
    epsilon: float
    tied: bool
    rope: dict[str, Any]


def read_shape(config: dict[str, Any]) -> Shape:
    """Read a parsed config.json. Raises ModelError, which names what the engine does not compute."""
    family = config.get("model_type")
    _require(family in FAMILIES, f"the architecture {family!r} (it computes {', '.join(FAMILIES)})")
    config = {**_DEFAULTS, **_FAMILY_DEFAULTS[str(family)], **config}
    _require(config["hidden_act"] == "silu", f"the activation {config['hidden_act']!r}")
    hidden, intermediate = _count(config, "hidden_size"), _count(config, "intermediate_size")
    heads = _count(config, "num_attention_heads")
    kv_heads = heads if config["num_key_value_heads"] is None else _count(config, "num_key_value_heads")
    head_dim = hidden // heads if config["head_dim"] is None else _count(config, "head_dim")
    for name, width in (("hidden_size", hidden), ("intermediate_size", intermediate), ("head_dim", head_dim)):
        _require(width % LANES == 0, f"{name} {width}, which is no multiple of {LANES}")
    _require(head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim}, which is over {MAX_HEAD_DIM}")
    _require(heads % kv_heads == 0, f"{heads} query heads, which are no multiple of {kv_heads} KV heads")
    return Shape(
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=_windows(config),
        epsilon=_number(config, "rms_norm_eps"),
        tied=bool(config["tie_word_embeddings"]),
        rope=_rope(config),
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ModelError(f"the engine fused does not compute {what}; set INFERENCE_API_ENGINE=transformers")


def _count(config: dict[str, Any], key: str) -> int:
    value = config[key]
    _require(isinstance(value, int) and value > 0, f"{key} {value!r}")
    return int(value)


def _number(config: dict[str, Any], key: str) -> float:
    value: Any = config.get(key)
    _require(isinstance(value, int | float) and value > 0, f"{key} {value!r}")
    return float(value)


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    """Return each layer's window; configs name sliding layers by kind, by number, or all of them (Mistral)."""
    num_layers = _count(config, "num_hidden_layers")
    if config["sliding_window"] is None or not (config["model_type"] == "mistral" or config["use_sliding_window"]):
        return (0,) * num_layers
    window = _count(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if config["model_type"] == "mistral" else config["max_window_layers"]
        _require(isinstance(first, int), f"max_window_layers {first!r}")
        return tuple(window if index >= first else 0 for index in range(num_layers))
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    _require(not unknown, f"layers of {', '.join(sorted(unknown))}")
    _require(len(kinds) >= num_layers, f"{num_layers} layers, of which layer_types names {len(kinds)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters under their present names, whichever the config uses."""
    old = config.get("rope_scaling") or {}
    rope = {"rope_theta": config["rope_theta"], **old, **(config.get("rope_parameters") or {})}
    kind = rope.setdefault("rope_type", old.get("type", "default"))
    _require(kind in _ROPES, f"rotary embeddings of type {kind!r}")
    for key in ("rope_theta", *_ROPES[kind]):
        rope[key] = _number(rope, key)
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _require(factor == 1.0, f"rotary embeddings of a share of {factor} of the head")
    return rope
