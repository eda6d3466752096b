"""Work out how fast the machine could serve a workload at best, from its own peaks and the model's sizes.

Two bounds that overlap: every multiplication of the linear layers at the peak of the multiply instruction, and every
byte of weights and cache a step at the speed of reading memory. Attention's arithmetic, norms and sampling are left
out, so that no program reaches it. Pure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from benches.peer_workloads import Workload

CACHE_BYTES = 1 + 4 / 64
"""A number of the cache is an int8, and 64 of them share a scale."""

LAYER_WEIGHT_BYTES, HEAD_WEIGHT_BYTES = 4 / 8 + 4 / 32, 1 + 4 / 32
"""Of a weight with its share of the group's scales, where the layers are held in four bits and the head in eight."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSizes:
    """Multiplications a token in the layers and in the head, and numbers that a token leaves in the cache."""

    layer_macs: int
    head_macs: int
    cache_numbers: int

    @classmethod
    def read(cls, config_path: Path) -> ModelSizes:
        """Read the sizes of a Llama-shaped model from its config."""
        config = json.loads(config_path.read_text())
        hidden, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or hidden // heads
        kv_size = (config.get("num_key_value_heads") or heads) * head_size
        attention = hidden * (2 * heads * head_size + 2 * kv_size)
        return cls(
            layer_macs=layers * (attention + 3 * hidden * config["intermediate_size"]),
            head_macs=hidden * config["vocab_size"],
            cache_numbers=layers * 2 * kv_size,
        )


def bound_tokens_per_second(workload: Workload, sizes: ModelSizes, peaks: Mapping[str, float]) -> float:
    """Return the output tokens a second that the engine's weights and cache allow a workload of fixed lengths."""
    rows, (prompt, _), (answer, _) = workload.num_users, workload.prompt, workload.answer
    num_computed = prompt + answer - 1
    multiplying = rows * num_computed * sizes.layer_macs / peaks["macs_per_second_4_bits"]
    multiplying += rows * answer * sizes.head_macs / peaks["macs_per_second_8_bits"]
    weight_bytes = answer * (sizes.layer_macs * LAYER_WEIGHT_BYTES + sizes.head_macs * HEAD_WEIGHT_BYTES)
    mean_context = prompt + answer / 2
    cache_bytes = rows * answer * mean_context * sizes.cache_numbers * CACHE_BYTES
    seconds = max(multiplying, (weight_bytes + cache_bytes) / peaks["read_bytes_per_second"])
    return rows * answer / seconds
