"""Read the weights of a Llama-shaped model from its image, for the `fused` engine; decode thread of PROCESS 2, at load.

Names the tensors of a layer and puts together those that take the same inputs; makes the tables of rotary angles. Knows
no layout, no quantization and no plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from inference_api.backend.engines.fused_shape import EMBEDDING, Shape
from inference_api.checkpoint import weight_files
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage


@dataclasses.dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear layer in fp32, or several that take the same inputs, one after the other."""

    weight: Tensor
    """(outputs, inputs)"""
    bias: Tensor | None
    """(outputs)"""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer of the model needs, in fp32."""

    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


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


class ImageTensors:
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

    def layer(self, shape: Shape, index: int) -> LayerWeights:
        """Return the weights of one layer. Raises ModelError as `get` does."""
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {"q_proj": query_width, "k_proj": kv_width, "v_proj": kv_width}
        return LayerWeights(
            qkv=self._linear(attention, qkv, shape.hidden),
            output=self._linear(attention, {"o_proj": shape.hidden}, query_width),
            gate_up=self._linear(mlp, dict.fromkeys(("gate_proj", "up_proj"), shape.intermediate), shape.hidden),
            down=self._linear(mlp, {"down_proj": shape.hidden}, shape.intermediate),
            attention_norm=self.get(f"model.layers.{index}.input_layernorm.weight", shape.hidden),
            mlp_norm=self.get(f"model.layers.{index}.post_attention_layernorm.weight", shape.hidden),
            query_norm=self.optional(f"{attention}.q_norm.weight", shape.head_dim),
            key_norm=self.optional(f"{attention}.k_norm.weight", shape.head_dim),
        )

    def embedding(self, shape: Shape) -> Tensor:
        """Return the embedding (vocab, hidden): mapped where its file holds fp32, else made anew."""
        return self.get(EMBEDDING, self._image.vocab_size, shape.hidden)

    def head(self, shape: Shape) -> LinearWeights:
        """Return the layer that makes logits; tied, it is the embedding."""
        name = EMBEDDING if shape.tied else "lm_head.weight"
        return LinearWeights(self.get(name, self._image.vocab_size, shape.hidden), None)

    def final_norm(self, shape: Shape) -> Tensor:
        """Return the norm before the head (hidden)."""
        return self.get("model.norm.weight", shape.hidden)

    def _linear(self, owner: str, widths: dict[str, int], inputs: int) -> LinearWeights:
        weights = [self.get(f"{owner}.{name}.weight", width, inputs) for name, width in widths.items()]
        biases = [self.optional(f"{owner}.{name}.bias", width) for name, width in widths.items()]
        return LinearWeights(torch.cat(weights) if len(weights) > 1 else weights[0], _joined(biases, weights))


def _joined(biases: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor | None:
    """Put biases after each other, zeros where a layer has none; None if no layer has one."""
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([torch.zeros(len(weight)) if bias is None else bias for bias, weight in pairs])
