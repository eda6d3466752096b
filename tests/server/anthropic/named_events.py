"""Read server-sent events that have a name, for the tests of a surface whose clients skip those without."""

from __future__ import annotations

import json
from typing import Any


def read_event(event: bytes) -> tuple[str, Any]:
    """Take an event apart; it must have exactly a name line and a data line."""
    name, data, *rest = event.decode().split("\n")
    assert rest == ["", ""] and name.startswith("event: ") and data.startswith("data: ")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def read_events(body: bytes) -> list[tuple[str, Any]]:
    """Take a whole stream apart."""
    *events, rest = body.split(b"\n\n")
    assert rest == b"", "the stream ends inside an event"
    return [read_event(event + b"\n\n") for event in events]
