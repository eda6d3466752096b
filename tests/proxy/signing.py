"""Sign bearers with all four algorithms, byte by byte as a test wants them, and say which policy they are good for.

The RSA and EC keys are Wycheproof's (tests/data/wycheproof, Apache-2.0), so that none is made at each run. Nothing here
checks anything.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

DATA = Path(__file__).parents[1] / "data"
NOW = 1_800_000_000.0
SECRET = bytes(range(32))
ALGORITHMS = ("HS256", "RS256", "ES256", "EdDSA")
KEY_IDS: Mapping[str, str] = {"HS256": "hs-1", "RS256": "rs-1", "ES256": "es-1", "EdDSA": "ed-1"}


@functools.cache
def signing_key(algorithm: str) -> Any:
    """Return the key that signs."""
    if algorithm == "HS256":
        return SECRET
    if algorithm == "EdDSA":
        return Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
    groups = json.loads((DATA / "wycheproof" / "json_web_crypto_test.json").read_text())["testGroups"]
    comment = {"RS256": "jws_rsa", "ES256": "jws_ec"}[algorithm]
    jwk = next(group["private"] for group in groups if group["comment"] == comment)
    return jwt.PyJWK(jwk, algorithm).key


@functools.cache
def public_pem(algorithm: str) -> str:
    """Return the public half as a policy holds it."""
    encoded: bytes = signing_key(algorithm).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return encoded.decode()


def public_jwk(algorithm: str, **members: object) -> dict[str, Any]:
    """Return the public half (the secret, of HS256) as a JWK."""
    if algorithm == "HS256":
        jwk: dict[str, Any] = {"kty": "oct", "k": encode_part(SECRET)}
    else:
        kind = jwt.get_algorithm_by_name(algorithm)
        jwk = kind.to_jwk(signing_key(algorithm).public_key(), as_dict=True)
        jwk.pop("key_ops", None)
    return {**jwk, "alg": algorithm, "kid": KEY_IDS[algorithm], "use": "sig", **members}


def key_entry(algorithm: str) -> dict[str, str]:
    """Return the key as a policy's `keys` has it."""
    if algorithm == "HS256":
        return {"alg": algorithm, "k_b64url": encode_part(SECRET)}
    return {"alg": algorithm, "public_pem": public_pem(algorithm)}


def policy(**members: object) -> dict[str, Any]:
    """Return a policy with a key of each algorithm; a member that is None is left out."""
    whole = {
        "leeway_s": 60,
        "max_lifetime_s": 86400,
        "max_token_bytes": 8192,
        "max_header_bytes": 512,
        "allowed_header_members": ["alg", "typ", "kid"],
        "typ": "at+jwt",
        "iss": "https://issuer.test",
        "aud": "inference_api",
        "required": ["iss", "aud", "sub", "team_id", "jti", "iat", "nbf", "exp"],
        "keys": {KEY_IDS[algorithm]: key_entry(algorithm) for algorithm in ALGORITHMS},
        **members,
    }
    return {name: member for name, member in whole.items() if member is not None}


def claims(now: float = NOW, **members: object) -> dict[str, Any]:
    """Return claims that are good for the policy; a member that is None is left out."""
    whole = {
        "iss": "https://issuer.test",
        "aud": "inference_api",
        "sub": "team-a",
        "team_id": "team-a",
        "jti": "j-1",
        "iat": now - 10,
        "nbf": now - 10,
        "exp": now + 600,
        **members,
    }
    return {name: member for name, member in whole.items() if member is not None}


def header(algorithm: str = "HS256", **members: object) -> dict[str, Any]:
    """Return a header that is good for the policy; a member that is None is left out."""
    whole = {"alg": algorithm, "typ": "at+jwt", "kid": KEY_IDS[algorithm], **members}
    return {name: member for name, member in whole.items() if member is not None}


def sign(payload: bytes | Mapping[str, Any], head: bytes | Mapping[str, Any] | None = None, by: str = "HS256") -> str:
    """Sign with the key of the algorithm `by`, whatever the header says."""
    raw_head = head if isinstance(head, bytes) else json.dumps(header(by) if head is None else head).encode()
    raw_payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    signing_input = f"{encode_part(raw_head)}.{encode_part(raw_payload)}"
    signature: bytes = jwt.get_algorithm_by_name(by).sign(signing_input.encode(), signing_key(by))
    return f"{signing_input}.{encode_part(signature)}"


def encode_part(data: bytes) -> str:
    """Encode as unpadded base64url."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
