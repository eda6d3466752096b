"""Own what an `Idempotency-Key` makes of a call: its name, its digest, and what it has in common with a repetition.

Runs in PROCESS 1. The request id and, where the caller sends none, the seed follow from tenant and key, so that any
worker makes the same of a repetition. Pure; whether a key is new, the backend alone knows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence

import msgspec

from inference_api.errors import InvalidRequestError
from inference_api.messages import IdempotencyKey, Submit

KEY_HEADER = "Idempotency-Key"
"""As draft-ietf-httpapi-idempotency-key-header-07, section 2, has it; visible text without commas, quoted or not."""

REPLAYED_HEADER = "Idempotent-Replayed"
"""As Stripe's API has it, reference "Idempotent requests"."""

MAX_KEY_CHARS = 255
"""Stripe's bound, same place."""

# RFC 9110 section 5.3: a header that is sent twice is one with a comma, and nobody knows which of the two is meant.
_KEY = re.compile(r"[!-+\--~]{1,255}", re.ASCII)
_ID_BYTES = 16
_SEED_BITS = 63


@dataclasses.dataclass(frozen=True, slots=True)
class CallKey:
    """A tenant's name for a call. `call_id` tells this one from its repetitions, `digest` from other calls."""

    tenant: str
    key: str
    digest: bytes
    call_id: str

    @property
    def request_id(self) -> str:
        """The request id that the call shares with its repetitions."""
        return f"req_{self._derived('request')[:_ID_BYTES].hex()}"

    @property
    def seed(self) -> int:
        """The seed of the draws of a call that sends none."""
        return int.from_bytes(self._derived("seed")[:8], "big") >> (64 - _SEED_BITS)

    def named(self, submits: Sequence[Submit], created: int) -> list[Submit]:
        """Return the Submits of the call with its name on them; `created` is its Unix time in seconds."""
        return [
            msgspec.structs.replace(
                submit,
                idempotency=IdempotencyKey(self.key, self.digest, part),
                created=created,
                call_id=self.call_id,
            )
            for part, submit in enumerate(submits)
        ]

    def _derived(self, what: str) -> bytes:
        # JSON's own text keeps two members apart whatever characters they hold.
        return hashlib.sha256(msgspec.json.encode(["idempotency", what, self.tenant, self.key])).digest()


def check_key(value: str, keep_seconds: float) -> str:
    """Return the header's value; raises InvalidRequestError for one that is no key, or where none is kept."""
    if not keep_seconds:
        raise InvalidRequestError(
            f"{KEY_HEADER}: is not served here, because INFERENCE_API_IDEMPOTENCY_SECONDS is 0.", KEY_HEADER
        )
    if not _KEY.fullmatch(value):
        raise InvalidRequestError(
            f"{KEY_HEADER}: must be 1 to {MAX_KEY_CHARS} visible ASCII characters without a comma, sent once;"
            f" it has {len(value)}.",
            KEY_HEADER,
        )
    return value


def call_digest(method: str, target: str, media_type: str, body: bytes) -> bytes:
    """Return the SHA-256 of what a call asks for: method, path with query, and the body byte for byte and as what."""
    return hashlib.sha256(msgspec.json.encode([method, target, media_type]) + body).digest()
