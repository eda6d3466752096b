"""Start the service with models that cannot be loaded: it ends at once, with one line that names the cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.service import ROOT, SECRET, free_port

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]


def _start(tmp_path: Path, *arguments: str, **environ: str) -> tuple[int, list[str]]:
    """Run the supervisor until it ends by itself; return its status and the lines it wrote that begin with ERROR."""
    settings = {
        "INFERENCE_API_PORT": str(free_port()),
        "INFERENCE_API_RUN_DIR": str(tmp_path / "run"),
        "INFERENCE_API_CACHE_DIR": str(tmp_path / "cache"),
        **environ,
    }
    done = subprocess.run(
        [sys.executable, "-m", "inference_api.supervisor", *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, [line for line in done.stderr.splitlines() if line.startswith("ERROR")]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    status, errors = _start(tmp_path, "--model", str(tmp_path / "nowhere"))
    assert status == 1
    assert len(errors) == 1 and "nowhere" in errors[0]


def test_a_broken_gguf_file_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 64)
    status, errors = _start(tmp_path, "--model", str(broken))
    assert status == 1
    assert len(errors) == 1 and "broken.gguf" in errors[0]


def test_a_model_of_the_wrong_family_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    status, errors = _start(tmp_path, "--model", str(folder))
    assert status == 1
    assert len(errors) == 1 and "encoder" in errors[0]


def test_too_little_memory_names_both_numbers_and_the_settings(tmp_path: Path, model_cache: Path) -> None:
    status, errors = _start(
        tmp_path, INFERENCE_API_CACHE_DIR=str(model_cache), INFERENCE_API_ROWS="1024", INFERENCE_API_QUEUE_REQUESTS="1"
    )
    assert status == 1
    assert len(errors) == 1
    for part in ("MiB and", "MiB are free", "INFERENCE_API_ROWS (1024)", "INFERENCE_API_CONTEXT_TOKENS (2048)"):
        assert part in errors[0]


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    status, errors = _start(tmp_path, INFERENCE_API_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert status == 1
    assert len(errors) == 1 and "cache" in errors[0]


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    status, errors = _start(tmp_path, INFERENCE_API_ROWS="many")
    assert status == 1
    assert errors == ["ERROR: INFERENCE_API_ROWS='many' is not an integer."]


@pytest.mark.parametrize("seconds", [0.3, 3.0])
def test_ctrl_c_while_the_model_is_prepared_ends_everything_and_leaves_nothing(tmp_path: Path, seconds: float) -> None:
    settings = {
        "INFERENCE_API_PORT": str(free_port()),
        "INFERENCE_API_RUN_DIR": str(tmp_path / "run"),
        "INFERENCE_API_CACHE_DIR": str(tmp_path / "cache"),
        "JWT_SECRET": SECRET,
    }
    command = [sys.executable, "-m", "inference_api.supervisor", "--proxy-port", str(free_port())]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **settings}, stderr=subprocess.PIPE, start_new_session=True
    ) as supervisor:
        assert supervisor.stderr is not None
        assert b"prepare: fetching" in supervisor.stderr.readline()
        time.sleep(seconds)
        began = time.monotonic()
        os.killpg(supervisor.pid, signal.SIGINT)
        supervisor.stderr.read()
        assert supervisor.wait(10) == 0
    assert time.monotonic() - began < 5.0
    assert not (tmp_path / "run").exists()
    assert list((tmp_path / "cache").iterdir()) == []
