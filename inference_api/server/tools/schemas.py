"""Check the JSON schemas of functions' arguments, and put several into one without their definitions colliding.

Runs in PROCESS 1; pure. Knows where a JSON schema holds schemas, names and data, and what a local reference is; what
its keywords mean is the grammar compiler's. Knows no API: a fault names the member that its caller says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from inference_api.errors import InvalidRequestError

Schema = dict[str, Any]

_DEFINITIONS = ("$defs", "definitions")
"""Where a schema keeps definitions: JSON Schema 2020-12 section 8.2.4, and draft 7 section 9."""

_BY_NAME = frozenset({*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas", "dependencies"})
"""Keywords whose members are named by the caller: none of those names is a keyword."""

_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas, whatever they look like."""


def check_arguments_schema(schema: Schema, member: str) -> None:
    """Raise InvalidRequestError, naming `member`, for a schema that is not an object's, or holds no definitions."""
    kind = schema.get("type", "object")
    if kind != "object":
        raise InvalidRequestError(f"{member}: Its type should be 'object'.", member)
    for keyword in _DEFINITIONS:
        held = schema.get(keyword, {})
        if not isinstance(held, dict) or not all(isinstance(definition, dict) for definition in held.values()):
            raise InvalidRequestError(f"{member}: Its {keyword} should be an object of schemas.", member)


def hoisted(schema: Schema, prefix: str, member: str) -> tuple[Schema, dict[str, Schema]]:
    """Return a checked schema without its definitions, and those by keyword, all named with `prefix` before.

    Raises InvalidRequestError, naming the place in `member`, for a local reference to anything but a definition:
    the schema is no document of its own any more, so that the reference would point elsewhere.
    """
    known = {keyword: set(schema.get(keyword, {})) for keyword in _DEFINITIONS}

    def renamed(reference: object, place: str) -> object:
        return _renamed(reference, prefix, known, place) if isinstance(reference, str) else reference

    rest = {name: value for name, value in schema.items() if name not in _DEFINITIONS}
    moved = {
        keyword: {
            prefix + name: _rewritten(definition, renamed, f"{member}.{keyword}.{name}")
            for name, definition in schema[keyword].items()
        }
        for keyword in _DEFINITIONS
        if schema.get(keyword)
    }
    return _rewritten(rest, renamed, member), moved


def _renamed(reference: str, prefix: str, known: Mapping[str, set[str]], place: str) -> str:
    if not reference.startswith("#"):
        return reference
    keyword, _, way = reference.removeprefix("#/").partition("/")
    name, _, _ = way.partition("/")
    # RFC 6901 sections 4 and 6: a name in a URI's fragment, its slashes and tildes escaped.
    if unquote(name).replace("~1", "/").replace("~0", "~") not in known.get(keyword, ()):
        told = f"{place}.$ref: a call is forced, so it may refer to definitions of its own schema alone"
        raise InvalidRequestError(f"{told}; it is {reference[:64]!r}.", place)
    return f"#/{keyword}/{prefix}{way}"


def _rewritten(value: Any, renamed: Callable[[object, str], object], place: str) -> Any:
    """Return a schema, or a list of them, with all its references renamed."""
    if isinstance(value, list):
        return [_rewritten(part, renamed, f"{place}[{index}]") for index, part in enumerate(value)]
    if not isinstance(value, dict):
        return value
    found: Schema = {}
    for keyword, part in value.items():
        if keyword == "$ref":
            found[keyword] = renamed(part, place)
        elif keyword in _DATA:
            found[keyword] = part
        elif keyword in _BY_NAME and isinstance(part, dict):
            found[keyword] = {
                name: _rewritten(inner, renamed, f"{place}.{keyword}.{name}") for name, inner in part.items()
            }
        else:
            found[keyword] = _rewritten(part, renamed, f"{place}.{keyword}")
    return found
