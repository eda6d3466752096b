"""Own verification keys: one id, one algorithm, one key object, loaded through a typed loader before it is used.

Pure; it reads no file and no network. It does not know claims, policies or JWKs. A key of the wrong kind, size or curve
is refused here, so that no request can ever choose how a key is read (RFC 8725 sections 2.1 and 3.1).
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
from proxy.located_json import MemberFault, MemberPath

# RFC 7518 section 3.2: an HMAC key is at least as long as the hash output.
MIN_SECRET_BYTES = 32
# RFC 7518 section 3.3.
MIN_RSA_BITS = 2048
# A check of a signature costs the square of this; nobody signs bearers with more.
MAX_RSA_BITS = 8192
# FIPS 186-5 section 5.4: an odd exponent of more than 16 bits.
_MIN_RSA_EXPONENT = 65537
KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Issuers publish a handful; each costs memory, and a set is searched by id alone.
MAX_KEYS = 64

_KEY_TYPES: Mapping[str, type] = {
    "RS256": rsa.RSAPublicKey,
    "ES256": ec.EllipticCurvePublicKey,
    "EdDSA": ed25519.Ed25519PublicKey,
}
ALGORITHMS = ("HS256", *_KEY_TYPES)

# Nemec et al., "The Return of Coppersmith's Attack" (CCS 2017), section 2: primes made by the broken generator are
# powers of 65537 modulo each of these, and so is their product. A sound modulus passes for one once in 2^27.
_ROCA_GENERATOR = 65537
# 3, 5 and 7 would tell nothing: every number is a power there. Two tuples, or the formatter gives each number a line.
_ROCA_PRIMES: tuple[int, ...] = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_ROCA_PRIMES += (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167)


class KeyFault(MemberFault):
    """Refuse a configured key; the message names the member and what to change, never the key."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """Bind one key object to one algorithm."""

    algorithm: str
    material: Any = field(repr=False)

    def verify(self, signing_input: bytes, signature: bytes) -> bool:
        """Check a signature in constant time where the algorithm is an HMAC."""
        return bool(jwt.get_algorithm_by_name(self.algorithm).verify(signing_input, self.material, signature))


KeySet = Mapping[str, VerificationKey]


def secret_key(secret: bytes, path: MemberPath = ()) -> VerificationKey:
    """Make an HS256 key from raw bytes; raise KeyFault when empty or when the bytes are an asymmetric key's text."""
    if not secret:
        raise KeyFault("an HS256 secret must not be empty", path)
    try:
        material = jwt.get_algorithm_by_name("HS256").prepare_key(secret)
    except jwt.InvalidKeyError:
        raise KeyFault("an HS256 secret must not be a PEM or SSH public key", path) from None
    return VerificationKey("HS256", material)


def long_secret_key(encoded: str, path: MemberPath) -> VerificationKey:
    """Make an HS256 key from base64url of at least 32 bytes; raise KeyFault."""
    try:
        secret = decode_base64url(encoded)
    except ShapeError:
        raise KeyFault("is not unpadded base64url", path) from None
    if len(secret) < MIN_SECRET_BYTES:
        raise KeyFault(f"an HS256 key has at least {MIN_SECRET_BYTES} bytes, this one has {len(secret)}", path)
    return secret_key(secret, path)


def public_key(algorithm: str, public: object, path: MemberPath) -> VerificationKey:
    """Bind a public key to its algorithm; raise KeyFault for one of another kind, size or curve, or a weak one."""
    if not isinstance(public, _KEY_TYPES[algorithm]):
        raise KeyFault(f"is not a key for {algorithm}", path)
    if isinstance(public, rsa.RSAPublicKey):
        _check_rsa(public, path)
    if isinstance(public, ec.EllipticCurvePublicKey) and not isinstance(public.curve, ec.SECP256R1):
        raise KeyFault("ES256 needs a key on the curve P-256", path)
    return VerificationKey(algorithm, public)


def load_keys(configured: Mapping[str, Any], path: MemberPath = ("keys",)) -> dict[str, VerificationKey]:
    """Load `{kid: {"alg": ..., "k_b64url" | "public_pem": ...}}`; raise KeyFault for the first wrong one."""
    check_num_keys(len(configured), path)
    return {key_id: _load_key(key_id, entry, (*path, key_id)) for key_id, entry in configured.items()}


def check_num_keys(num_keys: int, path: MemberPath) -> None:
    """Raise KeyFault for an empty set and for one that is too large."""
    if not 1 <= num_keys <= MAX_KEYS:
        raise KeyFault(f"must hold 1 to {MAX_KEYS} keys, this one holds {num_keys}", path)


def check_key_id(key_id: object, path: MemberPath) -> str:
    """Return a key id; raise KeyFault for anything that a header could not name."""
    if not isinstance(key_id, str) or KEY_ID.fullmatch(key_id) is None:
        raise KeyFault("a key id is 1 to 64 characters of A-Z a-z 0-9 . _ -", path)
    return key_id


def _load_key(key_id: str, entry: object, path: MemberPath) -> VerificationKey:
    check_key_id(key_id, path)
    if not isinstance(entry, Mapping):
        raise KeyFault("must be an object", path)
    algorithm = entry.get("alg")
    if algorithm not in ALGORITHMS:
        raise KeyFault("must be HS256, RS256, ES256 or EdDSA", (*path, "alg"))
    material_name = "k_b64url" if algorithm == "HS256" else "public_pem"
    unknown = set(entry) - {"alg", material_name}
    if unknown:
        raise KeyFault(f"is no member of a key for {algorithm}", (*path, min(unknown)))
    material = entry.get(material_name)
    if not isinstance(material, str):
        raise KeyFault("must be a string", (*path, material_name))
    if algorithm == "HS256":
        return long_secret_key(material, (*path, material_name))
    return _load_public_pem(str(algorithm), material, (*path, material_name))


def _load_public_pem(algorithm: str, pem: str, path: MemberPath) -> VerificationKey:
    try:
        public = load_pem_public_key(pem.encode("utf-8"))
    except Exception:
        # What the loader raises for a damaged or exotic key is not one family.
        raise KeyFault("is not a PEM public key", path) from None
    return public_key(algorithm, public, path)


def _check_rsa(public: rsa.RSAPublicKey, path: MemberPath) -> None:
    if not MIN_RSA_BITS <= public.key_size <= MAX_RSA_BITS:
        bounds = f"{MIN_RSA_BITS} to {MAX_RSA_BITS}"
        raise KeyFault(f"an RSA key has {bounds} bits, this one has {public.key_size}", path)
    numbers = public.public_numbers()
    if numbers.e < _MIN_RSA_EXPONENT or numbers.e % 2 == 0:
        raise KeyFault(f"an RSA exponent is odd and at least {_MIN_RSA_EXPONENT}", path)
    if _has_roca_fingerprint(numbers.n):
        raise KeyFault("is an RSA key of a broken generator (ROCA, CVE-2017-15361)", path)


def _has_roca_fingerprint(modulus: int) -> bool:
    return all(modulus % prime in _powers_modulo(prime) for prime in _ROCA_PRIMES)


def _powers_modulo(prime: int) -> set[int]:
    powers: set[int] = set()
    power = 1
    while power not in powers:
        powers.add(power)
        power = power * _ROCA_GENERATOR % prime
    return powers
