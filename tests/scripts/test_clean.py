"""Check scripts/clean as it is used: what it removes from a cache root, what it leaves, and when it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inference_api import half_finished
from inference_api.model_image import FORMAT_VERSION, build_mock_image
from scripts import clean_cache
from tests.scripts.cleaning import HALF, ROOT, SCRIPT, living_process, run

LIKE_HALF = ("photos.partial-20240101", "thesis.partial-draft_v2")
"""Folders of a user whose names look like those of our half-finished ones."""


def test_what_a_start_makes_again_goes_and_everything_else_stays(cache: Path) -> None:
    ended = run(cache)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {path.relative_to(cache).as_posix() for path in cache.rglob("*") if path.is_file()} == {
        "hf_cache/models--a--b/blobs/file",
        "jwt_secret",
        "notes/file",
        "thesis.txt",
    }
    assert f"removed  model image  {cache}/mock-v{FORMAT_VERSION}  " in ended.stdout
    assert f"kept, not ours  {cache}/thesis.txt\n" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("5 removed, ")


def test_a_dry_run_says_the_same_and_removes_nothing(cache: Path) -> None:
    before = sorted(cache.rglob("*"))
    ended = run(cache, "--dry-run")
    assert sorted(cache.rglob("*")) == before
    assert ended.stdout.count("would remove  ") == 5
    assert ended.stdout.replace("would remove", "removed").replace("would be ", "") == run(cache).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the script needs, with a .venv that may go."""
    copy = tmp_path / "checkout"
    for folder in ("scripts", "inference_api"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".venv" / "bin").mkdir(parents=True)
    (copy / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (copy / ".venv" / "pyvenv.cfg").write_text("home = x")
    (copy / ".venv.partial-ab12cd34").mkdir()
    half_finished.mark(copy / ".venv.partial-ab12cd34")
    return copy


def test_all_takes_downloads_and_environment_too_and_still_nothing_foreign(cache: Path, checkout: Path) -> None:
    (cache / "hf_cache" / "mine.txt").write_text("x")
    ended = run(cache, "--all", script=checkout / "scripts" / "clean")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in (cache / "hf_cache").iterdir()) == ["mine.txt"]
    assert sorted(path.name for path in checkout.iterdir()) == ["inference_api", "scripts"]
    assert (cache / "jwt_secret").is_file()


def test_an_environment_that_a_service_runs_from_stays(cache: Path, checkout: Path, tmp_path: Path) -> None:
    with living_process(checkout / ".venv" / "bin" / "python", CACHE_ROOT=str(tmp_path / "another")) as process:
        ended = run(cache, "--all", script=checkout / "scripts" / "clean")
    assert ended.returncode == 1
    text = f"ERROR: a service runs from {checkout / '.venv'} (process {process.pid}); stop it first\n"
    assert ended.stderr == text
    assert (checkout / ".venv" / "pyvenv.cfg").is_file() and (cache / "debug_logs").is_dir()


def test_a_downloads_folder_elsewhere_is_not_touched(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "hub" / "models--c--d"
    elsewhere.mkdir(parents=True)
    assert run(cache, HF_CACHE=str(elsewhere.parent)).returncode == 0
    assert elsewhere.is_dir()


def test_an_image_with_a_users_file_in_it_is_kept(cache: Path) -> None:
    added = cache / f"mock-v{FORMAT_VERSION}" / "notes.txt"
    added.write_text("x")
    ended = run(cache)
    assert added.is_file()
    assert f"kept, not ours  {added.parent}\n" in ended.stdout


def test_a_folder_with_a_manifest_of_another_program_is_kept(cache: Path) -> None:
    other = cache / "other-v1"
    other.mkdir()
    (other / "manifest.json").write_text('{"name": "an extension", "files": {}}')
    run(cache)
    assert other.is_dir()


def test_no_symbolic_link_is_followed(cache: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    image = build_mock_image(outside)
    (cache / "tvm_cache").symlink_to(outside)
    (cache / "linked-v1").symlink_to(image.path)
    (cache / "linked-v1.partial-ab12cd34").symlink_to(image.path)
    (cache / HALF / "link").symlink_to(outside)
    (cache / "debug_logs" / "frontend-7000-1.jsonl").symlink_to(image.path / "manifest.json")
    before = sorted(outside.rglob("*"))
    assert run(cache, "--all", "--dry-run").returncode == 0
    assert run(cache).returncode == 0
    assert sorted(outside.rglob("*")) == before
    assert not (cache / HALF).exists()
    for kept in ("tvm_cache", "linked-v1", "linked-v1.partial-ab12cd34", "debug_logs/frontend-7000-1.jsonl"):
        assert (cache / kept).is_symlink()


def test_a_file_that_lives_elsewhere_too_frees_nothing(tmp_path: Path) -> None:
    half = tmp_path / "cache" / "big-v1.partial-ab12cd34"
    half.mkdir(parents=True)
    half_finished.mark(half)
    (tmp_path / "weights").write_bytes(b"x" * 5 * 2**20)
    os.link(tmp_path / "weights", half / "model.safetensors")
    assert run(half.parent).stdout.splitlines()[-1] == "1 removed, 0.0 KiB freed"
    assert (tmp_path / "weights").stat().st_size == 5 * 2**20


@pytest.mark.parametrize("name", ["INFERENCE_API_CACHE_DIR", "CACHE_ROOT", "MODEL_WEKA_DIR"])
def test_every_name_of_the_cache_root_is_honoured(cache: Path, name: str) -> None:
    environ = {"PATH": os.environ["PATH"], "SERVE_PYTHON": sys.executable, name: str(cache)}
    done = subprocess.run([str(SCRIPT)], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].startswith("5 removed")


def test_an_empty_or_missing_cache_is_nothing_to_do(tmp_path: Path) -> None:
    for cache in (tmp_path, tmp_path / "missing"):
        assert run(cache).stdout == "nothing to remove\n"
    assert not (tmp_path / "missing").exists()


def test_a_wrong_option_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    ended = run(tmp_path, "--everything")
    line = "ERROR: unrecognized arguments: --everything; see scripts/clean --help\n"
    assert (ended.returncode, ended.stderr) == (2, line)


@pytest.mark.parametrize("place", [".", "tti_cache", "tvm_cache"])
def test_a_name_that_looks_half_finished_is_kept_without_our_marker(cache: Path, place: str) -> None:
    for name in LIKE_HALF:
        (cache / place / name).mkdir(parents=True)
        (cache / place / name / "year.jpg").write_text("x")
    ended = run(cache, "--all", "--dry-run")
    assert not [line for line in ended.stdout.splitlines() if line.startswith("would") and "year" in line]
    assert run(cache).returncode == 0
    for name in LIKE_HALF:
        assert (cache / place / name / "year.jpg").is_file()


def test_an_environments_leftover_is_known_by_its_marker_and_not_by_its_name(cache: Path, checkout: Path) -> None:
    mine = checkout / ".venv.partial-20240101"
    mine.mkdir()
    (mine / "pyvenv.cfg").write_text("home = x")
    assert run(cache, "--all", script=checkout / "scripts" / "clean").returncode == 0
    assert mine.is_dir() and not (checkout / ".venv.partial-ab12cd34").exists()


def test_of_the_debug_logs_only_what_the_service_writes_goes(cache: Path) -> None:
    logs = cache / "debug_logs"
    for name in ("stack_trace-7000", "frontend-7000-41.jsonl.1", "stack_traces.txt", "backend-notes.jsonl"):
        (logs / name).write_text("x")
    assert run(cache).returncode == 0
    assert sorted(path.name for path in logs.iterdir()) == ["backend-notes.jsonl", "stack_traces.txt"]


def test_of_the_compiled_artefacts_only_what_the_engine_makes_goes(cache: Path) -> None:
    ours = (f"fused-{'0' * 16}-{'a' * 16}.so", f"packed-{'0' * 16}-{'1' * 16}-{'2' * 16}.bin")
    theirs = ("fused-notes.so", f"packed-{'0' * 16}-{'1' * 16}-{'2' * 16}.bin.bak", "model.bin")
    (cache / "tvm_cache").mkdir()
    for name in (*ours, *theirs):
        (cache / "tvm_cache" / name).write_text("x")
    (cache / "tvm_cache" / f"fused-{'0' * 16}-{'b' * 16}.so").symlink_to(cache / "thesis.txt")
    half = half_finished.make(cache / "tvm_cache" / "packed")
    assert run(cache).returncode == 0
    assert not half.exists()
    assert sorted(path.name for path in (cache / "tvm_cache").iterdir()) == sorted(
        (*theirs, f"fused-{'0' * 16}-{'b' * 16}.so")
    )


def test_what_a_killed_run_leaves_is_removed_by_the_next(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = cache / f"mock-v{FORMAT_VERSION}"

    def kill(_folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(half_finished, "remove", kill)
        with pytest.raises(KeyboardInterrupt):
            clean_cache.remove(image)
    (left,) = cache.glob("mock-v*")
    assert f"removed  half-finished  {left}  " in run(cache).stdout
    assert not left.exists()


def test_nothing_is_said_to_be_removed_that_could_not_be(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(clean_cache, "remove", refuse)
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(cache))
    assert clean_cache.main([]) == 1
    out, err = capsys.readouterr()
    assert "removed  " not in out and out.endswith("nothing to remove\n")
    assert err.count("cannot be removed: Permission denied") == len(err.splitlines()) == 5


def test_a_saved_image_goes_too_and_the_output_says_what_that_means(cache: Path) -> None:
    line = "a saved image whose model is gone cannot be made again: keep a copy of it elsewhere\n"
    assert line in run(cache, "--dry-run").stdout and line in run(cache).stdout
    assert line not in run(cache).stdout


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_what_holds_a_mount_is_kept_with_the_reason_and_the_rest_goes(
    cache: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image, photos = cache / f"mock-v{FORMAT_VERSION}", cache / HALF / "photos"
    photos.mkdir()
    (photos / "year.jpg").write_text("x")
    table = cache.parent / "mountinfo"
    table.write_text("".join(f"36 22 0:20 / {point} rw - ext4 /dev/a rw\n" for point in (image, photos)))
    monkeypatch.setattr(half_finished, "MOUNTS", table)
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(cache))
    assert clean_cache.main(options) == 1
    out, err = capsys.readouterr()
    text = "cannot be removed: something is mounted there; unmount it first"
    assert err == f"ERROR: {image} {text} ({image})\nERROR: {cache / HALF} {text} ({photos})\n"
    assert (photos / "year.jpg").is_file() and clean_cache.is_image(image)
    assert not (image / half_finished.MARKER_FILE).exists()
    assert out.splitlines()[-1].startswith("3 would be removed" if options else "3 removed")


def test_an_image_that_cannot_be_renamed_is_left_without_a_marker_and_the_rest_goes(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image, rename = cache / f"mock-v{FORMAT_VERSION}", Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path == image:
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setenv("INFERENCE_API_CACHE_DIR", str(cache))
    assert clean_cache.main([]) == 1
    out, err = capsys.readouterr()
    assert err == f"ERROR: {image} cannot be removed: Device or resource busy ({image})\n"
    assert not (image / half_finished.MARKER_FILE).exists()
    assert out.splitlines()[-1].startswith("4 removed")


def test_a_name_that_would_move_the_cursor_or_forge_a_line_is_printed_escaped(cache: Path) -> None:
    (cache / "x\nremoved  \x1b[2J").mkdir()
    (cache / os.fsdecode(b"bad\xff")).touch()
    out = run(cache).stdout
    assert f"kept, not ours  {cache}/x\\nremoved  \\x1b[2J\n" in out and f"{cache}/bad\\udcff\n" in out
    assert "\x1b" not in out
