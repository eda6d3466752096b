"""Check what the parts of the campaign decide by themselves: what they count as a fault, and what they leave out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.backend.json_schemas import make_schema

ROOT = Path(__file__).parents[2]
NUMBER = {"type": "integer", "minimum": 1, "maximum": 3}


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def module(name: str) -> ModuleType:
    return importlib.import_module(f"campaigns.{name}")


def make_context(part: str, folder: Path, **counts: int) -> Any:
    return module("part").Context(part, counts, 5, folder)


@pytest.mark.parametrize("text", ["4", "1.5", '"1"', "[1]", "1 1", ""])
def test_an_answer_that_leaves_its_schema_is_a_fault(text: str) -> None:
    assert module("schemas")._fault_of("2", NUMBER) is None
    assert module("schemas")._fault_of(text, NUMBER)


def test_schemas_are_asked_for_and_counted(tmp_path: Path) -> None:
    counts = {"bounded_on_mock": 3, "free_on_mock": 1, "bounded_on_model": 0, "free_on_model": 0}
    context = make_context("schemas", tmp_path, **counts)
    totals = module("schemas").run(context)
    assert (context.tally.passed, context.tally.failed) == (4, [])
    assert totals["ended"] + totals["cut"] == 4 and totals["ended"] >= 3


def test_a_seed_draws_the_same_schemas_again(tmp_path: Path) -> None:
    counts = {"bounded_on_mock": 4, "free_on_mock": 2}
    context = make_context("schemas", tmp_path, **counts)
    first, again = (module("schemas")._draw(context.random, "mock", counts) for _ in range(2))
    assert first == again
    assert len({json.dumps(case.schema) for case in first}) > 1
    assert [case.is_bounded for case in first] == [True] * 4 + [False] * 2
    assert make_schema(context.random, bounded=True) == first[0].schema


def test_the_document_that_schemathesis_reads_names_the_model_and_nothing_else_changes() -> None:
    plain = {
        "paths": {
            "/x/{model}": {"post": {"parameters": [{"name": "model", "in": "path", "schema": {"type": "string"}}]}}
        },
        "components": {"schemas": {"Body": {"properties": {"model": {"type": "string"}, "n": {"type": "integer"}}}}},
        "model": "left alone",
    }
    named = module("schemathesis").with_model_named(plain, "m")
    only = {"type": "string", "enum": ["m"]}
    assert named["paths"]["/x/{model}"]["post"]["parameters"][0]["schema"] == only
    assert named["components"]["schemas"]["Body"]["properties"] == {"model": only, "n": {"type": "integer"}}
    assert named["model"] == "left alone"


def test_every_test_of_a_kit_is_run_or_left_out_for_a_reason(tmp_path: Path) -> None:
    kits = module("kits")
    source = "class Mixin:\n    def test_a(self): ...\n    def test_b(self): ...\n    def helper(self): ...\n"
    (tmp_path / "some_kit.py").write_text(source)
    assert kits._tests_of(tmp_path / "some_kit.py", kits.Kit("some_kit.py", "Mixin")) == ["test_a", "test_b"]
    (tmp_path / "runner.py").write_text("def _test_c(client, model): ...\ndef run(): ...\n")
    assert kits._tests_of(tmp_path / "runner.py", kits.Kit("runner.py", None)) == ["c"]
    for kit in kits.KITS:
        for left_out in (kit.left_out, kit.left_out_on_mock, kit.left_out_on_model):
            assert all(left_out.values())
        assert not kit.left_out.keys() & {*kit.left_out_on_mock, *kit.left_out_on_model}


def test_every_part_of_the_table_is_a_module_with_a_run() -> None:
    table = module("table")
    for part in table.PARTS.values():
        assert callable(module(part.module).run)
        assert part.ci.keys() == part.nightly.keys()
        assert all(part.ci[name] <= part.nightly[name] for name in part.ci)
