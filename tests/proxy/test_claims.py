"""Check each claim at its bounds, and that a refusal has its fixed text and code."""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proxy.claims import AuthError, Claims, ClaimsRule, claims_from

NOW = 1_800_000_000.0
RULE = ClaimsRule("inference_api")
STRICT = ClaimsRule("inference_api", leeway_seconds=10, max_lifetime_seconds=100)

TEXTS = {
    "jwt_audience": "JWT audience is not this service.",
    "jwt_team": "JWT team_id must be 1 to 63 characters of a-z 0-9 _ -, not starting with _ or -.",
    "jwt_expired": "JWT has expired.",
    "jwt_not_yet_valid": "JWT is not valid yet.",
    "jwt_lifetime": "JWT lifetime is not accepted.",
    "jwt_time": "JWT times must be numbers.",
    "jwt_id": "JWT id must be 1 to 128 characters of A-Z a-z 0-9 . _ : -",
    "jwt_scope": "JWT scope must be words separated by single spaces.",
    "jwt_quota": "JWT quota claim must be an object of scalars.",
}


def read(rule: ClaimsRule = RULE, **members: Any) -> Claims:
    return claims_from({"team_id": "t", **members}, rule, NOW)


def refusal(rule: ClaimsRule = RULE, **members: Any) -> str:
    with pytest.raises(AuthError) as caught:
        read(rule, **members)
    assert caught.value.status == 401
    assert str(caught.value) == caught.value.message
    return f"{caught.value.code}: {caught.value.message}"


def told(code: str) -> str:
    return f"{code}: {TEXTS[code]}"


def good_characters(read_one: Callable[[str], Claims]) -> set[str]:
    """Return the ASCII characters with which nothing is refused."""
    good = set()
    for character in map(chr, range(128)):
        try:
            read_one(character)
        except AuthError:
            continue
        good.add(character)
    return good


def test_names_are_made_of_these_characters_and_no_others() -> None:
    words = set(string.ascii_lowercase + string.digits)
    assert good_characters(lambda character: read(team_id=character)) == words
    assert good_characters(lambda character: read(team_id=f"a{character}")) == words | set("_-")
    marks = set(string.ascii_letters + string.digits + "._:-")
    assert good_characters(lambda character: read(jti=character)) == marks
    # RFC 6749 section 3.3: VCHAR without the quotation mark and the backslash.
    visible = set(map(chr, range(0x21, 0x7F))) - set('"\\')
    assert good_characters(lambda character: read(scope=character)) == visible
    assert good_characters(lambda character: read(scope=f"a {character}a")) == visible


@pytest.mark.parametrize("rule", [RULE, STRICT])
def test_times_are_good_up_to_the_leeway_and_no_further(rule: ClaimsRule) -> None:
    leeway = rule.leeway_seconds
    assert read(rule, exp=NOW - leeway + 0.5).expires_at == NOW - leeway + 0.5
    assert refusal(rule, exp=NOW - leeway) == told("jwt_expired")
    for name in ("nbf", "iat"):
        assert read(rule, **{name: NOW + leeway}).expires_at is None
        assert refusal(rule, **{name: NOW + leeway + 0.5}) == told("jwt_not_yet_valid")


def test_a_lifetime_is_neither_negative_nor_longer_than_the_rule() -> None:
    for rule in (RULE, STRICT):
        read(rule, iat=NOW, exp=NOW)
        assert refusal(rule, iat=NOW, exp=NOW - 0.5) == told("jwt_lifetime")
    read(STRICT, iat=NOW - 10, exp=NOW + 90)
    assert refusal(STRICT, iat=NOW - 10, exp=NOW + 90.5) == told("jwt_lifetime")
    read(RULE, iat=0, exp=1e300)
    read(STRICT, exp=NOW + 1e9)


@pytest.mark.parametrize(
    "value", [" 1795", "1_795", "١٧٩٥", "1800000600", True, False, None, [NOW], float("nan"), float("inf"), {}]
)
@pytest.mark.parametrize("name", ["exp", "nbf", "iat"])
def test_a_time_is_a_finite_number(name: str, value: object) -> None:
    assert refusal(**{name: value}) == told("jwt_time")


def test_the_expiry_may_be_read_from_another_claim() -> None:
    rule = ClaimsRule("inference_api", expiry_claim="bearer_exp")
    assert read(rule, bearer_exp=7, exp=NOW + 1).expires_at == 7.0
    assert isinstance(read(rule, bearer_exp=7).expires_at, float)
    assert refusal(rule, bearer_exp="7") == told("jwt_time")


@pytest.mark.parametrize("audience", ["inference_api", ["inference_api"]])
def test_our_audience_is_a_text_or_a_list_of_one(audience: object) -> None:
    assert read(aud=audience).tenant == "t"


@pytest.mark.parametrize(
    "audience", ["", "inference_ap", "inference_api ", "Inference_api", [], ["x"], ["inference_api"] * 2, None, {}, 1]
)
def test_another_audience_is_refused(audience: object) -> None:
    assert refusal(aud=audience) == told("jwt_audience")


@pytest.mark.parametrize("tenant", ["a", "0", "a" * 63, "a_b-c", "9-_"])
def test_a_tenant_is_a_word_of_63_characters_at_most(tenant: str) -> None:
    assert read(team_id=tenant).tenant == tenant


@pytest.mark.parametrize(
    "tenant", ["", "a" * 64, "A", "-a", "_a", "a b", "a,b", "a\r\nX: y", "a\n", "a\0", "а", "a.b", ["a"], {}, 1, None]
)
def test_another_tenant_is_refused(tenant: object) -> None:
    assert refusal(team_id=tenant) == told("jwt_team")


def test_a_tenant_is_needed() -> None:
    with pytest.raises(AuthError, match="team_id"):
        claims_from({}, RULE, NOW)


def test_the_revocation_id_is_jti_or_token_id_and_both_must_agree() -> None:
    assert read().token_id is None
    assert read(jti="a").token_id == read(token_id="a").token_id == read(jti="a", token_id="a").token_id == "a"
    assert read(jti="A-z0.9_:" + "a" * 120).token_id == "A-z0.9_:" + "a" * 120
    assert refusal(jti="a", token_id="b") == "jwt_id: JWT has two different ids."
    assert refusal(jti="a", token_id=None) == "jwt_id: JWT has two different ids."


@pytest.mark.parametrize("name", ["jti", "token_id"])
@pytest.mark.parametrize("value", ["", "a" * 129, "a b", "a,b", "a\n", "é", 7, None, ["a"], True])
def test_another_revocation_id_is_refused(name: str, value: object) -> None:
    assert refusal(**{name: value}) == told("jwt_id")


def test_scopes_are_words() -> None:
    assert read().scopes == {"inference"}
    assert read(scope="").scopes == frozenset()
    assert read(scope="metrics").scopes == {"metrics"}
    assert read(scope="a b:c d!").scopes == {"a", "b:c", "d!"}


@pytest.mark.parametrize(
    "value", ["a  b", " a", "a ", " ", "a\tb", "a\n", 'a"', "a\\b", "é", "\x7f", ["a"], None, 1, {}]
)
def test_another_scope_is_refused(value: object) -> None:
    assert refusal(scope=value) == told("jwt_scope")


def test_quotas_are_up_to_32_scalars_and_cannot_be_changed() -> None:
    values = {"a": 1, "b": 1.5, "c": "x", "d": True}
    quotas = read(q=values).quotas
    assert quotas == values and read().quotas == {}
    with pytest.raises(TypeError):
        quotas["a"] = 2  # type: ignore[index]
    values["a"] = 2
    assert quotas["a"] == 1
    assert len(read(q={str(number): 1 for number in range(32)}).quotas) == 32


@pytest.mark.parametrize(
    "value",
    [{str(number): 1 for number in range(33)}, [], "x", None, 1, {"a": {}}, {"a": []}, {"a": None}, {"b": 1, "a": []}],
)
def test_other_quotas_are_refused(value: object) -> None:
    assert refusal(q=value) == told("jwt_quota")


def test_a_rule_says_how_many_quotas_there_may_be() -> None:
    rule = replace(RULE, max_quotas=33)
    quotas = {str(number): 1 for number in range(33)}
    assert len(claims_from({"team_id": "a", "q": quotas}, rule, NOW).quotas) == 33
    with pytest.raises(AuthError, match="quota"):
        claims_from({"team_id": "a", "q": {**quotas, "33": 1}}, rule, NOW)


def test_a_refusal_is_a_401_unless_it_says_otherwise() -> None:
    assert (AuthError("c", "m").status, AuthError("c", "m", 400).status) == (401, 400)
