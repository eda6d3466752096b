"""Check how the campaign runs clients: what their programs say, what they are given, their pins and their snippets.

The programs here are a few lines for this Python; no client's library is needed, and no service.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text("utf-8")


def module(name: str) -> Any:
    return importlib.import_module(f"campaigns.{name}")


@pytest.fixture(autouse=True)
def campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable as scripts/campaign makes it."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.fixture
def service() -> Any:
    return module("part").ServiceUnderTest("http://127.0.0.1:4", "http://127.0.0.1:5", "a.b.c", "the-model", {})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: Any) -> Any:
    """Return a function that runs a text as a client's program and returns the checks with their faults."""
    programs = module("client_programs")
    client = module("client_table").Client("a client", "an environment", "a_program", ())

    def run(text: str, *left_out: str) -> dict[str, str | None]:
        place = programs.Place(sys.executable, tmp_path)
        monkeypatch.setattr(programs.Place, "command", lambda *_: [sys.executable, "-c", text])
        found = programs.run_program(client, place, service, left_out)
        return {finding.check: finding.fault for finding in found}

    return run


def program(*checks: str) -> str:
    """Return a program of checks that share what the real ones share."""
    names = ", ".join(re.findall(r"def (\w+)", "\n".join(checks)))
    return "\n".join(("from campaigns.clients import checks", *checks, f"checks.run_checks([{names}])"))


def test_each_check_of_a_program_is_told_with_its_fault(run: Any) -> None:
    found = run(
        program(
            "def good(): checks.expect(True, 1)",
            "def wrong(): checks.expect(False, {'a': 1})",
            "def broken(): raise ValueError('no')",
            "async def later(): checks.expect(False, 'late')",
        )
    )
    assert found == {
        "good": None,
        "wrong": "got {'a': 1}",
        "broken": "ValueError: no (line None)",
        "later": "got 'late'",
        "nothing sent outside": None,
    }


def test_checks_that_are_left_out_do_not_run(run: Any) -> None:
    assert "wrong" not in run(program("def good(): pass", "def wrong(): checks.expect(False, 1)"), "wrong")


@pytest.mark.parametrize("text", ["print('{}')[", "import sys; sys.exit('it ended early')", "pass", "print('hello')"])
def test_a_program_that_dies_or_checks_nothing_has_failed(run: Any, text: str) -> None:
    assert run(text)["end"] is not None


def test_a_program_that_dies_after_some_checks_has_failed_too(run: Any) -> None:
    found = run(program("def good(): pass") + "\nimport os; os._exit(3)")
    assert found["good"] is None and found["end"] == "status 3: nothing on stderr"


def test_a_program_that_hangs_is_ended_and_what_it_said_counts(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module("client_programs"), "PROGRAM_SECONDS", 2.0)
    found = run(program("def good(): pass", "def hanging(): import time; time.sleep(60)"))
    assert found["good"] is None and found["end"] == "status -1: not done within 2 s"


def test_a_client_that_calls_outside_is_caught(run: Any) -> None:
    call = "import urllib.request\n    urllib.request.urlopen('http://prices.example/', timeout=0.2)"
    found = run(program(f"def calling():\n  try:\n    {call}\n  except OSError: pass"))
    assert found["calling"] is None
    assert found["nothing sent outside"] == "it asked for ['GET http://prices.example/ HTTP/1.1']"


def test_a_program_knows_the_service_and_nothing_of_ours(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JWT_SECRET", "s" * 32)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    found = run(
        program(
            "def given(): checks.expect(False, (checks.BASE_URL, checks.TOKEN, checks.MODEL))",
            "def hidden(): import os; checks.expect(not {'JWT_SECRET', 'OPENAI_API_KEY'} & os.environ.keys(), 1)",
        )
    )
    assert found["given"] == "got ('http://127.0.0.1:4', 'a.b.c', 'the-model')" and found["hidden"] is None


def test_what_should_be_raised_is_held_to_its_class_and_our_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_URL", "TOKEN", "MODEL"):
        monkeypatch.setenv(name, "x")
    checks = module("clients.checks")

    def refuse() -> None:
        raise KeyError("temperature is too high")

    assert isinstance(checks.expect_raised(KeyError, refuse, "too high"), KeyError)
    for kind, call, text in (
        (KeyError, refuse, "too low"),
        (ValueError, refuse, "too high"),
        (KeyError, lambda: 1, ""),
    ):
        with pytest.raises(checks.Fault):
            checks.expect_raised(kind, call, text)


def test_every_client_has_its_program_its_pins_and_its_snippets() -> None:
    folder = ROOT / "scripts" / "campaigns"
    for client in module("client_table").CLIENTS:
        file = client.program if client.is_javascript else f"{client.program}.py"
        assert (folder / "clients" / file).is_file()
        assert (folder / "pins" / f"{client.environment}.txt").is_file()
        for mark in client.snippets:
            language, text = module("client_programs").read_snippet(mark, PAGE)
            assert (language == "js") == client.is_javascript
            assert module("client_programs").PAGE_ADDRESS in text and "AUTHORIZATION" in text


def test_a_snippet_that_the_page_does_not_have_once_is_a_failure(tmp_path: Path, service: Any) -> None:
    programs = module("client_programs")
    for page in ("", "<!-- run: a -->\n```python\nx\n```\n" * 2):
        with pytest.raises(LookupError):
            programs.read_snippet("a", page)
    found = programs.run_snippet("no such mark", programs.Place(sys.executable, tmp_path), service)
    assert found.fault == "docs/clients.md has 0 snippets under the mark no such mark"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("import os; print('127.0.0.1:1223', os.environ['AUTHORIZATION'])", None),
        ("pass", "it printed nothing"),
        ("raise SystemExit('no such model')", "status 1: no such model"),
    ],
)
def test_a_snippet_must_end_well_and_print(tmp_path, service, monkeypatch, text: str, fault: str | None) -> None:
    programs, page = module("client_programs"), tmp_path / "clients.md"
    page.write_text(f"<!-- run: a -->\n```python\n{text}\n```\n")
    monkeypatch.setattr(programs, "PAGE", page)
    assert programs.run_snippet("a", programs.Place(sys.executable, tmp_path), service).fault == fault


def test_the_pages_versions_are_the_pinned_ones() -> None:
    campaign = (ROOT / "docs" / "campaign.md").read_text("utf-8")
    rows = campaign.split("| client | version |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    for row in rows:
        names, versions, environment = (cell.strip() for cell in row.split("|")[1:4])
        pins = module("environments").read_pins(environment.strip("`"))
        for name, version in zip(names.split(", "), versions.split(", "), strict=True):
            package = {"openai for JavaScript": "openai", "AI SDK": "ai"}.get(name, name)
            assert f"{package}=={version}" in pins
    assert len(rows) == len(module("client_table").CLIENTS)


@pytest.mark.parametrize(
    "pins", sorted((ROOT / "scripts" / "campaigns" / "pins").glob("*.txt")), ids=lambda pins: pins.stem
)
def test_every_pin_is_exact_and_names_no_place(pins: Path) -> None:
    lines = module("environments").read_pins(pins.stem)
    assert lines and len(set(lines)) == len(lines)
    for line in lines:
        assert re.fullmatch(r"[@A-Za-z0-9._/-]+==[0-9][A-Za-z0-9.]*", line), line
