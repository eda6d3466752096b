"""Hold what is read from a config.json to what transformers reads from it, above all where it leaves keys out."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.backend.engines.fused_shape import FAMILIES, read_shape
from inference_api.errors import ModelError

pytestmark = pytest.mark.torch

GIVEN: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 64,
    "num_key_value_heads": 32,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "sliding_window": 48,
    "use_sliding_window": True,
    "max_window_layers": 7,
    "tie_word_embeddings": True,
    "rope_theta": 5000.0,
}


def is_as_transformers_reads_it(config: dict[str, Any]) -> bool:
    from transformers import AutoConfig

    expected = AutoConfig.for_model(**config)
    shape = read_shape(config)
    window = getattr(expected, "sliding_window", None) or 0
    kinds = getattr(expected, "layer_types", None) or ["sliding_attention"] * expected.num_hidden_layers
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
    return (
        (shape.hidden, shape.intermediate) == (expected.hidden_size, expected.intermediate_size)
        and (shape.heads, shape.kv_heads) == (expected.num_attention_heads, expected.num_key_value_heads)
        and shape.head_dim == head_dim
        and shape.epsilon == expected.rms_norm_eps
        and shape.tied == expected.tie_word_embeddings
        and shape.rope["rope_theta"] == expected.rope_parameters["rope_theta"]
        and shape.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    )


def given_for(family: str) -> dict[str, Any]:
    windows = ("sliding_window", "use_sliding_window", "max_window_layers")
    left_out = {"llama": windows, "mistral": windows[1:]}.get(family, ())
    if family == "qwen2":
        left_out = ("head_dim",)
    return {"model_type": family, **{key: value for key, value in GIVEN.items() if key not in left_out}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers(family: str) -> None:
    given = given_for(family)
    assert is_as_transformers_reads_it(given)
    assert is_as_transformers_reads_it({"model_type": family})
    for key in given:
        if key != "model_type":
            assert is_as_transformers_reads_it({name: value for name, value in given.items() if name != key}), key


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_layers_without_a_number_are_those_of_transformers(family: str) -> None:
    assert is_as_transformers_reads_it({"model_type": family, "use_sliding_window": True})
    assert is_as_transformers_reads_it({"model_type": family, "use_sliding_window": True, "sliding_window": None})


def test_no_window_and_no_number_of_kv_heads_are_as_in_transformers() -> None:
    assert is_as_transformers_reads_it({**given_for("mistral"), "sliding_window": None})
    assert is_as_transformers_reads_it({**given_for("qwen3"), "num_key_value_heads": None})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers 'many'"),
        ({"rms_norm_eps": None}, "rms_norm_eps None"),
        ({"num_key_value_heads": 5}, "64 query heads, which are no multiple of 5 KV heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor None"),
        ({"layer_types": ["full_attention"] * 3}, "30 layers, of which layer_types names 3"),
    ],
)
def test_a_number_that_none_can_compute_with_is_refused_by_its_name(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape({**given_for("qwen3"), **config})
    assert str(caught.value) == f"the engine fused does not compute {text}; set INFERENCE_API_ENGINE=transformers"
