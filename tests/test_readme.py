"""Hold the README to the code: each file, function and document that it names exists; generated pages are fresh."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import generate_docs

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    named = re.findall(r"`([a-z_/]+\.py)`\s+\(((?:`[A-Za-z_.]+`(?:, )?)+)\)", _life_of_a_request())
    pairs = [(name, function) for name, group in named for function in re.findall(r"`([A-Za-z_.]+)`", group)]
    assert len(pairs) >= 9
    for name, function in pairs:
        path = _find(name)
        assert path is not None
        assert re.search(rf"def {function.rpartition('.')[2]}\(", path.read_text("utf-8")), f"{name}: {function}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_document_exists(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[a-z-]+\.md)\)", README))
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} - {"README.md"} == linked


def test_the_readme_names_every_script_and_no_other() -> None:
    rows = README.split("| script | what it does |\n", 1)[1].split("\n\n", 1)[0].splitlines()
    named = {name for row in rows for name in re.findall(r"`([a-z_-]+(?:\.py)?)`", row.split("|")[1])}
    programs = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and os.access(path, os.X_OK)}
    assert named == programs


def test_every_json_body_of_an_example_is_valid() -> None:
    bodies = [body for page in PAGES for body in re.findall(r"-d '(\{.*?\})'", page.read_text("utf-8"), re.DOTALL)]
    assert len(bodies) >= 4
    for body in bodies:
        example = json.loads(body)
        assert isinstance(example.get("text"), str) or example["messages"][0]["role"] == "user"


def test_a_page_keeps_what_stands_around_a_generated_table() -> None:
    page = generate_docs.fresh_page("before\n<!-- generated: errors -->\nstale\n<!-- end -->\nafter\n")
    assert page.startswith("before\n<!-- generated: errors -->\n| status |") and page.endswith("<!-- end -->\nafter\n")
    assert "stale" not in page and generate_docs.fresh_page(page) == page


def test_the_tables_hold_what_the_code_says() -> None:
    assert "| `top_p` | float | `0.9` | 0.01 to 1 |" in generate_docs.parameters_table()
    assert "| 504 | `deadline_exceeded` |" in generate_docs.errors_table()
    members = generate_docs.openai_members_table()
    assert "| `top_logprobs` | chat | integer 0 to 20 |" in members
    assert "| `seed` | chat, text | integer -2^63 to 2^63 - 1 |" in members
    assert (
        "| `stop` | chat, text | string (1 to 64 characters) or list (0 to 16) of string (1 to 64 characters) |"
        in members
    )
    assert "`user`" in generate_docs.openai_no_effect_table() and "`user`" not in members


def test_the_generated_pages_are_fresh() -> None:
    subprocess.run([sys.executable, "scripts/generate_docs.py", "--check"], cwd=ROOT, check=True)
