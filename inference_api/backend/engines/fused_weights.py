"""Read a Llama-shaped model from its image and pack it for the `fused` engine; decode thread of PROCESS 2, at load.

Turns config.json into a shape, refusing by name what the engine does not compute; quantizes and packs the linear
layers; makes the tables of rotary angles and the KV cache. Knows no plans and no sampling.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from inference_api.backend.engines.fused_library import Layer, Library, Linear, Model
from inference_api.checkpoint import read_json, weight_files
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` that the engine computes."""

LANES = 8
"""Widths that norms and attention run over are multiples of it."""

MIN_ACTIVATION_RANGE = 127
"""Activations of a layer must keep at least int8's resolution: that allows 133,152 inputs."""

_HALF_BYTES = 2


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


def rotary_tables(shape: Shape, context_tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (context, head_dim / 2), in fp32 throughout, as the models were trained."""
    exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    frequencies = 1.0 / (shape.rope["rope_theta"] ** exponents)  # (head_dim / 2,)
    if shape.rope["rope_type"] == "linear":
        frequencies = frequencies / shape.rope["factor"]
    elif shape.rope["rope_type"] == "llama3":
        frequencies = _llama3(frequencies, shape.rope)
    angles = torch.arange(context_tokens).float().unsqueeze(1) * frequencies  # (context, head_dim / 2)
    return angles.cos().contiguous(), angles.sin().contiguous()


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Slow the long waves down and blend between; source: `_compute_llama3_parameters` of transformers."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies
    return blended


class _Tensors:
    """The tensors of an image by name; fp32 ones are mapped, and read when they are first touched."""

    def __init__(self, image: ModelImage) -> None:
        self._image = image
        self._files: dict[str, Any] = {}
        for path in weight_files(image.path):
            if path.suffix == ".safetensors":
                self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(str(path), framework="pt")
        except Exception as error:
            text = " ".join(str(error).split())
            raise ModelError(f"model {self._image.name} cannot be loaded: {path.name}: {text}") from error
        self._files.update(dict.fromkeys(file.keys(), file))

    def get(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in fp32. Raises ModelError if it is missing or has another shape."""
        if name not in self._files:
            raise ModelError(f"model {self._image.name} cannot be loaded: missing keys: {name}")
        tensor: Tensor = self._files[name].get_tensor(name).float().contiguous()
        if tuple(tensor.shape) != shape:
            raise ModelError(f"model {self._image.name} cannot be loaded: {name} is {tuple(tensor.shape)}, not {shape}")
        return tensor

    def optional(self, name: str, *shape: int) -> Tensor | None:
        """Return a tensor, or None if there is none of that name."""
        return self.get(name, *shape) if name in self._files else None


class PackedModel:
    """A model in the layout of the library, with everything that its pointers name. Blocks for seconds when made."""

    def __init__(
        self, library: Library, image: ModelImage, *, num_rows: int, context_tokens: int, num_threads: int
    ) -> None:
        self.shape = read_shape(read_json(image.config_path))
        self.weight_bytes = 0
        self._functions = library.functions
        self._tensors = _Tensors(image)
        self._kept: list[object] = []
        shape = self.shape
        self._layers = (Layer * len(shape.windows))(*(self._layer(index) for index in range(len(shape.windows))))
        embedding = self._tensors.get("model.embed_tokens.weight", image.vocab_size, shape.hidden)
        head = embedding if shape.tied else self._tensors.get("lm_head.weight", image.vocab_size, shape.hidden)
        cosines, sines = rotary_tables(shape, context_tokens)
        self.struct = Model(
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocab=image.vocab_size,
            num_layers=len(shape.windows),
            num_rows=num_rows,
            context_tokens=context_tokens,
            num_threads=num_threads,
            epsilon=shape.epsilon,
            layers=ctypes.addressof(self._layers),
            head=self._pack([head], [None]),
            embedding=self._keep(embedding),
            final_norm=self._keep(self._tensors.get("model.norm.weight", shape.hidden)),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
        )
        self.kv_bytes = self._allocate_kv()

    def _layer(self, index: int) -> Layer:
        shape = self.shape
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        widths = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim)
        return Layer(
            qkv=self._linear(attention, ("q_proj", "k_proj", "v_proj"), widths, shape.hidden),
            output=self._linear(attention, ("o_proj",), (shape.hidden,), widths[0]),
            gate_up=self._linear(mlp, ("gate_proj", "up_proj"), (shape.intermediate,) * 2, shape.hidden),
            down=self._linear(mlp, ("down_proj",), (shape.hidden,), shape.intermediate),
            attention_norm=self._norm(f"model.layers.{index}.input_layernorm", shape.hidden),
            mlp_norm=self._norm(f"model.layers.{index}.post_attention_layernorm", shape.hidden),
            query_norm=self._norm(f"{attention}.q_norm", shape.head_dim, optional=True),
            key_norm=self._norm(f"{attention}.k_norm", shape.head_dim, optional=True),
            window=shape.windows[index],
        )

    def _norm(self, name: str, width: int, *, optional: bool = False) -> int | None:
        read = self._tensors.optional if optional else self._tensors.get
        tensor = read(f"{name}.weight", width)
        return None if tensor is None else self._keep(tensor)

    def _linear(self, owner: str, names: Sequence[str], widths: Sequence[int], inputs: int) -> Linear:
        """Pack layers that take the same inputs as one."""
        parts = list(zip(names, widths, strict=True))
        weights = [self._tensors.get(f"{owner}.{name}.weight", width, inputs) for name, width in parts]
        biases = [self._tensors.optional(f"{owner}.{name}.bias", width) for name, width in parts]
        return self._pack(weights, biases)

    def _pack(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Linear:
        weight = torch.cat(list(weights)) if len(weights) > 1 else weights[0]  # (outputs, inputs)
        outputs, inputs = weight.shape
        if self._functions.fused_activation_range(inputs) < MIN_ACTIVATION_RANGE:
            raise ModelError(
                f"a layer of {inputs} inputs is too wide for exact sums: set INFERENCE_API_ENGINE=transformers"
            )
        packed = torch.empty(self._functions.fused_packed_bytes(outputs, inputs), dtype=torch.int8)
        scales = torch.empty(outputs)
        self._functions.fused_pack(weight.data_ptr(), outputs, inputs, packed.data_ptr(), scales.data_ptr())
        bias = None
        if any(part is not None for part in biases):
            filled = [
                torch.zeros(len(rows)) if part is None else part for rows, part in zip(weights, biases, strict=True)
            ]
            bias = self._keep(torch.cat(filled))
        return Linear(weights=self._keep(packed), scales=self._keep(scales), bias=bias, outputs=outputs, inputs=inputs)

    def _keep(self, tensor: Tensor) -> int:
        """Hold a tensor as long as this model lives; return its address."""
        self._kept.append(tensor)
        self.weight_bytes += tensor.nbytes
        return tensor.data_ptr()

    def _allocate_kv(self) -> int:
        """Map the KV cache, whose pages take memory when they are first written; return its bytes."""
        num_bytes = self._functions.fused_cache_halves(ctypes.byref(self.struct)) * _HALF_BYTES
        for name in ("keys", "values"):
            cache = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.float16)
            self._kept.append(cache)
            setattr(self.struct, name, cache.data_ptr())
        return 2 * int(num_bytes)
