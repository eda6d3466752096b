"""Declare one setting as a dataclass field, and parse its text within its bounds.

Used by `config.py`, in every process. Pure: knows no environment and no particular setting; a wrong text is a
SettingError that names the setting, the value and the bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from inference_api.errors import SettingError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def setting(
    default: Any,
    *names: str,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    choices: str = "",
    secret: bool = False,
) -> Any:
    """Declare a field of Settings: its default, its environment names, its bounds and one line of documentation."""
    metadata = {"names": names, "doc": doc, "low": low, "high": high, "choices": tuple(choices.split())}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


def is_true(name: str, text: str) -> bool:
    """Read a switch. Raises SettingError for what is none."""
    if text.lower() not in _TRUE | _FALSE:
        raise SettingError(f"{name}={text!r} is not a switch: use 1 or 0.")
    return text.lower() in _TRUE


def parse(name: str, text: str, field: dataclasses.Field[Any]) -> Any:
    """Parse `text` as the type of the field's default, within its bounds. Raises SettingError."""
    default, meta = field.default, field.metadata
    if isinstance(default, bool):
        return is_true(name, text)
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if isinstance(default, str):
        if meta["choices"] and text not in meta["choices"]:
            raise SettingError(f"{name}={text!r} is not one of: {', '.join(meta['choices'])}.")
        return text
    kind: type[int] | type[float] = int if isinstance(default, int) else float
    try:
        value = kind(text)
    except ValueError:
        raise SettingError(f"{name}={text!r} is not {'an integer' if kind is int else 'a number'}.") from None
    low = -math.inf if meta["low"] is None else meta["low"]
    high = math.inf if meta["high"] is None else meta["high"]
    if not low <= value <= high or math.isinf(value):
        bounds = f"{meta['low']} <= {name}" + (f" <= {meta['high']}" if meta["high"] is not None else "")
        raise SettingError(f"{name}={text} is outside bounds, {bounds}.")
    return value
