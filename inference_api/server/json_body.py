"""Read a body's JSON as strictly as every surface wants it, before any of them looks at its members.

Runs in PROCESS 1. Pure; knows no member and no wording: each surface says in its own words what is wrong.
"""

from __future__ import annotations

import json


class DuplicateMemberError(ValueError):
    """Say that one object has two members of one name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def parse_json(body: bytes) -> object:
    """Return what the bytes say; raises DuplicateMemberError, and ValueError for anything that is no JSON.

    RFC 8259 section 8.1: UTF-8 without a byte order mark; json.loads would guess other encodings from bytes. NaN and
    Infinity are no JSON, but a member's bounds name them better than "malformed" does.
    """
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_refuse_duplicates, parse_constant=float)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object; of two members with one name (RFC 8259 section 4) nobody knows which one is meant."""
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            raise DuplicateMemberError(name)
        members[name] = value
    return members
