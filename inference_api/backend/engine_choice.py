"""Choose the engine of a start from the settings, the model and the machine, and say why; once, before anything loads.

Runs in PROCESS 2, and in scripts/doctor, which only asks. The fast engine is taken where it computes the model, in its
C++ library or, where that cannot be built, in torch. Needs neither torch nor weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from inference_api.backend.engines.fused_library import find_obstacle, open_library
from inference_api.backend.engines.fused_shape import EMBEDDING, read_shape
from inference_api.checkpoint import FP32_BYTES, read_json, stored_type
from inference_api.config import Settings
from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.errors import ModelError
from inference_api.model_image import ModelImage, required_bytes

WEIGHT_BITS = 9
"""Of a weight in the library, where four bits lose something: an int8, and an fp32 scale for each 32."""

TORCH_WEIGHT_BITS = 36
"""Of a weight in torch, where it lies on 16 levels: fp32, and an fp64 scale and an fp32 lowest level for each 32.

That is 35; the rest is for biases, and for the unit of each output.
"""

KV_BITS = 10
"""Of a number in the cache of `fused`: an int8, and an fp32 scale for each head of 16 numbers or more."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and why it is not the fast one; `native` where it computes in its C++ library."""

    engine: str
    native: bool = False
    reason: str = ""

    def needed_bytes(self, image: ModelImage, num_rows: int, context_tokens: int) -> int:
        """Return the memory that this engine takes at most, after a look at the header of the image's weights.

        Raises ModelError where that is missing or broken.
        """
        if self.engine != "fused":
            return required_bytes(image, num_rows, context_tokens)
        weight_bits = WEIGHT_BITS if self.native else TORCH_WEIGHT_BITS
        needed = required_bytes(image, num_rows, context_tokens, weight_bits=weight_bits, kv_bits=KV_BITS)
        return needed + _unmapped_bytes(image)


def choose_engine(settings: Settings, image: ModelImage | None, obstacle_of: Callable[[Path], str]) -> EngineChoice:
    """Return the engine that a start with these settings takes; without an image, for a model that `fused` computes.

    `obstacle_of` says of the cache's folder of compiled artefacts why the library cannot be used, or ''. Raises
    ModelError if the engine `fused` is named and does not compute the model.
    """
    if settings.engine in ("mock", "transformers"):
        return EngineChoice(settings.engine)
    if settings.dtype == "fp32":
        return EngineChoice("transformers", reason="INFERENCE_API_DTYPE is fp32")
    try:
        if image is not None:
            read_shape(read_json(image.config_path))
    except ModelError as error:
        if settings.engine == "fused":
            raise
        return EngineChoice("transformers", reason=str(error).partition("; ")[0])
    obstacle = obstacle_of(settings.cache_path / ARTEFACTS_FOLDER)
    return EngineChoice("fused", native=not obstacle, reason=obstacle)


def _unmapped_bytes(image: ModelImage) -> int:
    """Return what the embedding takes beside the head: nothing where it is mapped from its file, as fp32 is."""
    if stored_type(image.path, EMBEDDING) == "f32":
        return 0
    return image.vocab_size * read_shape(read_json(image.config_path)).hidden * FP32_BYTES


def build_obstacle(folder: Path) -> str:
    """Say why the library cannot be used, after an attempt to build it where it is not there: ten seconds; else ''."""
    if obstacle := find_obstacle(folder):
        return obstacle
    try:
        open_library(folder)
    except ModelError as error:
        return str(error).partition("; ")[0]
    return ""
