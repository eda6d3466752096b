"""Check what an image's entry point copies into a cache of one's own: what, when, once, and whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inference_api import built_in_images, half_finished
from inference_api.errors import ModelError
from tests.container_entry import ROOT, checkout_that_shows, entry, refusal
from tests.integration.service import SECRET


def _cache_environ(tmp_path: Path, cache: Path) -> dict[str, str]:
    built_in = tmp_path / "built-in"
    (built_in / "model-v1").mkdir(parents=True)
    (built_in / "model-v1" / "manifest.json").write_text("{}")
    checkout = checkout_that_shows(tmp_path)
    return {
        "CONTAINER_MODEL_IMAGES": str(built_in),
        "CONTAINER_CHECKOUT": checkout,
        "JWT_SECRET": SECRET,
        "MODEL_WEKA_DIR": str(built_in),
        "CACHE_ROOT": str(cache),
    }


def test_a_cache_of_ones_own_gets_the_images_model_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    assert entry(**environ).returncode == 0
    assert [path.relative_to(cache).as_posix() for path in sorted(cache.rglob("*"))] == [
        "model-v1",
        "model-v1/manifest.json",
    ]
    (cache / "model-v1" / "manifest.json").write_text("kept")
    assert entry(**environ).returncode == 0
    assert (cache / "model-v1" / "manifest.json").read_text() == "kept"


@pytest.mark.parametrize("engine", ["auto", "mock"])
@pytest.mark.parametrize("model", ["", "somebody/something"])
def test_a_cache_of_ones_own_gets_the_engines_library_for_any_model(tmp_path: Path, engine: str, model: str) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    artefacts = tmp_path / "built-in" / "tvm_cache"
    artefacts.mkdir()
    for name in ("fused-0-1.so", "packed-0-1-2.bin"):
        (artefacts / name).write_text(name)
    for _ in range(2):
        assert entry(**environ, INFERENCE_API_ENGINE=engine, INFERENCE_API_MODEL=model).returncode == 0
    expected = [] if engine == "mock" else ["fused-0-1.so", "packed-0-1-2.bin"] if not model else ["fused-0-1.so"]
    assert sorted(path.name for path in cache.glob("tvm_cache/*")) == expected


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ([], {"INFERENCE_API_MODEL": "somebody/something"}),
        ([], {"MOCK_MODEL": "1"}),
        ([], {"MOCK_MODEL": "True"}),
        ([], {"INFERENCE_API_ENGINE": "mock"}),
        ([], {"INFERENCE_API_LOAD_IMAGE": "1"}),
        ([], {"FALCON_40B_LOAD": "TRUE"}),
        (["--mock"], {}),
        (["--load-image"], {}),
        (["--model", "somebody/something"], {}),
        (["--model=somebody/something"], {}),
    ],
)
def test_a_cache_for_another_model_or_the_mock_gets_nothing(
    tmp_path: Path, options: list[str], other: dict[str, str]
) -> None:
    cache = tmp_path / "cache"
    assert entry(*options, **_cache_environ(tmp_path, cache), **other).returncode == 0
    assert not cache.exists()


def test_what_a_killed_first_start_left_is_swept_and_a_users_folder_is_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    cache.mkdir()
    left, mine = half_finished.make(cache / "model-v1"), cache / "model-v1.partial-20240101"
    (left / "model.safetensors").write_text("half of it")
    mine.mkdir()
    assert entry(**environ).returncode == 0
    assert sorted(path.name for path in cache.iterdir()) == ["model-v1", mine.name]
    assert [path.name for path in (cache / "model-v1").iterdir()] == ["manifest.json"]


def test_of_two_first_starts_at_once_one_waits_for_the_other(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environ = _cache_environ(tmp_path, cache)
    cache.mkdir()
    descriptor = os.open(cache, os.O_RDONLY)
    command = [sys.executable, "-m", "inference_api.built_in_images", environ["CONTAINER_MODEL_IMAGES"]]
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=environ, cwd=ROOT, stderr=subprocess.PIPE, text=True) as waiting:
            assert waiting.stderr is not None
            assert waiting.stderr.readline() == "waiting for another start that prepares a model\n"
            assert list(cache.iterdir()) == []
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            assert waiting.stderr.readline() == f"copying the model image model-v1 into {cache}\n"
            assert waiting.wait(20) == 0
    finally:
        os.close(descriptor)
    assert (cache / "model-v1" / "manifest.json").is_file()


def test_a_disk_without_room_for_the_copy_is_named_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")
    monkeypatch.setattr(built_in_images, "free_disk_bytes", lambda _folder: 1)
    with pytest.raises(ModelError, match=r"no disk space: the model image model-v1 needs 2 bytes in .*, 1 are free"):
        built_in_images.copy_images(Path(environ["CONTAINER_MODEL_IMAGES"]), tmp_path / "cache", lambda _stage: None)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_disk_that_is_full_in_the_middle_is_told_as_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")

    def fill(_source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(ModelError, match=r"No space left on device.*; free some space") as caught:
        built_in_images.copy_images(Path(environ["CONTAINER_MODEL_IMAGES"]), tmp_path / "cache", lambda _stage: None)
    assert "writable" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wrong_option_or_setting_is_told_once_before_anything_is_copied(tmp_path: Path) -> None:
    environ = _cache_environ(tmp_path, tmp_path / "cache")
    done = entry("--frobnicate", **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ERROR: unrecognized arguments: --frobnicate; see scripts/serve --help\n"
    assert "INFERENCE_API_ROWS=0 is outside" in refusal(entry(**environ, INFERENCE_API_ROWS="0"))
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_one_line_and_nothing_half_written(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where the folder should be")
    line = refusal(entry(**_cache_environ(tmp_path, cache)))
    assert f"no model image can be made in {cache}: " in line and "make it writable" in line
    assert cache.read_text() == "a file where the folder should be"
