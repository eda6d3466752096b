"""Convert the members of a JSON body to Python values and check their bounds, by a table of `Field`.

Runs in a gunicorn worker. A number may be sent as text and an integer as a float without a fraction; a list or an
object of numbers is checked entry by entry, each named by its place. Every fault is an InvalidRequestError that names
the field, its value and what is allowed. Pure: knows no routes, no model and no order of checks.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from inference_api.errors import InvalidRequestError

# What Python's float() and int() take, less their underscores, padding, digits of other scripts, nan and inf.
_NUMBER_TEXT = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
_BOOLEAN_TEXTS = {"true": True, "false": False}
_MAX_SHOWN_CHARS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One JSON member: its Python type, its default (None: absent has its own meaning) and its inclusive bounds.

    A list holds token ids, or texts, and then the bounds are those of their lengths; a dict holds a number for each of
    some token ids, and the bounds are those of the numbers.
    """

    name: str
    kind: type[str] | type[int] | type[float] | type[bool] | type[list[int]] | type[dict[int, float]]
    default: float | bool | None
    summary: str
    bounds: tuple[float, float] | None = None
    max_entries: int = 0
    """Of a list or a dict."""
    entry: type[int] | type[str] = int
    """Of a list."""


def convert(field: Field, given: dict[str, object]) -> Any:
    """Return the field's default, or its value as `field.kind`; raises InvalidRequestError for another type."""
    if field.name not in given:
        return field.default
    value = given[field.name]
    if field.kind is list and isinstance(value, list):
        return [_converted(f"{field.name}[{place}]", field.entry, entry) for place, entry in enumerate(value)]
    if field.kind is dict and isinstance(value, dict):
        return _by_token_id(field.name, value)
    return _converted(field.name, field.kind, value)


def _by_token_id(name: str, value: dict[str, object]) -> dict[int, float]:
    """Convert an object whose names are token ids; JSON knows only names that are text."""
    converted: dict[int, float] = {}
    for key, number in value.items():
        token_id = _to_int(key)
        if token_id is None:
            raise InvalidRequestError(f"Parameter: {name} has the member {shown(key)}, expected token ids only.")
        if token_id in converted:
            raise InvalidRequestError(f"Parameter: {name}[{shown(token_id)}] is given more than once. Send it once.")
        converted[token_id] = _converted(f"{name}[{shown(token_id)}]", float, number)
    return converted


def _converted(name: str, kind: Any, value: object) -> Any:
    converted = _CONVERTERS[kind](value)
    if converted is None:
        raise InvalidRequestError(f"Parameter: {name} is type={type(value)}, expected {kind}")
    return converted


def _to_str(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _to_bool(value: object) -> bool | None:
    if isinstance(value, str):
        return _BOOLEAN_TEXTS.get(value)
    return value if isinstance(value, bool) else None


def _to_int(value: object) -> int | None:
    """Convert an integer, its text, or a number without a fraction: JSON has one number type, so 40.0 is 40."""
    if isinstance(value, str):
        return int(value) if _INTEGER_TEXT.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _to_float(value: object) -> float | None:
    """Convert a number or its text; an integer too large for a float becomes infinite, for its bounds to refuse."""
    if isinstance(value, str):
        return float(value) if _NUMBER_TEXT.fullmatch(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value if isinstance(value, float) else None


def _to_container(value: object) -> None:
    """Convert nothing: what is a list or an object has been taken before."""


_CONVERTERS: dict[Any, Callable[[object], object]] = {
    str: _to_str,
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    list: _to_container,
    dict: _to_container,
}


def check_bounds(field: Field, value: Any, vocab_size: int) -> None:
    """Raise InvalidRequestError if a converted value is outside its field's bounds, or an id outside the vocabulary."""
    if value is None:
        return
    if isinstance(value, list | dict) and len(value) > field.max_entries:
        raise InvalidRequestError(
            f"Parameter: {field.name} has {len(value)} entries, at most {field.max_entries} are allowed."
        )
    for name, number, (low, high) in _bounded(field, value, vocab_size):
        if not low <= number <= high:
            raise InvalidRequestError(
                f"Parameter: {name}={shown(number)} is outside bounds, {low} <= {name} <= {high}."
            )


def _bounded(field: Field, value: Any, vocab_size: int) -> Iterator[tuple[str, float, tuple[float, float]]]:
    """Yield each number of a value, with its name and its bounds."""
    ids_bounds = (0, vocab_size - 1)
    if isinstance(value, list) and field.entry is str:
        for place, text in enumerate(value):
            yield f"length of {field.name}[{place}]", len(text), field.bounds or (0, math.inf)
    elif isinstance(value, list):
        for place, token_id in enumerate(value):
            yield f"{field.name}[{place}]", token_id, ids_bounds
    elif isinstance(value, dict):
        for token_id, number in value.items():
            yield f"token id of {field.name}", token_id, ids_bounds
            yield f"{field.name}[{shown(token_id)}]", number, field.bounds or (-math.inf, math.inf)
    elif field.bounds is not None:
        yield field.name, value, field.bounds


def shown(value: object) -> str:
    """Print a value that a caller sent, as short plain ASCII: it goes into an error text."""
    text = ascii(value)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
