"""Check that docs/proxy.md lists what there is: every module, every route under its scope, every setting's default."""

from __future__ import annotations

import re
from pathlib import Path

from proxy.config import _NUMBERS, read_settings
from proxy.routes import ROUTES, Scope
from tests.architecture import PURE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "proxy.md").read_text("utf-8")


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its first two rows."""
    (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_module_is_listed_and_what_is_said_to_be_pure_is_held_to_it() -> None:
    told = {name: cells[2] for cells in rows("How it is built") for name in re.findall(r"`(\w+\.py)`", cells[0])}
    assert set(told) == {path.name for path in (ROOT / "proxy").glob("*.py")} - {"__init__.py"}
    pure = {name for name, impure in told.items() if impure == "no"}
    assert pure == {Path(path).name for path in PURE if path.startswith("proxy/")}


def test_every_route_is_listed_under_its_scope() -> None:
    told = {
        (method, path, cells[0].partition(" ")[0].strip("`"))
        for cells in rows("Routes and scopes")
        for part in cells[1].split("; ")
        for method in part.partition(" `")[0].split(", ")
        for path in re.findall(r"`([^`]+)`", part)
    }
    expected = {
        (method, route.template, "none" if route.scope is Scope.PUBLIC else route.scope.value)
        for route in ROUTES
        if route.scope is not None
        for method in ((route.method, "HEAD") if route.scope is Scope.PUBLIC else (route.method,))
    }
    assert told == expected


def test_every_number_among_the_settings_is_listed_with_its_default() -> None:
    settings = read_settings({"JWT_SECRET": "a" * 32}, port=0, upstream_url="http://127.0.0.1:1")
    told = {}
    for cells in rows("Settings"):
        names = re.findall(r"`(PROXY_\w+)`", cells[0])
        told |= dict(zip(names, re.findall(r"\d+|none|any", cells[1]), strict=False))
    expected = {variable: getattr(settings, field) for field, (variable, _lowest, _highest) in _NUMBERS.items()}
    assert {name: float(told[name]) for name in expected} == expected
