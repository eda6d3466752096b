"""Read the trace that a call belongs to from its `traceparent` (W3C Trace Context level 1), for its log line and spans.

Runs in PROCESS 1, the last hop: nothing is sent on from here. The proxy sends a valid header with every call; one that
came without the proxy may bring none, and begins a trace of its own. Knows no spans.
"""

from __future__ import annotations

import dataclasses
import re
import secrets

TRACEPARENT_HEADER = "Traceparent"

# W3C Trace Context level 1, section 3.2.2: version 00; no id of zeros alone. The proxy sends no other version.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 0x01
"""Section 3.2.2.5."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A trace's id, and the caller's own id in it; a trace that begins here has no `parent_id`."""

    trace_id: str
    parent_id: str | None = None
    is_sampled: bool = False
    """Whether the caller records its part; of a trace that begins here nobody has decided."""


def read_trace(traceparent: str | None) -> Trace:
    """Return the caller's trace; a new one where there is none to go on with. Ids are hexadecimal, 32 and 16 digits."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    if found is None:
        return Trace(secrets.token_hex(16))
    return Trace(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))
