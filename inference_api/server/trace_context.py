"""Read the trace that a call belongs to from its `traceparent` (W3C Trace Context level 1), for its log line.

Runs in PROCESS 1, the last hop: nothing is sent on from here, so a trace id is all that is kept. The proxy sends a
valid header with every call; one that came without the proxy may bring none, and gets a trace of its own.
"""

from __future__ import annotations

import re
import secrets

TRACEPARENT_HEADER = "Traceparent"

# W3C Trace Context level 1, section 3.2.2: version 00; no id of zeros alone. The proxy sends no other version.
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def read_trace_id(traceparent: str | None) -> str:
    """Return the trace id, 32 hexadecimal digits; a new one where there is none to go on with."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent is not None else None
    return found[1] if found else secrets.token_hex(16)
