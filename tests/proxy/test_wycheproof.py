"""Run Wycheproof's four JSON Web Crypto sets through the verifier; every deviation stands here with its reason.

The sets speak of signatures alone (their payloads are no claims), so `Authenticator.verify` is what is under test. In
the set of signatures the keys are converted from JWK to what a policy file may hold; in those of keys and of crypto
they are read as key files, which is where a wrong key is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from proxy.auth import Authenticator, AuthError
from proxy.jwks import load_key_set
from proxy.jws import ShapeError, parse_compact
from proxy.keys import KeyFault, load_keys

FOLDER = Path(__file__).parents[1] / "data" / "wycheproof"
EMPTY_PAYLOAD = "a JWT has claims: an empty payload is refused by its shape"
UNSUPPORTED = "only HS256, RS256, ES256 and EdDSA keys can be configured"
LENIENT_BASE64 = "the set decodes leniently here; RFC 7515 section 2 allows no character outside the alphabet"
SAME_AS_VALID = "byte for byte the text of test 357, which is valid"

DEVIATIONS = {
    259: EMPTY_PAYLOAD,
    **dict.fromkeys([*range(264, 276), 287, 288, *range(320, 324), *range(325, 329), 346, 347, 350, 351], UNSUPPORTED),
    372: LENIENT_BASE64,
    373: LENIENT_BASE64,
    367: SAME_AS_VALID,
    370: SAME_AS_VALID,
}

KEY_DEVIATIONS = {14: UNSUPPORTED, 15: UNSUPPORTED}
"""In the sets of keys and of crypto; all other 107 cases are judged as the sets say."""


def signature_cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    groups = json.loads((FOLDER / "json_web_signature_test.json").read_text())["testGroups"]
    return [(group.get("public") or group["private"], case) for group in groups for case in group["tests"]]


def authenticator_for(jwk: dict[str, Any]) -> Authenticator:
    if jwk["kty"] == "oct":
        entry = {"alg": "HS256", "k_b64url": jwk["k"]}
    else:
        # PyJWK wants an algorithm to parse a key; ours is what the JWK itself says, or none.
        public = jwt.PyJWK(jwk, jwk.get("alg", "RS256" if jwk["kty"] == "RSA" else "ES256")).key
        pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        entry = {"alg": jwk.get("alg"), "public_pem": pem.decode()}
    return Authenticator({jwk["kid"]: load_keys({"key": entry})["key"]}, None, lambda: 0.0)


def verdict(jwk: dict[str, Any], text: str) -> str:
    try:
        authenticator_for(jwk).verify(text)
    except (AuthError, KeyFault):
        return "invalid"
    return "valid"


@pytest.mark.parametrize(("jwk", "case"), signature_cases(), ids=lambda value: str(value.get("tcId", "")))
def test_a_signature_is_judged_as_the_set_says_or_as_a_written_deviation(
    jwk: dict[str, Any], case: dict[str, Any]
) -> None:
    text = case["jws"] if isinstance(case["jws"], str) else json.dumps(case["jws"])
    agrees = verdict(jwk, text) == case["result"]
    assert agrees != (case["tcId"] in DEVIATIONS)


def test_two_deviations_are_the_same_text_as_a_valid_case() -> None:
    texts = {case["tcId"]: case["jws"] for _jwk, case in signature_cases()}
    assert texts[367] == texts[370] == texts[357]


def key_set_cases(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    groups = json.loads((FOLDER / f"json_web_{name}_test.json").read_text())["testGroups"]
    cases = []
    for group in groups:
        found = group.get("public") or group["private"]
        keys = found.get("keys", [found])
        if any(jwk["kty"] != "oct" for jwk in keys):
            # Only private halves are given for some; a verifier gets the public ones.
            keys = [{name: value for name, value in jwk.items() if name not in PRIVATE_MEMBERS} for jwk in keys]
        cases += [({"keys": keys}, case) for case in group["tests"]]
    return cases


PRIVATE_MEMBERS = {"d", "p", "q", "dp", "dq", "qi"}
KEY_CASES, CRYPTO_CASES = key_set_cases("key"), key_set_cases("crypto")


def judge_with_key_set(key_set: dict[str, Any], case: dict[str, Any]) -> str:
    try:
        keys = load_key_set(key_set, published=False)
        Authenticator(keys, None, lambda: 0.0).verify(case["jws"] if isinstance(case["jws"], str) else str(case["jws"]))
    except (AuthError, KeyFault):
        return "invalid"
    return "valid"


@pytest.mark.parametrize(("key_set", "case"), KEY_CASES, ids=lambda value: str(value.get("tcId", "")))
def test_a_key_set_is_judged_as_the_set_says_or_as_a_written_deviation(
    key_set: dict[str, Any], case: dict[str, Any]
) -> None:
    agrees = judge_with_key_set(key_set, case) == case["result"]
    assert agrees != (case["tcId"] in KEY_DEVIATIONS)


@pytest.mark.parametrize(
    ("key_set", "case"),
    [(key_set, case) for key_set, case in CRYPTO_CASES if "jws" in case],
    ids=lambda value: str(value.get("tcId", "")),
)
def test_a_signed_text_of_the_crypto_set_is_judged_as_it_says(key_set: dict[str, Any], case: dict[str, Any]) -> None:
    assert judge_with_key_set(key_set, case) == case["result"]


def test_the_sets_are_whole() -> None:
    num_signed = sum("jws" in case for _keys, case in CRYPTO_CASES)
    assert (len(signature_cases()), len(KEY_CASES), len(CRYPTO_CASES), num_signed) == (401, 26, 83, 49)
    for case in [case for _keys, case in CRYPTO_CASES if "jwe" in case]:
        with pytest.raises(ShapeError):
            parse_compact(str(case["jwe"]))


@pytest.mark.parametrize("case_id", [1, 4, 7, 8, 9, 10, 16, 21, 22])
def test_a_wrong_key_set_is_refused_before_any_bearer_is_seen(case_id: int) -> None:
    (key_set,) = [key_set for key_set, case in KEY_CASES if case["tcId"] == case_id]
    with pytest.raises(KeyFault):
        load_key_set(key_set, published=False)


def test_every_encrypted_text_is_refused_by_its_shape() -> None:
    groups = json.loads((FOLDER / "json_web_encryption_test.json").read_text())["testGroups"]
    texts = [case["jwe"] for group in groups for case in group["tests"]]
    assert len(texts) == 139
    for text in texts:
        with pytest.raises(ShapeError):
            parse_compact(text if isinstance(text, str) else json.dumps(text))
