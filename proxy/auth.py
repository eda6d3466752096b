"""Own bearer authentication and the internal assertion between the proxy and the inference server.

Pure: no input or output, the clock is an argument. The proxy calls `Authenticator`; the proxy mints and the server
verifies assertions. It does not know HTTP routes, tenants' limits or where secrets are kept. No text of an error
repeats a bearer, a claim or a library's exception.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jwt

from proxy.claims import MAX_QUOTAS, AuthError, Claims, ClaimsRule, claims_from
from proxy.jws import CompactJws, ShapeError, parse_compact, parse_object
from proxy.keys import VerificationKey, load_keys, secret_key
from proxy.policy import PolicyFault, StrictPolicy, read_policy

__all__ = [
    "AuthError",
    "Authenticator",
    "Claims",
    "PolicyFault",
    "derive_internal_key",
    "mint_assertion",
    "parse_api_key",
    "parse_bearer",
    "verify_assertion",
]

AUDIENCE = "inference_api"
ASSERTION_TYPE = "internal+jwt"
ASSERTION_LIFETIME_SECONDS = 30
# Proxy and server share a host or a rack: this covers a clock step, not a badly set clock.
_ASSERTION_LEEWAY_SECONDS = 5
_MAX_SHOWN_SCHEME = 32


def parse_bearer(authorization_header: str) -> str:
    """Return the compact JWT of an Authorization header (RFC 6750 section 2.1: one space after the scheme).

    Raises AuthError: 401 when absent, of another scheme or malformed, 400 when two credentials were joined.
    """
    if not authorization_header:
        raise AuthError("authorization_missing", "Must provide Authorization header.")
    if "," in authorization_header:
        # Repeated fields are joined with commas (RFC 9110 section 5.3); no compact JWT contains one.
        raise AuthError("two_credentials", "Exactly one Authorization header is allowed.", status=400)
    scheme, _, rest = authorization_header.partition(" ")
    if scheme.lower() != "bearer":
        shown = re.sub(r"[^\x21-\x7e]", "?", scheme)[:_MAX_SHOWN_SCHEME]
        raise AuthError("wrong_scheme", f"Authorization scheme was '{shown}' instead of bearer")
    if not rest or rest.startswith((" ", "\t")):
        raise AuthError("bearer_malformed", "Authorization must be 'Bearer', one space and a JWT.")
    return rest


def parse_api_key(api_key_header: str) -> str:
    """Return the compact JWT of an X-Api-Key header, which has no scheme; raise AuthError (400) for two of them."""
    if "," in api_key_header:
        raise AuthError("two_credentials", "Exactly one X-Api-Key header is allowed.", status=400)
    return api_key_header


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Decide who calls. Immutable: new keys mean a new Authenticator."""

    keys: Mapping[str, VerificationKey]
    policy: StrictPolicy | None
    now: Callable[[], float]

    @classmethod
    def from_shared_secret(cls, secret: bytes, now: Callable[[], float]) -> Authenticator:
        """Accept HS256 bearers signed with one secret; `now` gives Unix seconds. Raises KeyFault."""
        return cls({"": secret_key(secret)}, None, now)

    @classmethod
    def from_policy(cls, policy: dict[str, Any], now: Callable[[], float]) -> Authenticator:
        """Accept bearers as a strict policy says (keys by id, issuer, audience, required claims, lifetime).

        Raises PolicyFault or KeyFault, each naming the member that is wrong. A policy whose keys lie elsewhere is made
        into an Authenticator by whoever has them.
        """
        rules = read_policy(policy)
        if rules.key_place is not None:
            raise PolicyFault("must hold the keys itself here", ("keys",))
        return cls(load_keys(policy["keys"]), rules, now)

    def authenticate(self, authorization_header: str) -> Claims:
        """Verify the header's bearer and return its claims; raise AuthError with a fixed text and a stable code."""
        return self._read_claims(self.verify(parse_bearer(authorization_header)))

    def authenticate_api_key(self, api_key_header: str) -> Claims:
        """Do the same for an X-Api-Key header, in which some clients send what others send as a bearer."""
        return self._read_claims(self.verify(parse_api_key(api_key_header)))

    def _read_claims(self, jws: CompactJws) -> Claims:
        claims = _parse_claims(jws)
        now = self.now()
        if self.policy is None:
            # An audience is optional under a shared secret, but one that names somebody else is somebody else's bearer.
            return claims_from(claims, ClaimsRule(audience=AUDIENCE), now)
        self.policy.check_claims(claims)
        return claims_from(claims, self.policy.rule, now)

    def verify(self, compact: str) -> CompactJws:
        """Check shape, header, key and signature of a compact JWS, nothing that it claims; raise AuthError (401)."""
        sizes = {}
        if self.policy is not None:
            sizes = {"max_bytes": self.policy.max_bearer_bytes, "max_header_bytes": self.policy.max_header_bytes}
        try:
            jws = parse_compact(compact, **sizes)
        except ShapeError as fault:
            raise AuthError("jwt_malformed", str(fault)) from None
        self._check_header(jws.header)
        _check_signature(self._select_key(jws.header), jws)
        return jws

    def _check_header(self, header: Mapping[str, Any]) -> None:
        allowed = {"alg", "typ", "kid"} if self.policy is None else self.policy.header_members
        # crit, b64, zip, cty, jwk, jku, x5u and x5c all end here: what is not needed is not read (RFC 8725).
        if not set(header) <= allowed:
            raise AuthError("jwt_header", "JWT header has a member that is not allowed.")
        kind = header.get("typ")
        if self.policy is not None:
            accepted = isinstance(kind, str) and _media_type(kind) == self.policy.kind
        else:
            accepted = "typ" not in header or (isinstance(kind, str) and kind.lower() == "jwt")
        if not accepted:
            raise AuthError("jwt_type", "JWT type is not accepted.")

    def _select_key(self, header: Mapping[str, Any]) -> VerificationKey:
        if "kid" in header:
            key_id = header["kid"]
            key = self.keys.get(key_id) if isinstance(key_id, str) and key_id else None
        else:
            key = next(iter(self.keys.values())) if len(self.keys) == 1 else None
        if key is None:
            raise AuthError("jwt_key", "JWT key is unknown.")
        if header.get("alg") != key.algorithm:
            raise AuthError("jwt_algorithm", "JWT algorithm is not accepted.")
        return key


def mint_assertion(key: bytes, claims: Claims, *, method: str, path: str, request_id: str, now: float) -> str:
    """Sign what the server needs to know of one request: who, and which request; valid for 30 s from `now`."""
    payload = {
        "aud": AUDIENCE,
        "iat": now,
        "exp": now + ASSERTION_LIFETIME_SECONDS,
        "htm": method,
        "htp": path,
        "rid": request_id,
        "team_id": claims.tenant,
        "token_id": claims.token_id,
        "scope": " ".join(sorted(claims.scopes)),
        "bearer_exp": claims.expires_at,
        "q": dict(claims.quotas),
    }
    assertion: str = jwt.encode(payload, key, algorithm="HS256", headers={"typ": ASSERTION_TYPE})
    return assertion


def verify_assertion(key: bytes, assertion: str, *, method: str, path: str, request_id: str, now: float) -> Claims:
    """Return the claims of an assertion minted for exactly this request; raise AuthError (401) otherwise."""
    try:
        jws = parse_compact(assertion)
    except ShapeError:
        _refuse_assertion()
    if jws.header != {"alg": "HS256", "typ": ASSERTION_TYPE}:
        _refuse_assertion()
    _check_signature(VerificationKey("HS256", key), jws)
    payload = _parse_claims(jws)
    if (payload.get("htm"), payload.get("htp"), payload.get("rid")) != (method, path, request_id):
        _refuse_assertion()
    if "iat" not in payload or "exp" not in payload or payload.get("aud") != AUDIENCE:
        _refuse_assertion()
    rule = ClaimsRule(
        audience=AUDIENCE,
        leeway_seconds=_ASSERTION_LEEWAY_SECONDS,
        max_lifetime_seconds=ASSERTION_LIFETIME_SECONDS + 1,
        expiry_claim="bearer_exp",
        # The bearer's, and the mode of its tenant's prompts, which the proxy adds.
        max_quotas=MAX_QUOTAS + 1,
    )
    return claims_from({name: value for name, value in payload.items() if value is not None}, rule, now)


def derive_internal_key(jwt_secret: bytes) -> bytes:
    """Derive the assertion key (32 bytes) from the shared secret, where no key of its own is configured.

    One step of HKDF-Expand (RFC 5869 section 2.3) with a label: an assertion never verifies as a user bearer, nor the
    reverse.
    """
    return hmac.digest(jwt_secret, b"inference_api internal assertion\x01", "sha256")


def _parse_claims(jws: CompactJws) -> dict[str, Any]:
    try:
        return parse_object(jws.payload)
    except ShapeError as fault:
        raise AuthError("jwt_malformed", str(fault)) from None


def _check_signature(key: VerificationKey, jws: CompactJws) -> None:
    try:
        valid = key.verify(jws.signing_input, jws.signature)
    except Exception:
        # A library that trips over hostile bytes has not accepted them.
        valid = False
    if not valid:
        raise AuthError("jwt_signature", "JWT signature does not verify.")


def _media_type(kind: str) -> str:
    # RFC 7515 section 4.1.9: the "application/" prefix may be left out; media types compare without case.
    return kind.lower().removeprefix("application/")


def _refuse_assertion() -> NoReturn:
    raise AuthError("assertion_invalid", "Internal assertion is not valid for this request.")
