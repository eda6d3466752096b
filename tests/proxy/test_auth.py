"""Check bearer parsing and both policies with this project's vectors and Wycheproof's."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth import (
    Authenticator,
    AuthError,
    Claims,
    PolicyFault,
    parse_bearer,
)
from proxy.keys import KeyFault, load_keys

DATA = Path(__file__).parents[1] / "data"
POLICY_VECTORS = json.loads((DATA / "jwt_policy_vectors_sample.json").read_text())
POLICY = POLICY_VECTORS["policy"]
NOW = float(POLICY["clock_now"])
SECRET = b"0123456789abcdef0123456789abcdef"
KEY = b"an internal key of thirty-two bytes or more"
SHARED = Authenticator.from_shared_secret(SECRET, lambda: NOW)
STRICT = Authenticator.from_policy(POLICY, lambda: NOW)


def encode_part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def sign(payload: bytes | dict[str, Any], header: bytes | dict[str, Any] | None = None, key: bytes = SECRET) -> str:
    raw_header = header if isinstance(header, bytes) else json.dumps(header or {"alg": "HS256", "typ": "JWT"}).encode()
    raw_payload = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    signing_input = f"{encode_part(raw_header)}.{encode_part(raw_payload)}"
    return f"{signing_input}.{encode_part(hmac.digest(key, signing_input.encode(), hashlib.sha256))}"


def authenticate(compact: str) -> Claims:
    return SHARED.authenticate(f"Bearer {compact}")


def refusal(compact: str) -> str:
    with pytest.raises(AuthError) as caught:
        authenticate(compact)
    assert caught.value.status == 401
    return caught.value.code


@pytest.mark.parametrize("vector", POLICY_VECTORS["vectors"], ids=lambda v: f"{v['category']}-{v['name']}")
def test_the_strict_policy_decides_every_vector_as_written(vector: dict[str, str]) -> None:
    if vector["expected"] == "accept":
        assert STRICT.authenticate(f"Bearer {vector['token']}").tenant == "team-a"
        return
    with pytest.raises(AuthError) as caught:
        STRICT.authenticate(f"Bearer {vector['token']}")
    assert caught.value.status in (400, 401)


@pytest.mark.parametrize("vector", POLICY_VECTORS["vectors"], ids=lambda v: f"{v['category']}-{v['name']}")
def test_no_policy_vector_passes_under_another_secret(vector: dict[str, str]) -> None:
    with pytest.raises(AuthError):
        SHARED.authenticate(f"Bearer {vector['token']}")


def test_claims_are_read() -> None:
    payload = {"team_id": "t-1", "jti": "j:1", "scope": "inference metrics", "exp": NOW + 5, "q": {"rows": 3}}
    assert authenticate(sign(payload)) == Claims(
        "t-1", "j:1", frozenset({"inference", "metrics"}), NOW + 5, {"rows": 3}
    )


def test_claims_have_defaults() -> None:
    assert authenticate(sign({"team_id": "t"})) == Claims("t", None, frozenset({"inference"}), None, {})
    assert authenticate(sign({"team_id": "t", "token_id": "x", "scope": ""})).scopes == frozenset()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"exp": NOW - 60}, "jwt_expired"),
        ({"nbf": NOW + 61}, "jwt_not_yet_valid"),
        ({"iat": NOW + 61}, "jwt_not_yet_valid"),
        ({"iat": NOW, "exp": NOW - 1}, "jwt_lifetime"),
        ({"exp": "1800000000"}, "jwt_time"),
        ({"exp": True}, "jwt_time"),
        ({"exp": None}, "jwt_time"),
        ({"aud": "other"}, "jwt_audience"),
        ({"aud": ["inference_api", "other"]}, "jwt_audience"),
        ({"aud": []}, "jwt_audience"),
        ({"team_id": "Team"}, "jwt_team"),
        ({"team_id": "a\r\nb"}, "jwt_team"),
        ({"team_id": "a\n"}, "jwt_team"),
        ({"team_id": "a" * 64}, "jwt_team"),
        ({"team_id": ["a"]}, "jwt_team"),
        ({"team_id": None}, "jwt_team"),
        ({"jti": 7}, "jwt_id"),
        ({"jti": "a,b"}, "jwt_id"),
        ({"jti": "a", "token_id": "b"}, "jwt_id"),
        ({"scope": ["inference"]}, "jwt_scope"),
        ({"scope": "a  b"}, "jwt_scope"),
        ({"q": []}, "jwt_quota"),
        ({"q": {"a": {}}}, "jwt_quota"),
    ],
)
def test_a_wrong_claim_is_refused_with_its_code(change: dict[str, Any], code: str) -> None:
    assert refusal(sign({"team_id": "t", **change})) == code


def test_times_hold_within_the_leeway() -> None:
    payload = {"team_id": "t", "exp": NOW - 59, "nbf": NOW + 60, "iat": NOW - 100, "aud": ["inference_api"]}
    assert authenticate(sign(payload)).expires_at == NOW - 59


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ({"alg": "none"}, "jwt_algorithm"),
        ({"alg": ["HS256"]}, "jwt_algorithm"),
        ({"alg": "hs256"}, "jwt_algorithm"),
        ({"typ": "JWT"}, "jwt_algorithm"),
        ({"alg": "HS256", "kid": "a"}, "jwt_key"),
        ({"alg": "HS256", "kid": ""}, "jwt_key"),
        ({"alg": "HS256", "typ": "internal+jwt"}, "jwt_type"),
        ({"alg": "HS256", "typ": None}, "jwt_type"),
        ({"alg": "HS256", "crit": []}, "jwt_header"),
        ({"alg": "HS256", "b64": True}, "jwt_header"),
        ({"alg": "HS256", "zip": "DEF"}, "jwt_header"),
        ({"alg": "HS256", "jku": "http://127.0.0.1/"}, "jwt_header"),
        (b'{"alg":"HS256","\\u0061lg":"HS256"}', "jwt_malformed"),
        ('{"alg":"HS256"}'.encode("utf-16"), "jwt_malformed"),
        (b'\xef\xbb\xbf{"alg":"HS256"}', "jwt_malformed"),
        (b'["HS256"]', "jwt_malformed"),
        ({"alg": "HS256", "kid": "a" * 512}, "jwt_malformed"),
    ],
)
def test_a_wrong_header_is_refused_with_its_code(header: bytes | dict[str, Any], code: str) -> None:
    assert refusal(sign({"team_id": "t"}, header)) == code


@pytest.mark.parametrize(
    "payload",
    [
        b'{"team_id":"t","team_id":"u"}',
        b'{"team_id":"t","exp":NaN}',
        b'{"team_id":"t","exp":1e400}',
        b'{"team_id":"t","exp":' + b"9" * 21 + b"}",
        b'{"team_id":"t","x":"\\ud800"}',
        b'{"team_id":"t"} x',
        b"[" * 2000,
        b'"t"',
    ],
)
def test_a_payload_that_is_not_strict_json_is_refused(payload: bytes) -> None:
    assert refusal(sign(payload)) == "jwt_malformed"


def test_a_changed_or_respelled_bearer_is_refused() -> None:
    good = sign({"team_id": "t"})
    head, body, signature = good.split(".")
    assert refusal(sign({"team_id": "t"}, key=SECRET + b"x")) == "jwt_signature"
    assert refusal(f"{head}.{encode_part(b'{}')}.{signature}") == "jwt_signature"
    # The last of 43 characters carries two unused bits.
    last = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    twin = signature[:-1] + last[last.index(signature[-1]) ^ 1]
    for respelled in (
        f"{good}=",
        f"{good}\n",
        f" {good}",
        f"{head}.{body}.{twin}",
        f"{head}.{body}.",
        f"{good}.",
        good + "A" * 8192,
    ):
        assert refusal(respelled) in ("jwt_malformed", "bearer_malformed")


@pytest.mark.parametrize(
    ("header", "status", "message"),
    [
        ("", 401, "Must provide Authorization header."),
        ("Basic QTpC", 401, "Authorization scheme was 'Basic' instead of bearer"),
        ("\x1b[31m" + "x" * 100, 401, "Authorization scheme was '?[31m" + "x" * 27 + "' instead of bearer"),
        ("!~\x7f\x1f\xa0", 401, "Authorization scheme was '!~???' instead of bearer"),
        ("Bearer", 401, "Authorization must be 'Bearer', one space and a JWT."),
        ("Bearer  a.b.c", 401, "Authorization must be 'Bearer', one space and a JWT."),
        ("Bearer a.b.c,Bearer a.b.c", 400, "Exactly one Authorization header is allowed."),
    ],
)
def test_an_authorization_header_is_refused_with_its_golden_text(header: str, status: int, message: str) -> None:
    with pytest.raises(AuthError) as caught:
        SHARED.authenticate(header)
    assert (caught.value.status, caught.value.message) == (status, message)


@given(st.sampled_from(["Bearer", "bearer", "BEARER", "bEaReR"]), st.from_regex(r"[A-Za-z0-9_.-]+", fullmatch=True))
def test_any_case_of_bearer_and_one_space_gives_what_follows(scheme: str, compact: str) -> None:
    assert parse_bearer(f"{scheme} {compact}") == compact


def test_an_api_key_is_the_jwt_alone_and_gives_the_same_claims() -> None:
    compact = sign({"team_id": "t", "jti": "j", "scope": "inference metrics"})
    assert SHARED.authenticate_api_key(compact) == authenticate(compact)


@pytest.mark.parametrize("vector", POLICY_VECTORS["vectors"], ids=lambda v: f"{v['category']}-{v['name']}")
def test_an_api_key_is_decided_as_the_bearer_is(vector: dict[str, str]) -> None:
    if vector["expected"] == "accept":
        assert STRICT.authenticate_api_key(vector["token"]).tenant == "team-a"
        return
    with pytest.raises(AuthError) as caught:
        STRICT.authenticate_api_key(vector["token"])
    assert caught.value.status in (400, 401)


@pytest.mark.parametrize(
    ("header", "status", "code"),
    [
        ("", 401, "jwt_malformed"),
        ("secret-key", 401, "jwt_malformed"),
        (f"Bearer {sign({'team_id': 't'})}", 401, "jwt_malformed"),
        (f" {sign({'team_id': 't'})}", 401, "jwt_malformed"),
        (sign({"team_id": "t"}, key=KEY), 401, "jwt_signature"),
        (sign({"team_id": "t", "exp": NOW - 61}), 401, "jwt_expired"),
        (f"{sign({'team_id': 't'})},{sign({'team_id': 't'})}", 400, "two_credentials"),
    ],
    ids=["empty", "no jwt", "scheme", "blank", "secret", "expired", "two"],
)
def test_an_api_key_is_refused_with_a_code(header: str, status: int, code: str) -> None:
    with pytest.raises(AuthError) as caught:
        SHARED.authenticate_api_key(header)
    assert (caught.value.status, caught.value.code) == (status, code)


@given(st.text() | st.from_regex(r"[Bb]earer [A-Za-z0-9_.=, -]*", fullmatch=True))
def test_no_text_at_all_is_accepted_or_breaks_the_authenticator(header: str) -> None:
    for authenticator in (SHARED, STRICT):
        with pytest.raises(AuthError) as caught:
            authenticator.authenticate(header)
        assert len(caught.value.message) < 120 and caught.value.message.isprintable()
        with pytest.raises(AuthError) as caught:
            authenticator.authenticate_api_key(header)
        assert len(caught.value.message) < 120 and caught.value.message.isprintable()


@given(st.data())
def test_no_one_character_change_of_a_good_bearer_is_accepted(data: st.DataObject) -> None:
    good = sign({"team_id": "t", "exp": NOW + 60})
    index = data.draw(st.integers(0, len(good) - 1))
    other = data.draw(st.characters().filter(lambda character: character != good[index]))
    with pytest.raises(AuthError):
        authenticate(good[:index] + other + good[index + 1 :])


def test_no_key_id_names_the_shared_secret() -> None:
    assert set(SHARED.keys) == {""}, "an id in a header is never empty"


@pytest.mark.parametrize("secret", [b"", b"-----BEGIN PUBLIC KEY-----\nMFkw\n-----END PUBLIC KEY-----\n"])
def test_an_empty_secret_or_a_public_key_is_no_shared_secret(secret: bytes) -> None:
    with pytest.raises(KeyFault):
        Authenticator.from_shared_secret(secret, lambda: NOW)


@pytest.mark.parametrize(
    "change",
    [
        {"jwks_url": "https://issuer.test/keys"},
        {"surprise": 1},
        {"allowed_header_members": ["alg", "jku"]},
        {"iss": ""},
        {"leeway_s": True},
        {"required": "iss"},
    ],
)
def test_a_policy_that_cannot_be_kept_stops_the_start(change: dict[str, Any]) -> None:
    with pytest.raises(PolicyFault):
        Authenticator.from_policy({**POLICY, **change}, lambda: NOW)


@pytest.mark.parametrize(
    "entry",
    [
        {"alg": "HS256", "k_b64url": encode_part(b"short")},
        {"alg": "HS256", "public_pem": POLICY["keys"]["rs-1"]["public_pem"]},
        {"alg": "ES256", "public_pem": POLICY["keys"]["rs-1"]["public_pem"]},
        {"alg": "RS512", "public_pem": POLICY["keys"]["rs-1"]["public_pem"]},
        {"alg": "RS256", "public_pem": "no key"},
        {"alg": "RS256", "public_pem": POLICY["keys"]["rs-1"]["public_pem"], "use": "enc"},
    ],
)
def test_a_key_of_the_wrong_kind_stops_the_start(entry: dict[str, str]) -> None:
    with pytest.raises(KeyFault):
        load_keys({"k": entry})
