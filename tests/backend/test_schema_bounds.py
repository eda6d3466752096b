"""Schemas whose numbers would make a compiler work without end are found, wherever the number stands."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.backend.schema_bounds import find_excess


@pytest.mark.parametrize("multiple", [1, 7, 1000, 0.1, 0.5, 2.5, 1e-3, -1000])
def test_small_multiples_pass(multiple: float) -> None:
    assert find_excess({"type": "number", "multipleOf": multiple}) is None


@pytest.mark.parametrize("multiple", [1001, 99999989, 1e-4, 0.12345, 1e300, 10**40, float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["root", "property", "list"])
def test_large_ones_are_found_and_named(multiple: float, place: str) -> None:
    number: dict[str, Any] = {"multipleOf": multiple}
    schema = {
        "root": number,
        "property": {"properties": {"a": {"items": number}}},
        "list": {"anyOf": [{"type": "string"}, number]},
    }[place]
    assert (find_excess(schema) or "").startswith("has multipleOf ")


@pytest.mark.parametrize("schema", [{}, True, {"multipleOf": "x"}, {"multipleOf": True}, {"enum": [{"a": 5000}]}, None])
def test_what_has_no_such_number_passes(schema: Any) -> None:
    assert find_excess(schema) is None


def test_depth_is_no_matter() -> None:
    schema: Any = {"multipleOf": 4001}
    for _ in range(20_000):
        schema = {"not": schema}
    assert find_excess(schema) is not None
