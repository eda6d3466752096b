"""Own the development variants of a model: its first layers only, random weights, or both.

Used by `prepare`, which makes an image of its own for each variant, so that every engine serves it like any other
model. Pure: changes a parsed configuration, makes and reads no file. Knows neither transformers nor torch.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from inference_api.errors import ModelError

WEIGHT_SEED = 0
"""Random weights are the same at every start and on every machine with the same torch."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelVariant:
    """Say what differs from the whole model. `layers` 0 keeps all of them; the default is the model itself."""

    layers: int = 0
    no_weights: bool = False

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing differs."""
        return not self.layers and not self.no_weights

    @property
    def label(self) -> str:
        """Say it to people: `layers 2, random weights`; empty for the whole model."""
        parts = [f"layers {self.layers}"] if self.layers else []
        return ", ".join([*parts, "random weights"] if self.no_weights else parts)

    @property
    def suffix(self) -> str:
        """Tell the images of one model apart by their folders' names: `-layers-2-random`; empty for the whole model."""
        layers = f"-layers-{self.layers}" if self.layers else ""
        return f"{layers}-random" if self.no_weights else layers

    def cut(self, config: Any, label: str) -> Any:
        """Return a copy of a parsed transformers config with this variant's number of layers.

        Raises ModelError, naming the model by `label`, if it has fewer, or does not tell how many it has.
        """
        cut = copy.deepcopy(config)
        if not self.layers:
            return cut
        num_layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(num_layers, int):
            raise ModelError(f"model {label!r} has no num_hidden_layers in its config.json, so no layers can be cut")
        if self.layers > num_layers:
            raise ModelError(
                f"--layers {self.layers} (INFERENCE_API_LAYERS) is outside bounds, 1 <= layers <= {num_layers}: "
                f"model {label!r} has {num_layers} layers"
            )
        cut.num_hidden_layers = self.layers
        if getattr(cut, "layer_types", None):
            cut.layer_types = cut.layer_types[: self.layers]
        return cut


WHOLE_MODEL = ModelVariant()
