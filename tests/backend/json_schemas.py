"""Make random JSON schemas, and tell whether a value keeps to one: as much of the language as the tests generate.

A bounded schema has no text of endless length, so that whoever keeps to it comes to an end whatever is drawn.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

Schema = dict[str, Any]

PATTERNS = ("^[a-f]{2,5}$", "^(ab|cd)+x?$", "^\\d{3}-[A-Z]{2}$", "^(yes|no|maybe)$")
BOUNDED_PATTERNS = tuple(pattern for pattern in PATTERNS if "+" not in pattern)
WORDS = ("red", "grün", "blue sky", 'quo"te', "back\\slash", "日本", "tab\tbed", "")


def make_schema(rng: random.Random, *, bounded: bool, depth: int = 3) -> Schema:
    """Return an object's schema."""
    count = rng.randint(0, 4)
    names = rng.sample(["id", "name", "größe", "a b", "x-1", "items", "no"], count)
    schema: Schema = {
        "type": "object",
        "properties": {name: _make_any(rng, bounded, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if not bounded and rng.random() < 0.3:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _make_any(rng: random.Random, bounded: bool, depth: int) -> Schema:
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] if depth > 0 else []
    kinds += [] if bounded else ["number", "free string"]
    kind = rng.choice(kinds)
    if kind == "object":
        return make_schema(rng, bounded=bounded, depth=depth)
    if kind == "array":
        least = rng.randint(0, 2)
        items = _make_any(rng, bounded, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "anyOf":
        return {"anyOf": [_make_any(rng, bounded, depth - 1) for _ in range(rng.randint(1, 3))]}
    return _make_plain(rng, kind)


def _make_plain(rng: random.Random, kind: str) -> Schema:
    if kind == "string":
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
    if kind == "integer":
        low = rng.randint(-1000, 1000)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == "number":
        low = rng.randint(-10, 10)
        return {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 100)}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, 7, -2.5, True, None], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice([*WORDS, 0, {"a": [1, None]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(BOUNDED_PATTERNS)}
    return {"type": "string"} if kind == "free string" else {"type": kind}


_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def keeps_to(value: Any, schema: Schema) -> bool:
    """Tell whether a parsed value is valid."""
    if "anyOf" in schema:
        return any(keeps_to(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return any(_is_same(value, option) for option in schema.get("enum", [schema.get("const")]))
    if not _has_type(value, schema["type"]):
        return False
    if isinstance(value, str):
        fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return fits and re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        fits = schema["minItems"] <= len(value) <= schema["maxItems"]
        return fits and all(keeps_to(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        return _object_keeps_to(value, schema)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(schema["minimum"] <= value <= schema["maximum"])
    return True


def _object_keeps_to(value: dict[str, Any], schema: Schema) -> bool:
    others = schema["additionalProperties"]
    if not set(schema["required"]) <= value.keys():
        return False
    for name, item in value.items():
        rule = schema["properties"].get(name, others)
        if rule is False or not keeps_to(item, rule):
            return False
    return True


def _has_type(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _TYPES[kind])


def _is_same(value: Any, other: Any) -> bool:
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
