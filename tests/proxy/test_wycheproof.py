"""Run Wycheproof's signature and encryption sets through the verifier; every deviation stands here with its reason.

The sets speak of signatures alone (their payloads are no claims), so `Authenticator.verify` is what is under test. The
keys are converted from JWK to what a policy file may hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from proxy.auth import Authenticator, AuthError
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


def test_every_encrypted_text_is_refused_by_its_shape() -> None:
    groups = json.loads((FOLDER / "json_web_encryption_test.json").read_text())["testGroups"]
    texts = [case["jwe"] for group in groups for case in group["tests"]]
    assert len(texts) == 139
    for text in texts:
        with pytest.raises(ShapeError):
            parse_compact(text if isinstance(text, str) else json.dumps(text))
