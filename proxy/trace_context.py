"""Own the trace that a request belongs to: W3C Trace Context level 1, the `traceparent` header.

Pure but for the random ids. A client's valid trace goes on under a parent id of this hop; what is not valid is dropped,
and the request begins a trace of its own. Knows no other header: `tracestate` is for vendors who record spans.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT_HEADER = "traceparent"

# Section 3.2.2: version, trace id, parent id and flags, in lower case; version ff and ids of zeros alone are invalid.
# Section 4.3: of a later version than 00, what follows the flags after a dash is left out.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-[\x20-\x7e]*)?"
)
_SAMPLED = 0x01
"""Section 3.2.2.5: the one flag that is defined; the others are sent as zero."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's place in a trace: whose it is, and this hop's own id in it."""

    trace_id: str
    parent_id: str
    flags: int

    def __str__(self) -> str:
        """Return the `traceparent` to send on, in version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{self.flags:02x}"


def continue_trace(traceparent: str | None) -> Trace:
    """Go on with a client's trace under a new parent id; begin one, not sampled, if it sent none that is valid."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    parent_id = _random_id(8)
    if found is None or (found[1] == "00" and found[4] is not None):
        return Trace(_random_id(16), parent_id, 0)
    return Trace(found[2], parent_id, int(found[3], 16) & _SAMPLED)


def _random_id(num_bytes: int) -> str:
    """Return an id in hexadecimal that is not zero, which would be invalid."""
    return (secrets.randbits(8 * num_bytes) or 1).to_bytes(num_bytes, "big").hex()
