"""Check that docs/security.md names files and parts of the campaign that there are, with the counts that they have."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
FOLDERS = ("", "inference_api", "inference_api/backend", "proxy")


def num_vectors(name: str) -> int:
    return len(json.loads((ROOT / "tests" / "data" / name).read_text("utf-8"))["vectors"])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE))))
def test_every_file_is_there(name: str) -> None:
    assert any((ROOT / folder / name).is_file() for folder in FOLDERS)


def test_every_part_of_the_campaign_is_there_with_its_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    parts = importlib.import_module("campaigns.table").PARTS
    named = {name for cell in re.findall(r"campaign ([^;|]+)", PAGE) for name in re.findall(r"`(\w+)`", cell)}
    assert named and named <= set(parts)
    assert f"{parts['jwt'].ci['mutants']:,} mutants" in PAGE
    assert f"| {num_vectors('jwt_policy_vectors_sample.json')} × 8 forms of headers" in PAGE
    cuts = f"{num_vectors('http_raw_vectors_sample.json')} vectors × 4 cuts × 3 ways in"
    assert f"| {cuts}, and {parts['raw_http'].ci['mutants']:,} mutants" in PAGE
    kills = parts["faults_backend"].ci
    assert f"| {kills['kills']} × {kills['streams']} streams" in PAGE
    assert f"| 12 × {parts['leaving'].ci['leavers']} |" in PAGE
    assert f"| {parts['isolation'].ci['requests']:,} with kills" in PAGE
