"""Check the internal assertion: what it says, for which one request it holds, and that no bearer passes for one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from types import MappingProxyType
from typing import Any

import jwt
import pytest

from proxy.auth import Authenticator, AuthError, Claims, derive_internal_key, mint_assertion, verify_assertion
from tests.proxy.signing import NOW, SECRET, sign

KEY = SECRET
HEADER = {"alg": "HS256", "typ": "internal+jwt"}


def test_an_assertion_says_to_the_server_what_the_proxy_knew() -> None:
    claims = Claims("t", "j", frozenset({"b", "a"}), NOW + 9, MappingProxyType({"rows": 3}))
    request = {"method": "POST", "path": "/inference/m", "request_id": "req_1"}
    assertion = mint_assertion(KEY, claims, **request, now=NOW)
    assert verify_assertion(KEY, assertion, **request, now=NOW + 29) == claims
    bare = Claims("t", None, frozenset(), None, {})
    assert verify_assertion(KEY, mint_assertion(KEY, bare, **request, now=NOW), **request, now=NOW) == bare


@pytest.mark.parametrize(
    "change",
    [
        {"method": "GET"},
        {"path": "/x"},
        {"request_id": "req_2"},
        {"now": NOW + 36},
        {"now": NOW - 6},
        {"key": KEY + b"x"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_assertion_holds_for_one_request_one_key_and_thirty_seconds(change: dict[str, Any]) -> None:
    request = {"method": "POST", "path": "/p", "request_id": "req_1"}
    assertion = mint_assertion(KEY, Claims("t", None, frozenset(), None, {}), **request, now=NOW)
    arguments: dict[str, Any] = {"key": KEY, **request, "now": NOW, **change}
    key = arguments.pop("key")
    with pytest.raises(AuthError) as caught:
        verify_assertion(key, assertion, **arguments)
    assert caught.value.status == 401


def test_an_assertion_has_the_form_that_both_sides_know() -> None:
    claims = Claims("t", "j", frozenset("abcdefgh"), NOW + 9, {"rows": 3})
    minted = mint_assertion(KEY, claims, method="POST", path="/p", request_id="req_1", now=NOW)
    head, payload = (json.loads(base64.urlsafe_b64decode(part + "==")) for part in minted.split(".")[:2])
    assert head == {"alg": "HS256", "typ": "internal+jwt"}
    assert payload == {
        "aud": "inference_api",
        "iat": NOW,
        "exp": NOW + 30,
        "htm": "POST",
        "htp": "/p",
        "rid": "req_1",
        "team_id": "t",
        "token_id": "j",
        "scope": "a b c d e f g h",
        "bearer_exp": NOW + 9,
        "q": {"rows": 3},
    }


def sign_assertion(payload: dict[str, object], header: dict[str, Any] | None = None) -> str:
    return sign(payload, header or HEADER)


ASSERTED: dict[str, object] = {
    "aud": "inference_api",
    "iat": NOW,
    "exp": NOW + 30,
    "htm": "POST",
    "htp": "/p",
    "rid": "req_1",
    "team_id": "t",
}


def assertion_outcome(assertion: str, now: float = NOW) -> str:
    try:
        return verify_assertion(KEY, assertion, method="POST", path="/p", request_id="req_1", now=now).tenant
    except AuthError as fault:
        return f"{fault.code}: {fault.message}"


def test_an_assertion_is_taken_to_the_second_and_to_the_quota() -> None:
    assert assertion_outcome(sign_assertion(ASSERTED), NOW - 5) == "t"
    assert assertion_outcome(sign_assertion(ASSERTED), NOW - 5.5) == "jwt_not_yet_valid: JWT is not valid yet."
    assert assertion_outcome(sign_assertion(ASSERTED), NOW + 34.5) == "t"
    assert assertion_outcome(sign_assertion(ASSERTED), NOW + 35) == "jwt_expired: JWT has expired."
    # Half a second more than the proxy writes is a rounding, a whole one is not.
    assert assertion_outcome(sign_assertion({**ASSERTED, "exp": NOW + 31})) == "t"
    told = "jwt_lifetime: JWT lifetime is not accepted."
    assert assertion_outcome(sign_assertion({**ASSERTED, "exp": NOW + 31.5})) == told
    quotas = {str(number): 1 for number in range(33)}
    assert assertion_outcome(sign_assertion({**ASSERTED, "q": quotas})) == "t"
    told = "jwt_quota: JWT quota claim must be an object of scalars."
    assert assertion_outcome(sign_assertion({**ASSERTED, "q": {**quotas, "more": 1}})) == told


@pytest.mark.parametrize(
    "assertion",
    [
        "a.b",
        sign_assertion(ASSERTED, {"alg": "HS256", "typ": "JWT"}),
        sign_assertion(ASSERTED, {"alg": "HS256", "typ": "internal+jwt", "kid": "a"}),
        sign_assertion(ASSERTED, {"typ": "internal+jwt"}),
        *(sign_assertion({**ASSERTED, name: "x"}) for name in ("htm", "htp", "rid", "aud")),
        *(
            sign_assertion({name: ASSERTED[name] for name in ASSERTED if name != left})
            for left in ASSERTED
            if left != "team_id"
        ),
    ],
)
def test_an_assertion_for_another_call_or_of_another_form_is_refused_with_one_text(assertion: str) -> None:
    told = "assertion_invalid: Internal assertion is not valid for this request."
    assert assertion_outcome(assertion) == told


def test_an_assertions_signature_and_json_are_checked_as_a_bearers_are() -> None:
    assert assertion_outcome(sign_assertion(ASSERTED)[:-4] + "AAAA") == "jwt_signature: JWT signature does not verify."
    not_json = sign(b"{not json", HEADER)
    assert assertion_outcome(not_json) == "jwt_malformed: JWT is not valid JSON."


def test_the_derived_key_is_one_step_of_hkdf_with_a_label() -> None:
    expected = hmac.new(SECRET, b"inference_api internal assertion\x01", hashlib.sha256).digest()
    assert derive_internal_key(SECRET) == expected


@pytest.mark.parametrize("change", [{"iat": None}, {"exp": None}, {"aud": None}, {"aud": "another"}])
def test_an_assertion_without_its_times_or_for_somebody_else_is_refused(change: dict[str, object]) -> None:
    request = {"method": "POST", "path": "/p", "request_id": "req_1"}
    minted = mint_assertion(KEY, Claims("t", None, frozenset(), None, {}), **request, now=NOW)
    payload = jwt.decode(minted, options={"verify_signature": False})

    def signed(claims: dict[str, object]) -> str:
        kept = {name: value for name, value in claims.items() if value is not None or name not in change}
        return jwt.encode(kept, KEY, algorithm="HS256", headers={"typ": "internal+jwt"})

    assert verify_assertion(KEY, signed(payload), **request, now=NOW).tenant == "t"
    with pytest.raises(AuthError):
        verify_assertion(KEY, signed({**payload, **change}), **request, now=NOW)


def test_bearers_and_assertions_are_never_taken_for_each_other() -> None:
    request = {"method": "POST", "path": "/p", "request_id": "req_1"}
    assertion = mint_assertion(SECRET, Claims("t", None, frozenset(), None, {}), **request, now=NOW)
    with pytest.raises(AuthError) as caught:
        Authenticator.from_shared_secret(SECRET, lambda: NOW).authenticate(f"Bearer {assertion}")
    assert caught.value.code == "jwt_type"
    forged = {
        "team_id": "t",
        "aud": "inference_api",
        "iat": NOW,
        "exp": NOW + 30,
        "htm": "POST",
        "htp": "/p",
        "rid": "req_1",
    }
    with pytest.raises(AuthError):
        verify_assertion(SECRET, sign(forged, {"alg": "HS256", "typ": "JWT"}), **request, now=NOW)
    assert len(derive_internal_key(SECRET)) == 32 and derive_internal_key(SECRET) != SECRET
