"""Own the claims of a verified JWT: which are read, what each must look like, and when they hold.

Pure; runs in the proxy and in the server. It does not know signatures, keys or headers. Numbers are numbers (a bool or
a string is refused), names become header values and storage keys only after they matched a pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

DEFAULT_SCOPE = "inference"
LEEWAY_SECONDS = 60.0

TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_REVOCATION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# RFC 6749 section 3.3: scope-token, separated by single spaces.
_SCOPES = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+(?: [\x21\x23-\x5b\x5d-\x7e]+)*")
MAX_QUOTAS = 32


class AuthError(Exception):
    """Refuse a credential: `code` is stable, `message` is fixed text, `status` is 401, or 400 for two credentials."""

    def __init__(self, code: str, message: str, status: int = 401) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status


@dataclass(frozen=True, slots=True)
class Claims:
    """Say who calls: tenant, revocation id, scopes, expiry in Unix seconds, and the quota claim `q`."""

    tenant: str
    token_id: str | None
    scopes: frozenset[str]
    expires_at: float | None
    quotas: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ClaimsRule:
    """Say how strictly times and audience are read; a None bound is not checked."""

    audience: str
    leeway_seconds: float = LEEWAY_SECONDS
    max_lifetime_seconds: float | None = None
    expiry_claim: str = "exp"
    max_quotas: int = MAX_QUOTAS


def claims_from(payload: Mapping[str, Any], rule: ClaimsRule, now: float) -> Claims:
    """Check a verified payload against the rule at `now` (Unix seconds) and return its claims; raise AuthError."""
    _check_times(payload, rule, now)
    if "aud" in payload and payload["aud"] not in (rule.audience, [rule.audience]):
        raise AuthError("jwt_audience", "JWT audience is not this service.")
    tenant = payload.get("team_id")
    if not isinstance(tenant, str) or TENANT_NAME.fullmatch(tenant) is None:
        raise AuthError("jwt_team", "JWT team_id must be 1 to 63 characters of a-z 0-9 _ -, not starting with _ or -.")
    return Claims(
        tenant=tenant,
        token_id=_revocation_id(payload),
        scopes=_scopes(payload),
        expires_at=_number(payload, rule.expiry_claim),
        quotas=_quotas(payload, rule.max_quotas),
    )


def _check_times(payload: Mapping[str, Any], rule: ClaimsRule, now: float) -> None:
    expires_at, not_before, issued_at = (_number(payload, name) for name in ("exp", "nbf", "iat"))
    if expires_at is not None and expires_at <= now - rule.leeway_seconds:
        raise AuthError("jwt_expired", "JWT has expired.")
    if not_before is not None and not_before > now + rule.leeway_seconds:
        raise AuthError("jwt_not_yet_valid", "JWT is not valid yet.")
    if issued_at is not None and issued_at > now + rule.leeway_seconds:
        raise AuthError("jwt_not_yet_valid", "JWT is not valid yet.")
    if expires_at is None or issued_at is None:
        return
    lifetime = expires_at - issued_at
    if lifetime < 0 or (rule.max_lifetime_seconds is not None and lifetime > rule.max_lifetime_seconds):
        raise AuthError("jwt_lifetime", "JWT lifetime is not accepted.")


def _number(payload: Mapping[str, Any], name: str) -> float | None:
    if name not in payload:
        return None
    value = payload[name]
    # RFC 7519 section 2: NumericDate is a JSON number; True is an int in Python only.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AuthError("jwt_time", "JWT times must be numbers.")
    return float(value)


def _revocation_id(payload: Mapping[str, Any]) -> str | None:
    if "jti" not in payload and "token_id" not in payload:
        return None
    value = payload.get("jti", payload.get("token_id"))
    if not isinstance(value, str) or _REVOCATION_ID.fullmatch(value) is None:
        raise AuthError("jwt_id", "JWT id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    if payload.get("token_id", value) != value:
        raise AuthError("jwt_id", "JWT has two different ids.")
    return value


def _scopes(payload: Mapping[str, Any]) -> frozenset[str]:
    value = payload.get("scope", DEFAULT_SCOPE)
    if value == "":
        return frozenset()
    if not isinstance(value, str) or _SCOPES.fullmatch(value) is None:
        raise AuthError("jwt_scope", "JWT scope must be words separated by single spaces.")
    return frozenset(value.split(" "))


def _quotas(payload: Mapping[str, Any], most: int) -> Mapping[str, object]:
    value = payload.get("q", {})
    if not isinstance(value, dict) or len(value) > most:
        raise AuthError("jwt_quota", "JWT quota claim must be an object of scalars.")
    # A bool is an int in Python, and a scalar.
    if not all(isinstance(member, str | int | float) for member in value.values()):
        raise AuthError("jwt_quota", "JWT quota claim must be an object of scalars.")
    return MappingProxyType(dict(value))
