"""Own verification keys: one id, one algorithm, one key object, loaded through a typed loader when the proxy starts.

Pure; it reads no file and no network. It does not know claims or policies. A key of the wrong kind, size or curve is
refused here, so that no request can ever choose how a key is read (RFC 8725 sections 2.1 and 3.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from proxy.jws import ShapeError, decode_base64url

# RFC 7518 section 3.2: an HMAC key is at least as long as the hash output.
MIN_SECRET_BYTES = 32
# RFC 7518 section 3.3.
MIN_RSA_BITS = 2048
KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_KEY_TYPES: Mapping[str, type] = {
    "RS256": rsa.RSAPublicKey,
    "ES256": ec.EllipticCurvePublicKey,
    "EdDSA": ed25519.Ed25519PublicKey,
}


class KeyFault(ValueError):
    """Refuse a configured key; the message names the key id and what to change, never the key."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """Bind one key object to one algorithm."""

    algorithm: str
    material: Any = field(repr=False)

    def verify(self, signing_input: bytes, signature: bytes) -> bool:
        """Check a signature in constant time where the algorithm is an HMAC."""
        return bool(jwt.get_algorithm_by_name(self.algorithm).verify(signing_input, self.material, signature))


def secret_key(secret: bytes) -> VerificationKey:
    """Make an HS256 key from raw bytes; raise KeyFault when empty or when the bytes are an asymmetric key's text."""
    if not secret:
        raise KeyFault("an HS256 secret must not be empty")
    try:
        material = jwt.get_algorithm_by_name("HS256").prepare_key(secret)
    except jwt.InvalidKeyError:
        raise KeyFault("an HS256 secret must not be a PEM or SSH public key") from None
    return VerificationKey("HS256", material)


def load_keys(configured: Mapping[str, Any]) -> dict[str, VerificationKey]:
    """Load `{kid: {"alg": ..., "k_b64url" | "public_pem": ...}}`; raise KeyFault for the first wrong one."""
    keys = {}
    for key_id, entry in configured.items():
        if KEY_ID.fullmatch(key_id) is None:
            raise KeyFault("a key id is 1 to 64 characters of A-Z a-z 0-9 . _ -")
        if not isinstance(entry, Mapping):
            raise KeyFault(f"key {key_id} must be an object")
        keys[key_id] = _load_key(key_id, entry)
    if not keys:
        raise KeyFault("at least one key is needed")
    return keys


def _load_key(key_id: str, entry: Mapping[str, Any]) -> VerificationKey:
    algorithm = entry.get("alg")
    material_name = "k_b64url" if algorithm == "HS256" else "public_pem"
    if set(entry) != {"alg", material_name} or not isinstance(entry[material_name], str):
        raise KeyFault(f"key {key_id} must have exactly the members alg and {material_name}")
    if algorithm == "HS256":
        return _load_secret(key_id, entry["k_b64url"])
    if algorithm not in _KEY_TYPES:
        raise KeyFault(f"key {key_id}: alg must be HS256, RS256, ES256 or EdDSA")
    return _load_public(key_id, str(algorithm), entry["public_pem"])


def _load_secret(key_id: str, encoded: str) -> VerificationKey:
    try:
        secret = decode_base64url(encoded)
    except ShapeError:
        raise KeyFault(f"key {key_id}: k_b64url is not base64url") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise KeyFault(f"key {key_id}: an HS256 key has at least {MIN_SECRET_BYTES} bytes, this one has {len(secret)}")
    return secret_key(secret)


def _load_public(key_id: str, algorithm: str, pem: str) -> VerificationKey:
    try:
        public = load_pem_public_key(pem.encode("utf-8"))
    except ValueError:
        raise KeyFault(f"key {key_id}: public_pem is not a PEM public key") from None
    if not isinstance(public, _KEY_TYPES[algorithm]):
        raise KeyFault(f"key {key_id}: public_pem is not a key for {algorithm}")
    if isinstance(public, rsa.RSAPublicKey) and public.key_size < MIN_RSA_BITS:
        raise KeyFault(f"key {key_id}: an RSA key has at least {MIN_RSA_BITS} bits, this one has {public.key_size}")
    if isinstance(public, ec.EllipticCurvePublicKey) and not isinstance(public.curve, ec.SECP256R1):
        raise KeyFault(f"key {key_id}: ES256 needs a key on the curve P-256")
    return VerificationKey(algorithm, public)
