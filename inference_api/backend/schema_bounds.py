"""Refuse JSON schemas whose numbers make a compiler work without end, before it sees them; PROCESS 2, pure.

A compilation cannot be stopped once it runs, so what is known to grow without bound is found here. Knows nothing of the
compiler but that.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

MAX_MULTIPLE = 1000
"""Of `multipleOf`, its numerator and its denominator: an automaton counts remainders, one state each."""


def find_excess(schema: Any) -> str | None:
    """Return what is beyond its bound, in words whose subject is the schema, or None."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            multiple = part.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool) and not _is_small(multiple):
                shown = str(multiple)[:40]
                return f"has multipleOf {shown}, of which numerator and denominator may be {MAX_MULTIPLE} at most."
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return None


def _is_small(multiple: float) -> bool:
    try:
        fraction = Fraction(str(multiple))
    except (ValueError, OverflowError):
        return False
    return abs(fraction.numerator) <= MAX_MULTIPLE and fraction.denominator <= MAX_MULTIPLE
