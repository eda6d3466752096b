"""Check what scripts/doctor says of the model: its files, its images, the memory that it takes and its engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from inference_api import half_finished, prepare
from inference_api.backend.engine_choice import KV_BITS, WEIGHT_BITS
from inference_api.model_image import build_mock_image
from inference_api.model_source import find_source
from inference_api.model_variant import WHOLE_MODEL
from tests.scripts.doctoring import report


def test_a_missing_model_is_named(environ: dict[str, str], tmp_path: Path) -> None:
    status, found = report(environ, "--model", str(tmp_path / "nowhere"))
    assert status == 1 and "nowhere" in found["model"]["text"]


def test_a_model_that_is_only_half_there_names_the_missing_shard(environ: dict[str, str], tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    status, found = report(environ, "--model", str(checkpoint))
    assert status == 1 and "shard 'model-00002.safetensors' of its index is missing" in found["model"]["text"]


def test_cut_downloads_and_half_finished_images_are_told(environ: dict[str, str]) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    blobs = cache / "hf_cache" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "0123.incomplete").write_bytes(b"x")
    assert "1 cut downloads" in report(environ, "--model", "a/b")[1]["model"]["text"]
    (cache / "photos.partial-20240101").mkdir()
    half = half_finished.make(cache / "b-v1")
    finding = report(environ, "--mock")[1]["model"]
    assert (finding["text"], finding["advice"]) == (f"half-finished: {half.name}", "scripts/clean removes them")


def test_a_default_model_that_is_not_there_needs_room_for_it(environ: dict[str, str]) -> None:
    status, found = report({**environ, "INFERENCE_API_ROWS": "2", "INFERENCE_API_CONTEXT_TOKENS": "100"})
    assert found["model"]["level"] == "note" and "is not prepared" in found["model"]["text"]
    assert "701 MiB needed" in found["cache"]["text"]
    kv_bytes = 2 * 100 * 46_080
    needed_bytes = (prepare.DEFAULT_WEIGHT_BYTES * WEIGHT_BITS + kv_bytes * KV_BITS) // 32
    assert found["memory"]["text"].startswith(f"{needed_bytes / 2**20:.0f} MiB for weights")
    assert found["engine"] == {"check": "engine", "level": "ok", "text": "fused", "advice": ""}
    assert status == 0


def test_a_broken_image_is_a_warning_for_the_next_start_builds_it_again(environ: dict[str, str]) -> None:
    image = Path(environ["INFERENCE_API_CACHE_DIR"]) / find_source(None, print, WHOLE_MODEL, None).image_name
    image.mkdir(parents=True)
    found = report(environ)[1]
    assert (found["model"]["level"], found["model"]["advice"]) == ("warning", "the next start builds it again")
    assert "701 MiB needed" in found["cache"]["text"]


def test_a_broken_image_of_another_model_does_not_ask_for_the_default_models_room(
    environ: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    name = find_source(str(checkpoint), print, WHOLE_MODEL, None).image_name
    (Path(environ["INFERENCE_API_CACHE_DIR"]) / name).mkdir(parents=True)
    found = report(environ, "--model", str(checkpoint))[1]
    assert found["model"]["advice"] == "the next start builds it again"
    assert " 0 MiB needed" in found["cache"]["text"]


def test_a_saved_image_that_is_asked_for_and_not_there_is_a_fault(environ: dict[str, str]) -> None:
    status, found = report({**environ, "FALCON_40B_LOAD": "1"})
    place = Path(environ["INFERENCE_API_CACHE_DIR"]) / "tti_cache" / "smollm2-135m-instruct-v0"
    assert status == 1
    assert found["model"]["text"] == f"provided tti path does not exist: {place}, cannot load tti"


def test_a_saved_image_that_would_be_written_over_is_a_fault(environ: dict[str, str]) -> None:
    place = Path(environ["INFERENCE_API_CACHE_DIR"]) / "tti_cache" / "smollm2-135m-instruct-v0"
    place.mkdir(parents=True)
    status, found = report({**environ, "FALCON_40B_SAVE": "1"})
    assert status == 1
    assert f"provided tti path exists: {place}, cannot save over existing tti" in found["model"]["text"]


def test_memory_that_the_settings_need_and_nobody_has_names_them(environ: dict[str, str]) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    image = build_mock_image(cache).path.rename(cache / find_source(None, print, WHOLE_MODEL, None).image_name)
    manifest = json.loads((image / "manifest.json").read_text())
    manifest["facts"]["kv_bytes_per_token"] = 2**30
    (image / "manifest.json").write_text(json.dumps(manifest))
    status, found = report(environ)
    assert status == 1
    assert "INFERENCE_API_ROWS (32)" in found["memory"]["text"]


def test_the_engine_that_a_start_would_take_is_told_with_the_reason(environ: dict[str, str], tmp_path: Path) -> None:
    for name in ("bash", "dirname", "uname", "ldconfig"):
        if found := shutil.which(name):
            (tmp_path / name).symlink_to(found)
    finding = report({**environ, "PATH": str(tmp_path)})[1]["engine"]
    assert finding["level"] == "warning"
    assert finding["text"] == "fused, without its fast library: g++ is not installed"
    assert finding["advice"] == "on Debian and Ubuntu: apt-get install g++"
    finding = report({**environ, "INFERENCE_API_DTYPE": "fp32"})[1]["engine"]
    assert (finding["level"], finding["text"]) == ("ok", "transformers, because INFERENCE_API_DTYPE is fp32")


def test_a_model_that_the_fast_engine_does_not_compute_is_told_and_refused_where_that_is_named(
    environ: dict[str, str],
) -> None:
    cache = Path(environ["INFERENCE_API_CACHE_DIR"])
    image = build_mock_image(cache).path.rename(cache / find_source(None, print, WHOLE_MODEL, None).image_name)
    (image / "config.json").write_text('{"model_type": "gpt2"}')
    status, found = report(environ)
    text = "the engine fused does not compute the architecture 'gpt2' (it computes llama, mistral, qwen2, qwen3)"
    assert (status, found["engine"]["text"]) == (0, f"transformers, because {text}")
    status, found = report({**environ, "INFERENCE_API_ENGINE": "fused"})
    assert (status, found["engine"]["level"]) == (1, "fault")
    assert found["engine"]["text"].startswith(text)
