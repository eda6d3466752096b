"""Own the trace that a request belongs to: W3C Trace Context level 1, the `traceparent` header.

Pure but for the random ids. A client's valid trace goes on as it came, for this hop records no span that could stand
between; what is not valid is dropped, and the request begins a trace of its own. Knows no other header: `tracestate` is
for vendors who record spans.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

TRACEPARENT_HEADER = "traceparent"

# Section 3.2.2: version, trace id, parent id and flags, in lower case; version ff and ids of zeros alone are invalid.
# Section 4.3: of a later version than 00, what follows the flags after a dash is left out.
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?"
)
_SAMPLED = 0x01
"""Section 3.2.2.5: the one flag that is defined; the others are sent as zero."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A request's place in a trace: which one, and under which span of it."""

    trace_id: str
    parent_id: str
    flags: int

    def __str__(self) -> str:
        """Return the `traceparent` to send on, in version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{self.flags:02x}"


def continue_trace(traceparent: str | None, sample_ratio: float = 0.0) -> Trace:
    """Go on with a client's trace; begin one if it sent none that is valid.

    Of those that begin here the share `sample_ratio`, 0 to 1, is marked as sampled.
    """
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    if found is None or (found[1] == "00" and found[5] is not None):
        trace_id = _random_id(16)
        # The lowest 64 bits, as OpenTelemetry's TraceIdRatioBased: all who use a ratio choose alike.
        is_sampled = int(trace_id[16:], 16) < sample_ratio * 2**64
        return Trace(trace_id, _random_id(8), _SAMPLED if is_sampled else 0)
    return Trace(found[2], found[3], int(found[4], 16) & _SAMPLED)


def _random_id(num_bytes: int) -> str:
    """Return an id in hexadecimal that is not zero, which would be invalid."""
    return (secrets.randbits(8 * num_bytes) or 1).to_bytes(num_bytes, "big").hex()
