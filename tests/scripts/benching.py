"""Run benches for the tests of benches: at their tiny size, with a model of a few thousand weights.

Used by test_bench.py and test_bench_api.py. Knows how a bench is called, not what any of them prints.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from inference_api.engine_artefacts import ARTEFACTS_FOLDER
from inference_api.model_image import build_mock_image

ROOT = Path(__file__).parents[2]


def run_bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/bench to its end."""
    return subprocess.run(
        [str(ROOT / "scripts" / "bench"), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def make_own_model(folder: Path, build_folder: Path) -> dict[str, str]:
    """Return the settings of a model of a few thousand weights: the bench is tested, not the model."""
    from tests.backend.engines.tiny_models import FAMILIES, build_model, save_checkpoint

    tokenizer = build_mock_image(folder / "mock").tokenizer_path
    checkpoint = save_checkpoint(build_model(*FAMILIES["llama"]), folder / "tiny-llama", tokenizer)
    shutil.copytree(build_folder, folder / "cache" / ARTEFACTS_FOLDER)
    return {"INFERENCE_API_MODEL": str(checkpoint), "INFERENCE_API_CACHE_DIR": str(folder / "cache")}
