"""Check how a development variant is named and what it cuts from a configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from inference_api.errors import ModelError
from inference_api.model_variant import WHOLE_MODEL, ModelVariant


@pytest.mark.parametrize(
    ("variant", "label", "suffix"),
    [
        (WHOLE_MODEL, "", ""),
        (ModelVariant(layers=2), "layers 2", "-layers-2"),
        (ModelVariant(no_weights=True), "random weights", "-random"),
        (ModelVariant(2, True), "layers 2, random weights", "-layers-2-random"),
    ],
)
def test_a_variant_says_what_differs(variant: ModelVariant, label: str, suffix: str) -> None:
    assert (variant.label, variant.suffix, variant.is_whole) == (label, suffix, not label)


def test_a_cut_changes_a_copy_and_everything_that_counts_layers() -> None:
    config = SimpleNamespace(num_hidden_layers=3, layer_types=["full", "sliding", "full"], hidden_size=8)
    cut = ModelVariant(layers=2).cut(config, "m")
    assert (cut.num_hidden_layers, cut.layer_types, cut.hidden_size) == (2, ["full", "sliding"], 8)
    assert (config.num_hidden_layers, config.layer_types) == (3, ["full", "sliding", "full"])
    assert ModelVariant(layers=3).cut(config, "m") == ModelVariant(no_weights=True).cut(config, "m") == config


def test_more_layers_than_there_are_name_value_and_bound() -> None:
    with pytest.raises(ModelError, match=r"--layers 4 .* is outside bounds, 1 <= layers <= 3: model 'm' has 3 layers"):
        ModelVariant(layers=4).cut(SimpleNamespace(num_hidden_layers=3), "m")


def test_a_model_that_does_not_tell_its_layers_cannot_be_cut_and_says_so_in_one_line() -> None:
    with pytest.raises(ModelError, match=r"^model 'm' has no num_hidden_layers in its config.json[^\n]*$"):
        ModelVariant(layers=2).cut(SimpleNamespace(hidden_size=8), "m")
    assert ModelVariant(no_weights=True).cut(SimpleNamespace(hidden_size=8), "m").hidden_size == 8
