"""Give the tests of scripts their settings, and a cache root with something of everything in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference_api import half_finished
from inference_api.model_image import build_mock_image
from tests.integration.service import free_ports
from tests.scripts.cleaning import HALF
from tests.scripts.doctoring import SECRET


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return settings with which a start works, apart from every other service on this machine."""
    port, proxy_port = free_ports(2)
    return {
        "PATH": os.environ["PATH"],
        "INFERENCE_API_CACHE_DIR": str(tmp_path / "cache"),
        "INFERENCE_API_RUN_DIR": str(tmp_path / "run"),
        "INFERENCE_API_PORT": str(port),
        "PROXY_PORT": str(proxy_port),
        "JWT_SECRET": SECRET,
    }


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Return a cache root with something of everything, ours and a user's."""
    cache = tmp_path / "cache"
    build_mock_image(cache)
    build_mock_image(cache / "tti_cache")
    for folder in ("debug_logs", "hf_cache/models--a--b/blobs", HALF, "notes"):
        (cache / folder).mkdir(parents=True)
        (cache / folder / "file").write_text("x")
    half_finished.mark(cache / HALF)
    (cache / "debug_logs" / "backend-7000-41.jsonl").write_text("{}")
    (cache / "debug_logs" / "file").rename(cache / "debug_logs" / "stack_trace")
    (cache / "jwt_secret").write_text("s" * 64)
    (cache / "thesis.txt").write_text("years of work")
    return cache
