"""Check which engine a start takes, and why, for every kind of model, machine and setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from inference_api.backend import engine_choice, main
from inference_api.backend.engine_choice import EngineChoice, build_obstacle, choose_engine
from inference_api.backend.engines import fused_library
from inference_api.backend.engines.base import EngineInfo
from inference_api.backend.main import load_engine, ready_message
from inference_api.config import Settings
from inference_api.errors import ModelError, SettingError
from inference_api.model_image import ModelImage, build_mock_image

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
}
GPT2 = "the engine fused does not compute the architecture 'gpt2' (it computes llama, mistral, qwen2, qwen3)"


def no_obstacle(_folder: Path) -> str:
    return ""


@pytest.fixture
def image_of(tmp_path: Path):
    def build(**config: object) -> ModelImage:
        image = build_mock_image(tmp_path)
        image.config_path.write_text(json.dumps(config))
        return image

    return build


def save_embedding(image: ModelImage, dtype: type) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((2, 2), dtype)}, image.path / "model.safetensors")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, EngineChoice("fused", native=True)),
        ({"engine": "fused"}, EngineChoice("fused", native=True)),
        ({"engine": "transformers"}, EngineChoice("transformers")),
        ({"engine": "mock"}, EngineChoice("mock")),
        ({"dtype": "fp32"}, EngineChoice("transformers", reason="INFERENCE_API_DTYPE is fp32")),
    ],
)
def test_a_model_that_the_fast_engine_computes_gets_it_unless_the_settings_say_otherwise(
    given: dict[str, Any], expected: EngineChoice, image_of
) -> None:
    assert choose_engine(Settings(**given), image_of(**LLAMA), no_obstacle) == expected
    assert choose_engine(Settings(**given), None, no_obstacle) == expected


def test_a_config_that_leaves_out_what_has_a_default_gets_the_fast_engine_and_a_broken_one_the_other(image_of) -> None:
    assert choose_engine(Settings(), image_of(model_type="mistral"), no_obstacle) == EngineChoice("fused", native=True)
    broken = choose_engine(Settings(), image_of(model_type="mistral", num_attention_heads=None), no_obstacle)
    assert broken.engine == "transformers" and broken.reason.endswith("does not compute num_attention_heads None")


def test_another_architecture_gets_the_engine_that_runs_any_and_is_refused_where_the_fast_one_is_named(
    image_of,
) -> None:
    image = image_of(model_type="gpt2")
    assert choose_engine(Settings(), image, no_obstacle) == EngineChoice("transformers", reason=GPT2)
    with pytest.raises(ModelError, match="set INFERENCE_API_ENGINE=transformers"):
        choose_engine(Settings(engine="fused"), image, no_obstacle)


@pytest.mark.parametrize("engine", ["auto", "fused"])
def test_without_the_library_the_fast_engine_computes_in_torch(engine: str, image_of) -> None:
    choice = choose_engine(Settings(engine=engine), image_of(**LLAMA), lambda _: "g++ is not installed")
    assert choice == EngineChoice("fused", native=False, reason="g++ is not installed")


def test_the_exact_type_and_the_fast_engine_exclude_each_other() -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_DTYPE=fp32 is not what INFERENCE_API_ENGINE=fused computes"):
        Settings.from_environ({"INFERENCE_API_DTYPE": "fp32", "INFERENCE_API_ENGINE": "fused"})


def test_the_need_of_memory_is_the_chosen_engines(image_of) -> None:
    image = ModelImage(**{**vars(image_of(**LLAMA)), "weight_bytes": 3200, "kv_bytes_per_token": 8})
    choices = (EngineChoice("fused", native=True), EngineChoice("fused"), EngineChoice("transformers"))
    save_embedding(image, np.float32)
    needs = [choice.needed_bytes(image, 3, 100) for choice in choices]
    assert needs == [900 + 750, 3600 + 750, 3200 + 2400]
    save_embedding(image, np.float16)  # fp32 of it is made, and mapped from nowhere
    made = image.vocab_size * 64 * 4
    assert [choice.needed_bytes(image, 3, 100) for choice in choices] == [needs[0] + made, needs[1] + made, needs[2]]
    (image.path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"model\.safetensors is broken"):
        choices[0].needed_bytes(image, 3, 100)


def test_a_missing_compiler_and_a_lacking_processor_are_told_without_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused_library.find_obstacle(tmp_path, frozenset({"avx2"})) == "this processor lacks f16c, fma"
    monkeypatch.setattr(fused_library.shutil, "which", lambda name: None)
    assert build_obstacle(tmp_path) == "g++ is not installed"
    assert not list(tmp_path.iterdir())


def test_a_library_that_cannot_be_built_is_a_reason_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "broken.cpp").write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(fused_library, "SOURCES", sources)
    reason = build_obstacle(tmp_path / "cache")
    assert reason.startswith("g++ cannot compile the engine fused: ") and "nothing" in reason
    assert ";" not in reason and "\n" not in reason


def test_a_built_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "open_library", lambda folder: None)
    monkeypatch.setattr(fused_library, "is_built", lambda folder: True)
    monkeypatch.setattr(fused_library.shutil, "which", lambda name: None)
    assert build_obstacle(tmp_path) == ""


def test_the_card_and_info_say_why_the_engine_is_not_the_fastest(image_of) -> None:
    settings = Settings(engine="mock", rows=2)
    engine = load_engine(settings, image_of(**LLAMA), 64)
    info: EngineInfo = engine.info
    assert ready_message(engine, "").device == info.device
    assert ready_message(engine, "", "g++ is not installed").device == f"{info.device}, because g++ is not installed"


def test_the_refusal_of_a_slow_engine_says_why_it_was_taken_and_only_then() -> None:
    slow = EngineChoice("fused", reason="g++ is not installed")
    with pytest.raises(SettingError, match=r"^too slow; the engine computes in torch, because g\+\+ is not installed$"):
        refuse_beside(slow)
    with pytest.raises(SettingError, match=r"^too slow$"):
        refuse_beside(EngineChoice("fused", native=True))


def refuse_beside(choice: EngineChoice) -> None:
    with main._reason_beside(choice):
        raise SettingError("too slow")
