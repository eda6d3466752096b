"""Check that scripts/clean refuses while a service runs on the cache, however it is found, and for nothing else."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_api.model_image import FORMAT_VERSION
from scripts import clean_cache
from tests.scripts.cleaning import HALF, living_process, run


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """Return a run folder whose lock is held, as a running service holds it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    with (run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run_dir


@pytest.fixture
def second_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return another path of the cache that no resolving turns into the first, as a bind mount gives it one."""
    alias = cache.with_name("second")
    alias.symlink_to(cache)
    resolve = Path.resolve
    monkeypatch.setattr(
        Path, "resolve", lambda path, strict=False: path if path.is_relative_to(alias) else resolve(path, strict)
    )
    return alias


def test_a_service_that_knows_the_cache_by_another_name_is_found_by_its_process(
    cache: Path, second_name: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(second_name))
    with living_process(Path(sys.executable), CACHE_ROOT=str(cache)) as process:
        assert clean_cache.main([]) == 1
    assert f"a service runs on {second_name} (process {process.pid})" in capsys.readouterr().err
    assert (cache / HALF).is_dir()


def test_a_service_that_knows_the_cache_by_another_name_is_found_by_its_images_link(
    cache: Path,
    held: Path,
    second_name: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (held / "model_image").symlink_to(cache / f"mock-v{FORMAT_VERSION}")
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(second_name))
    monkeypatch.setenv("INFERENCE_API_RUN_DIR", str(held))
    assert clean_cache.main([]) == 1
    assert f"a service runs on {second_name} (run folder {held})" in capsys.readouterr().err
    assert (cache / HALF).is_dir()


def test_a_running_service_on_this_cache_is_left_alone(cache: Path, held: Path) -> None:
    (held / "model_image").symlink_to(cache / f"mock-v{FORMAT_VERSION}")
    before = sorted(cache.rglob("*"))
    ended = run(cache, INFERENCE_API_RUN_DIR=str(held))
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr == f"ERROR: a service runs on {cache} (run folder {held}); stop it first\n"
    assert sorted(cache.rglob("*")) == before


def test_a_running_service_is_found_by_its_process_wherever_its_run_folder_is(cache: Path) -> None:
    with living_process(Path(sys.executable), CACHE_ROOT=str(cache)) as process:
        ended = run(cache)
        assert run(cache, "--dry-run").returncode == 0
    assert ended.returncode == 1
    assert ended.stderr == f"ERROR: a service runs on {cache} (process {process.pid}); stop it first\n"
    assert run(cache).returncode == 0


def test_a_relative_cache_of_a_running_service_counts_from_its_own_folder(cache: Path) -> None:
    with living_process(Path(sys.executable), cwd=cache.parent, CACHE_ROOT=cache.name) as process:
        ended = run(cache)
    assert ended.stderr == f"ERROR: a service runs on {cache} (process {process.pid}); stop it first\n"


def test_a_service_on_another_cache_is_no_reason_to_refuse(cache: Path, held: Path, tmp_path: Path) -> None:
    (held / "model_image").symlink_to(tmp_path / "elsewhere")
    assert run(cache, INFERENCE_API_RUN_DIR=str(held)).returncode == 0


def test_a_start_that_prepares_a_model_is_left_alone(cache: Path) -> None:
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        ended = run(cache)
    finally:
        os.close(descriptor)
    assert ended.returncode == 1
    assert ended.stderr == f"ERROR: a model is being prepared in {cache}; wait until that start is done\n"


def test_an_editor_of_one_of_our_files_is_no_service(cache: Path, tmp_path: Path) -> None:
    editor = tmp_path / "vim"
    editor.symlink_to(shutil.which("cat") or "")
    with subprocess.Popen(
        [editor, "-", "inference_api_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"CACHE_ROOT": str(cache)},
    ) as process:
        ended = run(cache)
        process.communicate()
    assert (ended.returncode, ended.stderr) == (0, "")
