"""Check what scripts/serve has installed before it starts anything: the model's packages only where there is a model.

The whole script is run, with a scripts/environment that only says what it is asked for.
"""

from __future__ import annotations

import os
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
    ],
)
def test_the_models_packages_are_installed_where_a_model_is_served(
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
