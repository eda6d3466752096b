"""Prepare models for tests: silently, and with the expectation that one is refused. Knows no kind of source."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_api.errors import ModelError
from inference_api.prepare import prepare

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def quiet(_line: str) -> None:
    """Take a progress line."""


def assert_refused(spec: Path | str, tmp_path: Path, text: str, **options: object) -> None:
    """Expect a ModelError of one line, and no image and no partial folder in the cache."""
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match=text) as caught:
        prepare(str(spec), cache, quiet, **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache.glob("*")] == []
