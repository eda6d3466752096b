"""Hold the README to the code: each file, function and document that it names exists; generated pages are fresh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def _life_of_a_request() -> str:
    return README.split("## Life of a request", 1)[1].split("\n## ", 1)[0]


def _find(name: str) -> Path | None:
    for folder in ("", "inference_api", "inference_api/backend/engines"):
        path = ROOT / folder / name
        if path.exists():
            return path
    return None


def test_every_file_of_the_life_of_a_request_exists() -> None:
    names = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", _life_of_a_request())
    assert len(names) > 20
    assert [name for name in names if _find(name) is None] == []


def test_every_function_of_the_life_of_a_request_is_defined_where_it_says() -> None:
    pairs = re.findall(r"`([a-z_/]+\.py)`\s+\(`([A-Za-z_.]+)`\)", _life_of_a_request())
    assert len(pairs) >= 9
    for name, function in pairs:
        path = _find(name)
        assert path is not None
        assert re.search(rf"def {function.rpartition('.')[2]}\(", path.read_text("utf-8")), f"{name}: {function}"


@pytest.mark.parametrize("link", re.findall(r"\]\((docs/[a-z-]+\.md)\)", README))
def test_every_linked_document_exists(link: str) -> None:
    assert (ROOT / link).is_file()


def test_the_generated_pages_are_fresh() -> None:
    subprocess.run([sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, check=True)
