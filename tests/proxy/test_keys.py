"""Check that only sound keys of the kind that was named are taken, and that a fault names the member and no key."""

from __future__ import annotations

import base64
import contextlib
import math
import string
from typing import Any
from unittest.mock import create_autospec

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from proxy.keys import _ROCA_PRIMES, MAX_KEYS, KeyFault, load_keys, long_secret_key, public_key, secret_key
from tests.proxy.signing import ALGORITHMS, encode_part, key_entry, public_pem, signing_key

SOUND_MODULUS = signing_key("RS256").public_key().public_numbers().n


def fault(entry: Any, key_id: str = "k") -> str:
    with pytest.raises(KeyFault) as caught:
        load_keys({key_id: entry})
    return str(caught.value)


def rsa_pem(modulus: int, exponent: int = 65537) -> str:
    public = rsa.RSAPublicNumbers(exponent, modulus).public_key()
    return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_verifies_what_its_half_signed_and_nothing_else(algorithm: str) -> None:

    key = load_keys({"k": key_entry(algorithm)})["k"]
    signature = jwt.get_algorithm_by_name(algorithm).sign(b"text", signing_key(algorithm))
    assert key.algorithm == algorithm
    assert key.verify(b"text", signature) is True
    assert key.verify(b"texT", signature) is False
    assert "material" not in repr(key)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("text", "keys.k: must be an object"),
        ({}, "keys.k.alg: must be HS256, RS256, ES256 or EdDSA"),
        ({"alg": ["HS256"]}, "keys.k.alg: must be HS256, RS256, ES256 or EdDSA"),
        ({"alg": "RS512", "public_pem": "x"}, "keys.k.alg: must be HS256, RS256, ES256 or EdDSA"),
        ({"alg": "none"}, "keys.k.alg: must be HS256, RS256, ES256 or EdDSA"),
        ({"alg": "HS256"}, "keys.k.k_b64url: must be a string"),
        ({"alg": "RS256"}, "keys.k.public_pem: must be a string"),
        ({"alg": "HS256", "k_b64url": 7}, "keys.k.k_b64url: must be a string"),
        ({"alg": "HS256", "public_pem": "x"}, "keys.k.public_pem: is no member of a key for HS256"),
        ({"alg": "RS256", "k_b64url": "x"}, "keys.k.k_b64url: is no member of a key for RS256"),
        ({"alg": "HS256", "k_b64url": "a", "use": "sig"}, "keys.k.use: is no member of a key for HS256"),
        ({"alg": "HS256", "use": "sig", "zip": 1, "x": 1}, "keys.k.use: is no member of a key for HS256"),
        ({"alg": "HS256", "k_b64url": "a+b="}, "keys.k.k_b64url: is not unpadded base64url"),
        (
            {"alg": "HS256", "k_b64url": encode_part(bytes(31))},
            "keys.k.k_b64url: an HS256 key has at least 32 bytes, this one has 31",
        ),
        ({"alg": "RS256", "public_pem": "no key"}, "keys.k.public_pem: is not a PEM public key"),
        ({"alg": "RS256", "public_pem": public_pem("ES256")}, "keys.k.public_pem: is not a key for RS256"),
        ({"alg": "ES256", "public_pem": public_pem("EdDSA")}, "keys.k.public_pem: is not a key for ES256"),
        ({"alg": "EdDSA", "public_pem": public_pem("RS256")}, "keys.k.public_pem: is not a key for EdDSA"),
        (
            {"alg": "RS256", "public_pem": rsa_pem(2**2046 + 1)},
            "keys.k.public_pem: an RSA key has 2048 to 8192 bits, this one has 2047",
        ),
        (
            {"alg": "RS256", "public_pem": rsa_pem(2**8192 + 1)},
            "keys.k.public_pem: an RSA key has 2048 to 8192 bits, this one has 8193",
        ),
        (
            {"alg": "RS256", "public_pem": rsa_pem(SOUND_MODULUS, 257)},
            "keys.k.public_pem: an RSA exponent is odd and at least 65537",
        ),
    ],
)
def test_a_wrong_key_is_refused_by_member(entry: Any, told: str) -> None:
    assert fault(entry) == told


def test_an_even_exponent_is_refused_whatever_the_library_thinks_of_it() -> None:
    even = create_autospec(rsa.RSAPublicKey, instance=True, key_size=2048)
    even.public_numbers.return_value = rsa.RSAPublicNumbers(65540, SOUND_MODULUS)
    with pytest.raises(KeyFault, match=r"^a: an RSA exponent is odd and at least 65537$"):
        public_key("RS256", even, ("a",))


def test_a_key_of_a_kind_that_the_library_does_not_know_is_refused() -> None:
    # RFC 5280 section 4.1: a SubjectPublicKeyInfo with the algorithm 1.2.3.4 and no bits.
    information = base64.b64encode(bytes.fromhex("300a300506032a0304030100")).decode()
    pem = f"-----BEGIN PUBLIC KEY-----\n{information}\n-----END PUBLIC KEY-----\n"
    assert fault({"alg": "RS256", "public_pem": pem}) == "keys.k.public_pem: is not a PEM public key"


def test_keys_at_the_bounds_are_taken() -> None:
    load_keys({"k": {"alg": "HS256", "k_b64url": encode_part(bytes(32))}})
    load_keys({"k": {"alg": "RS256", "public_pem": rsa_pem(2**2047 + 1)}})
    load_keys({"k": {"alg": "RS256", "public_pem": rsa_pem(2**8191 + 1, 2**16 + 3)}})


def test_a_key_on_another_curve_is_refused() -> None:
    other = ec.derive_private_key(7, ec.SECP384R1()).public_key()
    with pytest.raises(KeyFault, match=r"^ES256 needs a key on the curve P-256$"):
        public_key("ES256", other, ())


@pytest.mark.parametrize("key_id", ["", "a b", "a/b", "é", "a\n", "x" * 65])
def test_a_key_id_that_no_header_may_name_is_refused(key_id: str) -> None:
    assert "a key id is 1 to 64 characters" in fault(key_entry("HS256"), key_id)


def test_a_key_id_is_made_of_letters_digits_and_three_marks() -> None:
    taken = set()
    for character in map(chr, range(128)):
        with contextlib.suppress(KeyFault):
            taken |= set(load_keys({character: key_entry("HS256")}))
    assert taken == set(string.ascii_letters + string.digits + "._-")
    load_keys({"x" * 64: key_entry("HS256")})


def test_sixty_four_keys_are_taken_and_one_more_or_none_are_not() -> None:
    keys = {f"k{number}": key_entry("HS256") for number in range(MAX_KEYS + 1)}
    with pytest.raises(KeyFault, match=r"^keys: must hold 1 to 64 keys, this one holds 65$"):
        load_keys(keys)
    with pytest.raises(KeyFault, match="this one holds 0"):
        load_keys({})
    keys.popitem()
    assert load_keys(keys).keys() == keys.keys()


@pytest.mark.parametrize("secret", [b"", public_pem("RS256").encode(), b"ssh-rsa AAAAB3NzaC1yc2E ="])
def test_a_public_key_is_no_secret(secret: bytes) -> None:
    with pytest.raises(KeyFault):
        secret_key(secret)
    with pytest.raises(KeyFault):
        long_secret_key(encode_part(secret), ())


def test_a_secret_that_is_no_secret_is_told() -> None:
    with pytest.raises(KeyFault, match=r"^keys\.a: an HS256 secret must not be empty$"):
        secret_key(b"", ("keys", "a"))
    with pytest.raises(KeyFault, match=r"^keys\.a: an HS256 secret must not be a PEM or SSH public key$"):
        secret_key(public_pem("RS256").encode(), ("keys", "a"))
    with pytest.raises(KeyFault, match=r"^keys\.a: an HS256 secret must not be a PEM or SSH public key$"):
        long_secret_key(encode_part(public_pem("RS256").encode()), ("keys", "a"))


def test_the_fingerprint_of_a_broken_generator_is_found_and_sound_moduli_pass() -> None:
    primes = [number for number in range(2, 168) if all(number % divisor for divisor in range(2, number))]
    assert [2, 3, 5, 7, *_ROCA_PRIMES] == primes
    primorial = math.prod(primes)
    for power in (0, 1, 12345):
        broken = pow(65537, power, primorial) + (2**2050 // primorial) * primorial
        told = "keys.k.public_pem: is an RSA key of a broken generator (ROCA, CVE-2017-15361)"
        assert fault({"alg": "RS256", "public_pem": rsa_pem(broken)}) == told
    for step in (2, 4, 8, 32):
        load_keys({"k": {"alg": "RS256", "public_pem": rsa_pem(broken + step)}})


def test_no_fault_repeats_the_key() -> None:
    encoded = encode_part(b"a secret that is short")
    assert encoded not in fault({"alg": "HS256", "k_b64url": encoded})
