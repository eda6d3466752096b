"""Own the strict policy: how bearers of an identity provider must look (issuer, audience, required claims, lifetime).

Pure; read once when the proxy starts. It does not know signatures or where the policy file lies. A member that is not
known stops the start: a rule that is silently dropped is a hole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.claims import AuthError, ClaimsRule
from proxy.jws import MAX_BEARER_BYTES, MAX_HEADER_BYTES

_KNOWN = frozenset(
    {
        "clock_now",
        "leeway_s",
        "max_lifetime_s",
        "max_token_bytes",
        "max_header_bytes",
        "allowed_header_members",
        "typ",
        "iss",
        "aud",
        "required",
        "keys",
    }
)
_READ_HEADER_MEMBERS = frozenset({"alg", "typ", "kid"})
_SUBJECT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_PROSE_AUDIENCE = re.compile(r"exactly (\S+) \(.*\)")


class PolicyFault(ValueError):
    """Refuse a policy; the message names the member and what it must be."""


@dataclass(frozen=True, slots=True)
class StrictPolicy:
    """Say what a bearer must carry beyond a valid signature."""

    issuer: str
    kind: str
    required: frozenset[str]
    header_members: frozenset[str]
    max_bearer_bytes: int
    max_header_bytes: int
    rule: ClaimsRule

    def check_claims(self, payload: Mapping[str, Any]) -> None:
        """Check required names, issuer and subject; raise AuthError. Times and tenant are the rule's part."""
        if not self.required <= set(payload):
            raise AuthError("jwt_claims", "JWT lacks a required claim.")
        if "iss" in self.required and payload["iss"] != self.issuer:
            raise AuthError("jwt_issuer", "JWT issuer is not accepted.")
        subject = payload.get("sub")
        if "sub" in self.required and (not isinstance(subject, str) or _SUBJECT.fullmatch(subject) is None):
            raise AuthError("jwt_subject", "JWT subject is not accepted.")


def read_policy(policy: Mapping[str, Any]) -> StrictPolicy:
    """Read the members of a policy object; raise PolicyFault for an unknown, missing or wrong one."""
    if "jwks_url" in policy:
        raise PolicyFault("jwks_url is not supported: list the keys under 'keys'")
    unknown = set(policy) - _KNOWN
    if unknown:
        raise PolicyFault(f"unknown policy member {min(unknown)}")
    members = frozenset(_strings(policy, "allowed_header_members"))
    if not members <= _READ_HEADER_MEMBERS:
        raise PolicyFault("allowed_header_members may only name alg, typ and kid")
    audience = _string(policy, "aud")
    # Policies say the audience in words ("exactly X (string or one-element list)"): X is what is compared.
    prose = _PROSE_AUDIENCE.fullmatch(audience)
    return StrictPolicy(
        issuer=_string(policy, "iss"),
        kind=_string(policy, "typ").lower(),
        required=frozenset(_strings(policy, "required")) | {"aud", "team_id", "exp", "iat"},
        header_members=members,
        max_bearer_bytes=int(_positive(policy, "max_token_bytes", MAX_BEARER_BYTES)),
        max_header_bytes=int(_positive(policy, "max_header_bytes", MAX_HEADER_BYTES)),
        rule=ClaimsRule(
            audience=prose.group(1) if prose else audience,
            leeway_seconds=_positive(policy, "leeway_s", 60),
            max_lifetime_seconds=_positive(policy, "max_lifetime_s", 86400),
        ),
    )


def _string(policy: Mapping[str, Any], name: str) -> str:
    value = policy.get(name)
    if not isinstance(value, str) or not value:
        raise PolicyFault(f"{name} must be a non-empty string")
    return value


def _strings(policy: Mapping[str, Any], name: str) -> list[str]:
    value = policy.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PolicyFault(f"{name} must be a list of strings")
    return value


def _positive(policy: Mapping[str, Any], name: str, default: float) -> float:
    value = policy.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise PolicyFault(f"{name} must be a positive number")
    return value
