"""Own key sets: what a key file or an issuer's JWKS may hold, and which of its keys verify bearers.

Pure; it reads no file and no network. It does not know policies or when a set is fetched. One wrong key refuses the
whole set: half a set would be a set that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from proxy.jws import ShapeError, decode_base64url
from proxy.keys import (
    ALGORITHMS,
    KeyFault,
    VerificationKey,
    check_key_id,
    check_num_keys,
    load_keys,
    long_secret_key,
    public_key,
)
from proxy.located_json import MemberPath

# RFC 7518 sections 6.2.2 and 6.3.2, RFC 8037 section 2: what only a private key has.
_PRIVATE_MEMBERS = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})
# RFC 7517 section 4; of these only kty, use, key_ops, alg and kid are read.
_DESCRIPTIVE_MEMBERS = frozenset({"kty", "use", "key_ops", "alg", "kid", "x5u", "x5c", "x5t", "x5t#S256"})
# RFC 7518 section 6, RFC 8037 section 2: what makes up a key of each type.
_MATERIAL_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "RSA": ("n", "e"),
    "EC": ("crv", "x", "y"),
    "OKP": ("crv", "x"),
    "oct": ("k",),
}
_ALGORITHM_OF_TYPE: Mapping[str, str] = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA", "oct": "HS256"}
_COORDINATE_BYTES = 32


def load_key_set(value: object, *, published: bool) -> dict[str, VerificationKey]:
    """Load a key file or a JWKS (RFC 7517 section 5); raise KeyFault for the first key that is wrong.

    A file of the operator's own holds `{"keys": ...}` as a policy has it, by id, or a list of JWKs, and every member
    must be known. A `published` set is a list of JWKs fetched from an issuer: it must not hold secrets; members that
    are not known, and keys that say that they are for something else, are left out (RFC 7517 sections 4 and 5).
    """
    if not isinstance(value, Mapping) or "keys" not in value:
        raise KeyFault("a key set is an object with the member keys")
    unknown = set(value) - {"keys"}
    if unknown and not published:
        raise KeyFault("is no member of a key set", (min(unknown),))
    keys = value["keys"]
    if isinstance(keys, list):
        return _load_jwks(keys, published=published)
    if published or not isinstance(keys, Mapping):
        raise KeyFault("must be a list of JWKs", ("keys",))
    return load_keys(keys)


def _load_jwks(entries: list[Any], *, published: bool) -> dict[str, VerificationKey]:
    check_num_keys(len(entries), ("keys",))
    keys: dict[str, VerificationKey] = {}
    for index, jwk in enumerate(entries):
        path: MemberPath = ("keys", index)
        if not isinstance(jwk, Mapping):
            raise KeyFault("must be an object", path)
        if published and _is_for_something_else(jwk):
            continue
        key_id = check_key_id(jwk.get("kid"), (*path, "kid"))
        if key_id in keys:
            raise KeyFault(f"{key_id} is the id of two keys", (*path, "kid"))
        keys[key_id] = _load_jwk(jwk, path, published=published)
    check_num_keys(len(keys), ("keys",))
    if len({key.algorithm == "HS256" for key in keys.values()}) > 1:
        raise KeyFault("mixes secrets with public keys", ("keys",))
    return keys


def _is_for_something_else(jwk: Mapping[str, Any]) -> bool:
    # One that says "enc" and yet names an algorithm of ours contradicts itself; that is a fault, not another purpose.
    algorithm = jwk.get("alg")
    if isinstance(algorithm, str):
        return algorithm not in ALGORITHMS
    return algorithm is None and (jwk.get("use") == "enc" or jwk.get("crv", "P-256") not in ("P-256", "Ed25519"))


def _load_jwk(jwk: Mapping[str, Any], path: MemberPath, *, published: bool) -> VerificationKey:
    kind = jwk.get("kty")
    if not isinstance(kind, str) or kind not in _MATERIAL_MEMBERS:
        raise KeyFault("must be RSA, EC, OKP or oct", (*path, "kty"))
    private = _PRIVATE_MEMBERS & set(jwk)
    if private:
        raise KeyFault("belongs to a private key, which is nobody's but the issuer's", (*path, min(private)))
    unknown = set(jwk) - _DESCRIPTIVE_MEMBERS - set(_MATERIAL_MEMBERS[kind])
    if unknown and not published:
        raise KeyFault(f"is no member of a JWK of the type {kind}", (*path, min(unknown)))
    if kind == "oct" and (published or "alg" not in jwk):
        raise KeyFault("is a secret in a published set" if published else "a secret needs the member alg", path)
    # An algorithm that is not named follows from the type: each has one here.
    algorithm = _ALGORITHM_OF_TYPE[kind]
    if jwk.get("alg", algorithm) != algorithm:
        raise KeyFault(f"must be {algorithm} for a key of the type {kind}", (*path, "alg"))
    _check_purpose(jwk, path)
    material = [jwk.get(name) for name in _MATERIAL_MEMBERS[kind]]
    for name, member in zip(_MATERIAL_MEMBERS[kind], material, strict=True):
        if not isinstance(member, str):
            raise KeyFault("must be a string", (*path, name))
    if kind == "oct":
        return long_secret_key(str(material[0]), (*path, "k"))
    return public_key(algorithm, _public_key_of(kind, jwk, path), path)


def _check_purpose(jwk: Mapping[str, Any], path: MemberPath) -> None:
    # RFC 7517 sections 4.2 and 4.3: both say what a key is for, and must agree.
    if jwk.get("use", "sig") != "sig":
        raise KeyFault("must be sig for a key that verifies", (*path, "use"))
    operations = jwk.get("key_ops", ["verify"])
    allowed = (["verify"], ["sign", "verify"], ["verify", "sign"]) if jwk["kty"] == "oct" else (["verify"],)
    if operations not in allowed:
        raise KeyFault("must be verify alone for a key that verifies", (*path, "key_ops"))


def _public_key_of(kind: str, jwk: Mapping[str, Any], path: MemberPath) -> object:
    try:
        if kind == "RSA":
            numbers = rsa.RSAPublicNumbers(_integer(jwk["e"]), _integer(jwk["n"]))
            return numbers.public_key()
        if kind == "EC":
            _check_curve(jwk, "P-256", path)
            x, y = (int.from_bytes(_coordinate(jwk[name])) for name in ("x", "y"))
            return ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key()
        _check_curve(jwk, "Ed25519", path)
        return ed25519.Ed25519PublicKey.from_public_bytes(_coordinate(jwk["x"]))
    except ValueError as fault:
        if isinstance(fault, KeyFault):
            raise
        raise KeyFault(f"is not a key of the type {kind}", path) from None


def _check_curve(jwk: Mapping[str, Any], curve: str, path: MemberPath) -> None:
    if jwk["crv"] != curve:
        raise KeyFault(f"must be {curve}", (*path, "crv"))


def _integer(encoded: str) -> int:
    return int.from_bytes(decode_base64url(encoded))


def _coordinate(encoded: str) -> bytes:
    # RFC 7518 section 6.2.1.2: the full size of the curve, leading zeros included.
    decoded = decode_base64url(encoded)
    if len(decoded) != _COORDINATE_BYTES:
        raise ShapeError("coordinate of another length")
    return decoded
