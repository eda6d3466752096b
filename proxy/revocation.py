"""Own the revocation list: the ids of bearers that are refused before they expire.

Pure; it takes bytes and knows no file. An id is what the claim `jti` or `token_id` says, never the text of a bearer or
a hash of it: an ES256 signature has a twin that verifies as well.
"""

from __future__ import annotations

import re

from proxy.located_json import FileFault

# The alphabet of the claim (claims.py).
_ENTRY = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
MAX_REVOKED = 100_000


def parse_revocations(raw: bytes, file: object) -> frozenset[str]:
    """Read one id a line; empty lines and lines that begin with `#` say nothing. Raise FileFault with the line."""
    revoked = set()
    for number, line in enumerate(raw.split(b"\n"), 1):
        entry = line.strip(b" \t\r")
        if not entry or entry.startswith(b"#"):
            continue
        if _ENTRY.fullmatch(entry) is None:
            raise FileFault(f"{file}:{number}: an id is 1 to 128 characters of A-Z a-z 0-9 . _ : -")
        revoked.add(entry.decode("ascii"))
        if len(revoked) > MAX_REVOKED:
            raise FileFault(f"{file}:{number}: more than {MAX_REVOKED} ids; leave out those that have expired")
    return frozenset(revoked)
