"""Check the strict policy with all four algorithms: which header, key and signature go together, and fixed texts."""

from __future__ import annotations

import base64
import hmac
import json
from typing import Any

import pytest

from proxy.auth import Authenticator, AuthError, PolicyFault
from tests.proxy.signing import (
    ALGORITHMS,
    KEY_IDS,
    NOW,
    claims,
    encode_part,
    header,
    key_entry,
    policy,
    public_pem,
    sign,
)

STRICT = Authenticator.from_policy(policy(), lambda: NOW)

TEXTS = {
    "jwt_header": "JWT header has a member that is not allowed.",
    "jwt_type": "JWT type is not accepted.",
    "jwt_key": "JWT key is unknown.",
    "jwt_algorithm": "JWT algorithm is not accepted.",
    "jwt_signature": "JWT signature does not verify.",
    "jwt_malformed": "JWT is not valid JSON.",
    "jwt_issuer": "JWT issuer is not accepted.",
}


def outcome(compact: str, authenticator: Authenticator = STRICT) -> str:
    """Return the tenant, or the code of a refusal whose text must be the fixed one."""
    try:
        return authenticator.authenticate(f"Bearer {compact}").tenant
    except AuthError as fault:
        refused = fault
    assert (refused.status, refused.message) == (401, TEXTS[refused.code])
    return refused.code


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_gets_in_with_its_own_key(algorithm: str) -> None:
    assert outcome(sign(claims(), by=algorithm)) == "team-a"
    assert outcome(sign(claims(), by=algorithm)[:-4] + "AAAA") == "jwt_signature"
    assert outcome(sign(claims(iss="x"), by=algorithm)) == "jwt_issuer"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("other", ALGORITHMS)
def test_a_key_is_bound_to_one_algorithm_and_one_id(algorithm: str, other: str) -> None:
    if algorithm == other:
        return
    for signer in (algorithm, other):
        assert outcome(sign(claims(), header(algorithm, alg=other), by=signer)) == "jwt_algorithm"
        assert outcome(sign(claims(), header(algorithm, kid=KEY_IDS[other]), by=signer)) == "jwt_algorithm"
    assert outcome(sign(claims(), header(algorithm), by=other)) == "jwt_signature"


@pytest.mark.parametrize("key_id", [KEY_IDS[algorithm] for algorithm in ALGORITHMS[1:]])
def test_a_public_keys_text_is_never_a_secret(key_id: str) -> None:
    pem = public_pem(next(algorithm for algorithm in ALGORITHMS if KEY_IDS[algorithm] == key_id))
    body = "".join(pem.splitlines()[1:-1])
    texts = [pem, pem.strip(), pem.replace("\n", "\r\n"), f" {pem}", body, f" {body}", body + "\n"]
    for secret in [*(text.encode() for text in texts), base64.b64decode(body), b""]:
        for claimed in (key_id, "hs-1"):
            head = json.dumps({"alg": "HS256", "typ": "at+jwt", "kid": claimed}).encode()
            signed = f"{encode_part(head)}.{encode_part(json.dumps(claims()).encode())}"
            compact = f"{signed}.{encode_part(hmac.digest(secret, signed.encode(), 'sha256'))}"
            assert outcome(compact) == ("jwt_algorithm" if claimed == key_id else "jwt_signature")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("members", "code"),
    [
        *(
            ({"alg": value}, "jwt_algorithm")
            for value in (
                "none",
                "None",
                "nOnE",
                "",
                None,
                ["HS256"],
                7,
                {},
                "hs256",
                "HS384",
                "RS512",
                "PS256",
                "Ed25519",
            )
        ),
        *(
            ({"kid": value}, "jwt_key")
            for value in ("HS-1", "hs-1 ", "hs-1\0", "../hs-1", "' OR 1=1 --", "", 1, ["hs-1"], {}, True, None)
        ),
        *(
            ({"typ": value}, "jwt_type")
            for value in ("JWT", "at+jwt ", "text/at+jwt", "application/application/at+jwt", "", None, 1, ["at+jwt"])
        ),
        *(
            ({name: value}, "jwt_header")
            for name, values in {
                "crit": ([], ["b64"], ["exp"], "b64", None),
                "b64": (True, False, "false", 0, None),
                "zip": ("DEF",),
                "cty": ("JWT",),
                "jku": ("http://127.0.0.1:9/",),
                "x5u": ("http://127.0.0.1:9/",),
                "x5c": ([],),
                "jwk": ({"kty": "oct", "k": ""},),
                "Alg": ("HS256",),
                "": (1,),
            }.items()
            for value in values
        ),
    ],
    ids=str,
)
def test_a_wrong_header_is_refused_under_the_right_signature(
    algorithm: str, members: dict[str, Any], code: str
) -> None:
    head = {**header(algorithm), **members}
    assert outcome(sign(claims(), head, by=algorithm)) == code


def test_a_header_needs_type_algorithm_and_among_several_keys_an_id() -> None:
    assert outcome(sign(claims(), header(typ=None))) == "jwt_type"
    assert outcome(sign(claims(), header(kid=None))) == "jwt_key"
    without_algorithm = {"typ": "at+jwt", "kid": "hs-1"}
    assert outcome(sign(claims(), without_algorithm)) == "jwt_algorithm"
    alone = Authenticator.from_policy(policy(keys={"es-1": key_entry("ES256")}), lambda: NOW)
    assert outcome(sign(claims(), header("ES256", kid=None), by="ES256"), alone) == "team-a"
    assert outcome(sign(claims(), header("ES256", kid=""), by="ES256"), alone) == "jwt_key"
    assert outcome(sign(claims(), header(kid=None)), alone) == "jwt_algorithm"


@pytest.mark.parametrize("kind", ["at+jwt", "AT+JWT", "application/at+jwt", "Application/At+Jwt"])
def test_a_type_is_a_media_type(kind: str) -> None:
    assert outcome(sign(claims(), header(typ=kind))) == "team-a"


def test_a_policy_may_allow_fewer_header_members_and_sizes() -> None:
    narrow = Authenticator.from_policy(
        policy(allowed_header_members=["alg", "typ"], keys={"hs-1": key_entry("HS256")}), lambda: NOW
    )
    assert outcome(sign(claims(), header(kid=None)), narrow) == "team-a"
    assert outcome(sign(claims()), narrow) == "jwt_header"
    good = sign(claims())
    head = json.dumps(header()).encode()
    for members in ({"max_token_bytes": len(good)}, {"max_header_bytes": len(head)}):
        exact = Authenticator.from_policy(policy(**members), lambda: NOW)
        assert outcome(good, exact) == "team-a"
        ((name, size),) = members.items()
        small = Authenticator.from_policy(policy(**{name: size - 1}), lambda: NOW)
        with pytest.raises(AuthError, match=r"JWT( header)? is too long\."):
            small.authenticate(f"Bearer {good}")


def test_a_signature_is_checked_before_the_claims_are_read() -> None:
    forged = sign(b"{not json", header())[:-4] + "AAAA"
    assert outcome(forged) == "jwt_signature"
    assert outcome(sign(b"{not json", header())) == "jwt_malformed"


def test_a_library_that_raises_has_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(*_arguments: object) -> bool:
        raise TypeError("planted")

    good = sign(claims())
    monkeypatch.setattr("jwt.algorithms.HMACAlgorithm.verify", trip)
    assert outcome(good) == "jwt_signature"


def test_keys_that_lie_elsewhere_are_nothing_to_a_pure_policy() -> None:
    with pytest.raises(PolicyFault, match=r"^keys: must hold the keys itself here$"):
        Authenticator.from_policy(policy(keys=None, key_file="keys.json"), lambda: NOW)


def test_an_authenticator_does_not_show_its_keys() -> None:
    secret = key_entry("HS256")["k_b64url"]
    assert secret not in repr(STRICT) and "material" not in repr(STRICT)
    with pytest.raises(AttributeError):
        STRICT.keys = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("header_text", "code"),
    [
        ("", "authorization_missing"),
        ("Basic QTpC", "wrong_scheme"),
        ("Bearer", "bearer_malformed"),
        ("Bearer ", "bearer_malformed"),
        ("Bearer  a.b.c", "bearer_malformed"),
        ("Bearer \ta.b.c", "bearer_malformed"),
        ("Bearer\ta.b.c", "wrong_scheme"),
        ("Bearer a.b.c, Bearer a.b.c", "two_credentials"),
        ("Bearer a.b", "jwt_malformed"),
    ],
)
def test_each_fault_of_a_header_has_its_code(header_text: str, code: str) -> None:
    with pytest.raises(AuthError) as caught:
        STRICT.authenticate(header_text)
    assert caught.value.code == code
    assert caught.value.status == (400 if code == "two_credentials" else 401)


def test_two_keys_in_one_header_are_a_400() -> None:
    with pytest.raises(AuthError, match=r"^Exactly one X-Api-Key header is allowed\.$") as caught:
        STRICT.authenticate_api_key("a.b.c,a.b.c")
    assert (caught.value.status, caught.value.code) == (400, "two_credentials")
