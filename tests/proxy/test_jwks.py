"""Check which key sets are taken: files of the operator's own, and sets that an issuer publishes."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.jwks import load_key_set
from proxy.jws import decode_base64url
from proxy.keys import KeyFault
from tests.proxy.signing import ALGORITHMS, KEY_IDS, encode_part, key_entry, public_jwk, sign

PUBLIC = ("RS256", "ES256", "EdDSA")


def fault(value: object, *, published: bool = False) -> str:
    with pytest.raises(KeyFault) as caught:
        load_key_set(value, published=published)
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_jwk_verifies_what_its_half_signed(algorithm: str) -> None:
    jwk = public_jwk(algorithm)
    signed, _, signature = sign({}, by=algorithm).rpartition(".")
    (key,) = load_key_set({"keys": [jwk]}, published=False).values()
    assert key.algorithm == algorithm
    assert key.verify(signed.encode(), decode_base64url(signature))


def test_a_file_holds_keys_by_id_or_as_a_list() -> None:
    by_id = load_key_set({"keys": {KEY_IDS[name]: key_entry(name) for name in PUBLIC}}, published=False)
    listed = load_key_set({"keys": [public_jwk(name) for name in PUBLIC]}, published=False)
    assert {key_id: key.algorithm for key_id, key in by_id.items()} == {
        key_id: key.algorithm for key_id, key in listed.items()
    }


def test_an_algorithm_that_is_not_named_follows_from_the_type() -> None:
    jwks = [{name: member for name, member in public_jwk(kind).items() if name != "alg"} for kind in PUBLIC]
    for published in (True, False):
        keys = load_key_set({"keys": jwks}, published=published)
        assert [key.algorithm for key in keys.values()] == list(PUBLIC)


def test_a_key_that_does_not_say_what_it_is_for_verifies() -> None:
    jwk = {name: member for name, member in public_jwk("RS256").items() if name != "use"}
    for published in (True, False):
        assert set(load_key_set({"keys": [jwk]}, published=published)) == {"rs-1"}


def test_what_an_issuer_publishes_for_something_else_is_left_out() -> None:
    others = [
        public_jwk("RS256", use="enc", alg="RSA-OAEP", kid="encryption"),
        {**public_jwk("RS256", use="enc", kid="unnamed"), "alg": None},
        public_jwk("RS256", alg="RS512", kid="longer"),
        {"kty": "EC", "crv": "P-384", "x": "x", "y": "y", "use": "sig", "kid": "curve"},
        {"kty": "AKP", "alg": "ML-DSA-44", "pub": "x"},
    ]
    published = load_key_set(
        {"keys": [*others, public_jwk("ES256", x5t="x", issuer="y")], "issuer": "z"}, published=True
    )
    assert list(published) == ["es-1"]
    for other in others:
        assert fault({"keys": [other, public_jwk("ES256")]}), "in a file of one's own it is a mistake"
        assert fault({"keys": [other]}, published=True) == "keys: must hold 1 to 64 keys, this one holds 0"


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use": "enc"}, "keys[0].use: must be sig for a key that verifies"),
        ({"use": None}, "keys[0].use: must be sig for a key that verifies"),
        ({"key_ops": ["sign"]}, "keys[0].key_ops: must be verify alone for a key that verifies"),
        ({"key_ops": ["verify", "encrypt"]}, "keys[0].key_ops: must be verify alone for a key that verifies"),
        ({"key_ops": "verify"}, "keys[0].key_ops: must be verify alone for a key that verifies"),
        ({"key_ops": []}, "keys[0].key_ops: must be verify alone for a key that verifies"),
        ({"alg": "ES256"}, "keys[0].alg: must be RS256 for a key of the type RSA"),
        ({"alg": 7}, "keys[0].alg: must be RS256 for a key of the type RSA"),
        ({"alg": 7, "use": "enc"}, "keys[0].alg: must be RS256 for a key of the type RSA"),
        ({"kty": "EC"}, None),
        ({"kty": "rsa"}, "keys[0].kty: must be RSA, EC, OKP or oct"),
        ({"kty": ["RSA"]}, "keys[0].kty: must be RSA, EC, OKP or oct"),
        ({"d": "AQAB"}, "keys[0].d: belongs to a private key, which is nobody's but the issuer's"),
        ({"kid": ""}, "keys[0].kid: a key id is 1 to 64 characters of A-Z a-z 0-9 . _ -"),
        ({"kid": 1}, "keys[0].kid: a key id is 1 to 64 characters of A-Z a-z 0-9 . _ -"),
        ({"n": 1}, "keys[0].n: must be a string"),
        ({"n": "AQAB="}, "keys[0]: is not a key of the type RSA"),
        ({"e": "AQ"}, "keys[0]: is not a key of the type RSA"),
        ({"e": "AQE"}, "keys[0]: an RSA exponent is odd and at least 65537"),
    ],
)
def test_a_contradiction_refuses_the_set(change: dict[str, Any], told: str | None, published: bool) -> None:
    found = fault({"keys": [public_jwk("RS256", **change), public_jwk("ES256")]}, published=published)
    assert told is None or found == told


@pytest.mark.parametrize(
    ("jwk", "told"),
    [
        (public_jwk("ES256", crv="P-384"), "keys[0].crv: must be P-256"),
        (public_jwk("ES256", x=public_jwk("EdDSA")["x"]), "keys[0]: is not a key of the type EC"),
        (public_jwk("ES256", x=public_jwk("ES256")["x"] + "AA"), "keys[0]: is not a key of the type EC"),
        (
            public_jwk("ES256", x=encode_part(bytes(1) + decode_base64url(public_jwk("ES256")["x"]))),
            "keys[0]: is not a key of the type EC",
        ),
        (public_jwk("EdDSA", crv="Ed448"), "keys[0].crv: must be Ed25519"),
        (public_jwk("EdDSA", x="AAAA"), "keys[0]: is not a key of the type OKP"),
        (public_jwk("EdDSA", y="AAAA"), "keys[0].y: is no member of a JWK of the type OKP"),
        (public_jwk("HS256", k="AAAA"), "keys[0].k: an HS256 key has at least 32 bytes, this one has 3"),
        ({"kty": "oct", "k": "A" * 44, "kid": "a"}, "keys[0]: a secret needs the member alg"),
        ("text", "keys[0]: must be an object"),
    ],
)
def test_a_wrong_jwk_of_a_file_is_refused_by_member(jwk: Any, told: str) -> None:
    assert fault({"keys": [jwk]}) == told


def test_a_secret_may_say_that_it_signs_as_well() -> None:
    for operations in (["sign", "verify"], ["verify", "sign"], ["verify"]):
        load_key_set({"keys": [public_jwk("HS256", key_ops=operations)]}, published=False)
    assert fault({"keys": [public_jwk("RS256", key_ops=["sign", "verify"])]})


def test_two_keys_of_one_id_and_mixed_kinds_are_refused() -> None:
    assert fault({"keys": [public_jwk("RS256"), public_jwk("ES256", kid="rs-1")]}) == (
        "keys[1].kid: rs-1 is the id of two keys"
    )
    assert fault({"keys": [public_jwk("HS256"), public_jwk("ES256")]}) == "keys: mixes secrets with public keys"


def test_a_published_set_holds_no_secret_and_is_a_list() -> None:
    assert fault({"keys": [public_jwk("HS256")]}, published=True) == "keys[0]: is a secret in a published set"
    assert fault({"keys": {"a": key_entry("RS256")}}, published=True) == "keys: must be a list of JWKs"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "a key set is an object with the member keys"),
        ({}, "a key set is an object with the member keys"),
        (["keys"], "a key set is an object with the member keys"),
        ("keys", "a key set is an object with the member keys"),
        ({"keys": "x"}, "keys: must be a list of JWKs"),
        ({"keys": []}, "keys: must hold 1 to 64 keys, this one holds 0"),
        ({"keys": [{}] * 65}, "keys: must hold 1 to 64 keys, this one holds 65"),
        ({"keys": [public_jwk("RS256")], "more": 1}, "more: is no member of a key set"),
        ({"keys": [public_jwk("RS256")], "most": 1, "more": 1, "much": 1}, "more: is no member of a key set"),
        (
            {"keys": [public_jwk("RS256", most=1, more=1, much=1)]},
            "keys[0].more: is no member of a JWK of the type RSA",
        ),
        (
            {"keys": [public_jwk("RS256", q="AQAB", d="AQAB", p="AQAB")]},
            "keys[0].d: belongs to a private key, which is nobody's but the issuer's",
        ),
        ({"keys": [public_jwk("RS256", more=1)]}, "keys[0].more: is no member of a JWK of the type RSA"),
    ],
)
def test_another_form_is_no_key_file(value: object, told: str) -> None:
    assert fault(value) == told


def test_what_a_jwk_tells_of_its_certificates_is_not_read() -> None:
    told = {"x5u": "http://127.0.0.1:9/", "x5c": ["MIIB"], "x5t": "AAAA", "x5t#S256": "AAAA"}
    for published in (True, False):
        assert set(load_key_set({"keys": [public_jwk("RS256", **told)]}, published=published)) == {"rs-1"}


@pytest.mark.parametrize("member", ["d", "p", "q", "dp", "dq", "qi", "oth"])
def test_no_part_of_a_private_key_is_taken(member: str) -> None:
    for published in (True, False):
        told = fault({"keys": [public_jwk("RS256", **{member: "AQAB"})]}, published=published)
        assert told == f"keys[0].{member}: belongs to a private key, which is nobody's but the issuer's"
