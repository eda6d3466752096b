"""Say which models the `fused` engine computes, and read their shape from a config.json.

Runs in PROCESS 2 while an engine is chosen and loaded, and in scripts/doctor. Refuses by name what the engine does not
compute. Pure: knows neither torch nor files nor weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from inference_api.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that the engine computes."""

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
    _require(config.get("hidden_act", "silu") == "silu", f"the activation {config.get('hidden_act')!r}")
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    for name, width in (
        ("hidden_size", config["hidden_size"]),
        ("intermediate_size", config["intermediate_size"]),
        ("head_dim", head_dim),
    ):
        _require(width % LANES == 0, f"{name} {width}, which is no multiple of {LANES}")
    _require(head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim}, which is over {MAX_HEAD_DIM}")
    return Shape(
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        windows=_windows(config),
        epsilon=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        rope=_rope(config),
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ModelError(f"the engine fused does not compute {what}; set INFERENCE_API_ENGINE=transformers")


def _windows(config: dict[str, Any]) -> tuple[int, ...]:
    """Return each layer's window; configs name sliding layers by kind, by number, or all of them (Mistral)."""
    num_layers: int = config["num_hidden_layers"]
    window: int = config.get("sliding_window") or 0
    if not window or (config["model_type"] != "mistral" and not config.get("use_sliding_window", False)):
        return (0,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = 0 if config["model_type"] == "mistral" else config.get("max_window_layers", 0)
        return tuple(window if index >= first else 0 for index in range(num_layers))
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    _require(not unknown, f"layers of {', '.join(sorted(unknown))}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:num_layers])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters under their present names, whichever the config uses."""
    old = config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **old, **(config.get("rope_parameters") or {})}
    rope.setdefault("rope_type", old.get("type", "default"))
    _require(rope["rope_type"] in ("default", "linear", "llama3"), f"rotary embeddings of type {rope['rope_type']!r}")
    factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    _require(factor == 1.0, f"rotary embeddings of a share of {factor} of the head")
    return rope
