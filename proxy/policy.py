"""Own the strict policy: how bearers of an identity provider must look (issuer, audience, required claims, lifetime).

Pure. It does not know signatures, or where the policy file lies and when it is read. A member that is not known refuses
the whole policy: a rule that is silently dropped is a hole.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from proxy.claims import AuthError, ClaimsRule
from proxy.jws import MAX_BEARER_BYTES, MAX_HEADER_BYTES
from proxy.located_json import MemberFault

_KEY_MEMBERS = frozenset({"keys", "key_file", "jwks_url"})
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
        "jwks_ca_file",
    }
    | _KEY_MEMBERS
)
_READ_HEADER_MEMBERS = frozenset({"alg", "typ", "kid"})
_SUBJECT = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
# RFC 3986 section 2: the characters of a URL.
_URL = re.compile(r"https?://[A-Za-z0-9._~:/?@!$&'()*+,;=%\[\]-]{1,2000}")
_PROSE_AUDIENCE = re.compile(r"exactly (\S+) \(.*\)")


class PolicyFault(MemberFault):
    """Refuse a policy; the message names the member and what it must be."""


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Say where keys lie that the policy does not hold itself: a file, or a URL that is fetched."""

    file: str = ""
    url: str = ""
    ca_file: str = ""
    """Certificates that the URL's host is checked against; the list that `requests` comes with if empty."""


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
    key_place: KeyPlace | None
    """None where the policy lists its keys itself."""

    def check_claims(self, payload: Mapping[str, Any]) -> None:
        """Check required names, issuer and subject; raise AuthError. Times and tenant are the rule's part."""
        if not self.required <= set(payload):
            raise AuthError("jwt_claims", "JWT lacks a required claim.")
        # What is not required may be missing; what is there must be right.
        if payload.get("iss", self.issuer) != self.issuer:
            raise AuthError("jwt_issuer", "JWT issuer is not accepted.")
        subject = payload.get("sub")
        if "sub" in payload and (not isinstance(subject, str) or _SUBJECT.fullmatch(subject) is None):
            raise AuthError("jwt_subject", "JWT subject is not accepted.")


def read_policy(policy: Mapping[str, Any]) -> StrictPolicy:
    """Read the members of a policy object; raise PolicyFault for an unknown, missing or wrong one."""
    unknown = set(policy) - _KNOWN
    if unknown:
        raise PolicyFault("is no member of a policy", (min(unknown),))
    members = frozenset(_strings(policy, "allowed_header_members"))
    if not members <= _READ_HEADER_MEMBERS:
        raise PolicyFault("may only name alg, typ and kid", ("allowed_header_members",))
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
        key_place=_key_place(policy),
    )


def _key_place(policy: Mapping[str, Any]) -> KeyPlace | None:
    named = _KEY_MEMBERS & set(policy)
    if len(named) != 1:
        raise PolicyFault("exactly one of the members keys, key_file and jwks_url is needed", tuple(sorted(named)[:1]))
    ca_file = _string(policy, "jwks_ca_file") if "jwks_ca_file" in policy else ""
    if ca_file and not str(policy.get("jwks_url")).startswith("https:"):
        raise PolicyFault("goes with an https jwks_url alone", ("jwks_ca_file",))
    if "keys" in named:
        if not isinstance(policy["keys"], Mapping):
            raise PolicyFault("must be an object", ("keys",))
        return None
    if "key_file" in named:
        return KeyPlace(file=_string(policy, "key_file"))
    url = _string(policy, "jwks_url")
    if url.startswith("file:///"):
        return KeyPlace(file=url.removeprefix("file://"))
    _check_url(url)
    return KeyPlace(url=url, ca_file=ca_file)


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        # A fragment is no matter of these parts: `_URL` knows no "#".
        valid = parts.port != 0 and bool(host) and parts.username is None
    except ValueError:
        valid, parts, host = False, urlsplit(""), ""
    if not valid or _URL.fullmatch(url) is None:
        raise PolicyFault("must be an https URL without a user or a fragment", ("jwks_url",))
    # Whoever answers here decides who gets in: without TLS that is anybody on the way.
    if parts.scheme == "http" and not _is_loopback(host):
        raise PolicyFault("must be https, or http to a loopback address", ("jwks_url",))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _string(policy: Mapping[str, Any], name: str) -> str:
    value = policy.get(name)
    if not isinstance(value, str) or not value:
        raise PolicyFault("must be a non-empty string", (name,))
    return value


def _strings(policy: Mapping[str, Any], name: str) -> list[str]:
    value = policy.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PolicyFault("must be a list of strings", (name,))
    return value


def _positive(policy: Mapping[str, Any], name: str, default: float) -> float:
    value = policy.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PolicyFault("must be a positive number", (name,))
    return value
