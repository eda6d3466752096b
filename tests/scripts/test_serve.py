"""Check what scripts/serve has installed before it starts anything: the model's packages only where there is a model.

The whole script is run, with a scripts/environment that only says what it is asked for.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("options", "environ", "extras"),
    [
        ([], {}, "model"),
        (["--mock"], {}, ""),
        (["--help"], {}, ""),
        ([], {"MOCK_MODEL": "1"}, ""),
        ([], {"MOCK_MODEL": "True"}, ""),
        ([], {"MOCK_MODEL": "false"}, "model"),
        ([], {"INFERENCE_API_ENGINE": "mock"}, ""),
        ([], {"INFERENCE_API_ENGINE": "transformers", "MOCK_MODEL": "1"}, "model"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "model,otel"),
        (["--mock"], {"INFERENCE_API_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "otel"),
        ([], {"INFERENCE_API_OTLP_ENDPOINT": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, "model"),
    ],
)
def test_what_is_installed_is_what_the_start_needs(
    tmp_path: Path, options: list[str], environ: dict[str, str], extras: str
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(ROOT / "scripts" / "serve", scripts)
    (scripts / "environment").write_text('make_environment() { echo "extras: $1"; exit; }\n')
    command = [str(scripts / "serve"), *options]
    given = {"PATH": os.environ["PATH"], **environ}
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"extras: {extras}\n", "")


@pytest.mark.parametrize(
    ("secret", "environ", "text"),
    [
        (None, {}, "HOME is not set, so there is no cache folder; set INFERENCE_API_CACHE_DIR to one"),
        ("folder", {"HOME": "{home}"}, "jwt_secret is a folder and should be a file with the secret; remove it"),
        (b"x" * 32 + b"\0y", {"HOME": "{home}"}, "jwt_secret cannot be read or holds a NUL byte; remove it"),
    ],
)
def test_what_keeps_the_secret_from_being_read_is_one_line(
    tmp_path: Path, secret: str | bytes | None, environ: dict[str, str], text: str
) -> None:
    scripts, cache = tmp_path / "scripts", tmp_path / ".cache" / "inference_api"
    scripts.mkdir()
    cache.mkdir(parents=True)
    for name in ("serve", "environment"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    with (scripts / "environment").open("a") as file:
        file.write("make_environment() { PYTHON=false; }\n")
    if isinstance(secret, bytes):
        (cache / "jwt_secret").write_bytes(secret)
    elif secret:
        (cache / "jwt_secret").mkdir()
    given = {"PATH": os.environ["PATH"], **{name: value.format(home=tmp_path) for name, value in environ.items()}}
    done = subprocess.run([str(scripts / "serve")], env=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"ERROR: .*{re.escape(text)}.*\n", done.stderr)
