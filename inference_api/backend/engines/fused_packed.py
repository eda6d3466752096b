"""Pack a model for the library of the `fused` engine: the structs that its step reads; at load in PROCESS 2.

Has the library quantize and pack every linear layer, or takes what an earlier start has packed, and maps the KV cache.
The packed bytes are the library's own business. Knows no plans and no sampling.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from inference_api.backend.engines.fused_library import Layer, Library, Linear, Model
from inference_api.backend.engines.fused_shape import Shape, read_shape
from inference_api.backend.engines.fused_weights import (
    ImageTensors,
    LayerWeights,
    LinearWeights,
    rotary_tables,
)
from inference_api.backend.engines.packed_weights import PackedKey, PackedWeights
from inference_api.checkpoint import FP32_BYTES, read_json
from inference_api.model_image import ModelImage

logger = logging.getLogger(__name__)

LINEARS = ("qkv", "output", "gate_up", "down")
HIDDEN_NORMS = ("attention_norm", "mlp_norm")
HEAD_NORMS = ("query_norm", "key_norm")
"""Not every family has them."""
NORMS = (*HIDDEN_NORMS, *HEAD_NORMS)

WEIGHT_BITS = (4, 8)
"""Of a linear layer's weights: four where they lose nothing."""
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def packed_weights(library: Library, image: ModelImage, folder: Path) -> PackedWeights:
    """Return the packed weights of `image`: those of the image itself or of `folder`, or new ones, kept in `folder`.

    Blocks for a read of them, or for seconds. Raises ModelError for what the engine does not compute.
    """
    key = PackedKey(image.digest, library.packing)
    packed = PackedWeights.open((image.path, folder), key)
    if packed is not None and not _is_whole(library, packed, image):
        logger.warning("the packed weights of %s do not fit its config.json, and are made again", image.name)
        packed = None
    if packed is None:
        packed = _pack(library, image)
        packed.save(folder, key)
    return packed


def _is_whole(library: Library, packed: PackedWeights, image: ModelImage) -> bool:
    """Tell whether every part that a step reads is there, in as many bytes as it reads."""
    shape = read_shape(read_json(image.config_path))
    layers = range(len(shape.windows))
    linears = {f"{index}.{name}": size for index in layers for name, size in _linear_sizes(shape).items()}
    linears["head"] = (image.vocab_size, shape.hidden)
    needed = {f"{index}.{name}": shape.hidden for index in layers for name in HIDDEN_NORMS} | {
        "final_norm": shape.hidden
    }
    optional = {f"{index}.{name}": shape.head_dim for index in layers for name in HEAD_NORMS}
    optional |= {f"{name}.bias": outputs for name, (outputs, _) in linears.items()}
    return (
        all(_has_weights(library, packed, name, *size) for name, size in linears.items())
        and all(packed.num_bytes_of(name) == FP32_BYTES * size for name, size in needed.items())
        and all(packed.num_bytes_of(name) in (None, FP32_BYTES * size) for name, size in optional.items())
    )


def _has_weights(library: Library, packed: PackedWeights, name: str, outputs: int, inputs: int) -> bool:
    found = {bits: packed.num_bytes_of(f"{name}.{bits}-bit weights") for bits in WEIGHT_BITS}
    sizes = {bits: library.functions.fused_packed_bytes(bits, outputs, inputs) for bits in WEIGHT_BITS}
    return any(found[bits] is not None for bits in WEIGHT_BITS) and all(
        found[bits] in (None, sizes[bits]) for bits in WEIGHT_BITS
    )


def _linear_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of each of a layer's LINEARS."""
    attention_width = shape.heads * shape.head_dim
    return {
        "qkv": (attention_width + 2 * shape.kv_heads * shape.head_dim, shape.hidden),
        "output": (shape.hidden, attention_width),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def _pack(library: Library, image: ModelImage) -> PackedWeights:
    shape = read_shape(read_json(image.config_path))
    parts = dict(_parts(library, ImageTensors(image), shape))
    packed = PackedWeights.reserve((name, part.nbytes) for name, part in parts.items())
    for name in list(parts):
        part = parts.pop(name)  # gone when copied, so that they are not all there twice
        ctypes.memmove(packed.address(name), part.data_ptr(), part.nbytes)
    return packed


def _parts(library: Library, tensors: ImageTensors, shape: Shape) -> Iterator[tuple[str, Tensor]]:
    for index in range(len(shape.windows)):
        layer = tensors.layer(shape, index)
        yield from _layer_parts(library, f"{index}.", layer)
    yield from _linear_parts(library, "head", tensors.head(shape))
    yield "final_norm", tensors.final_norm(shape)


def _layer_parts(library: Library, prefix: str, layer: LayerWeights) -> Iterator[tuple[str, Tensor]]:
    for name in LINEARS:
        yield from _linear_parts(library, f"{prefix}{name}", getattr(layer, name))
    for name in NORMS:
        if (norm := getattr(layer, name)) is not None:
            yield f"{prefix}{name}", norm


def _linear_parts(library: Library, name: str, linear: LinearWeights) -> Iterator[tuple[str, Tensor]]:
    outputs, inputs = linear.weight.shape
    bits = library.functions.fused_weight_bits(linear.weight.data_ptr(), outputs, inputs)
    packed = torch.empty(library.functions.fused_packed_bytes(bits, outputs, inputs), dtype=torch.uint8)
    library.functions.fused_pack(bits, linear.weight.data_ptr(), outputs, inputs, packed.data_ptr())
    yield f"{name}.{bits}-bit weights", packed
    if linear.bias is not None:
        yield f"{name}.bias", linear.bias


class PackedModel:
    """A model in the layout of the library, with everything that its pointers name."""

    def __init__(
        self,
        library: Library,
        image: ModelImage,
        packed: PackedWeights,
        *,
        num_rows: int,
        context_tokens: int,
        num_threads: int,
    ) -> None:
        shape = self.shape = read_shape(read_json(image.config_path))
        self._packed = packed
        embedding = ImageTensors(image).embedding(shape)
        cosines, sines = rotary_tables(shape, context_tokens)
        self._layers = (Layer * len(shape.windows))(*(self._layer(index) for index in range(len(shape.windows))))
        self._kept: list[object] = [embedding, cosines, sines]
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
            head=self._linear("head", image.vocab_size, shape.hidden),
            embedding=embedding.data_ptr(),
            final_norm=packed.address("final_norm"),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )
        self.weight_bytes = packed.num_bytes + embedding.nbytes + cosines.nbytes + sines.nbytes
        self.kv_bytes = self._allocate_kv(library)

    def _layer(self, index: int) -> Layer:
        return Layer(
            **{name: self._linear(f"{index}.{name}", *size) for name, size in _linear_sizes(self.shape).items()},
            **{name: self._packed.find(f"{index}.{name}") for name in NORMS},
            window=self.shape.windows[index],
        )

    def _linear(self, name: str, outputs: int, inputs: int) -> Linear:
        weights = {bits: self._packed.find(f"{name}.{bits}-bit weights") for bits in WEIGHT_BITS}
        bits = next(bits for bits in WEIGHT_BITS if weights[bits] is not None)
        bias = self._packed.find(f"{name}.bias")
        return Linear(weights=weights[bits], bias=bias, outputs=outputs, inputs=inputs, bits=bits)

    def _allocate_kv(self, library: Library) -> int:
        """Map the KV cache, whose pages take memory when they are first written; return its bytes."""
        num_bytes: int = library.functions.fused_cache_bytes(ctypes.byref(self.struct))
        cache = torch.frombuffer(mmap.mmap(-1, num_bytes, flags=_PRIVATE), dtype=torch.uint8)
        self._kept.append(cache)
        self.struct.cache = cache.data_ptr()
        return num_bytes
