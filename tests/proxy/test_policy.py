"""Check what a policy says of bearers, and that a wrong member is refused by its name."""

from __future__ import annotations

import string
from typing import Any

import pytest

from proxy.auth import AuthError
from proxy.policy import KeyPlace, PolicyFault, StrictPolicy, read_policy
from tests.proxy.signing import claims, policy

ASCII = [chr(code) for code in range(128)]


def fault(**members: Any) -> str:
    with pytest.raises(PolicyFault) as caught:
        read_policy(policy(**members))
    return str(caught.value)


def test_a_policy_is_read() -> None:
    read = read_policy(policy(clock_now=7, leeway_s=0.5, max_lifetime_s=2, max_token_bytes=3, max_header_bytes=4))
    assert (read.issuer, read.kind, read.header_members) == ("https://issuer.test", "at+jwt", {"alg", "typ", "kid"})
    assert (read.rule.audience, read.rule.leeway_seconds, read.rule.max_lifetime_seconds) == ("inference_api", 0.5, 2)
    assert (read.max_bearer_bytes, read.max_header_bytes, read.key_place) == (3, 4, None)
    assert read.required == {"iss", "aud", "sub", "team_id", "jti", "iat", "nbf", "exp"}


def test_what_a_policy_leaves_open_has_defaults() -> None:
    open_members = dict.fromkeys(["leeway_s", "max_lifetime_s", "max_token_bytes", "max_header_bytes"])
    read = read_policy(policy(**open_members, required=[], typ="AT+JWT"))
    assert (read.rule.leeway_seconds, read.rule.max_lifetime_seconds) == (60, 86400)
    assert (read.max_bearer_bytes, read.max_header_bytes) == (8192, 512)
    assert read.required == {"aud", "team_id", "exp", "iat"}, "without these nothing could be checked"
    assert read.kind == "at+jwt"
    halves = read_policy(policy(max_token_bytes=3.5, max_header_bytes=4.5))
    assert (halves.max_bearer_bytes, halves.max_header_bytes) == (3, 4)


@pytest.mark.parametrize(
    ("words", "audience"),
    [
        ("exactly api (string or one-element list)", "api"),
        ("exactly api ()", "api"),
        ("exactly api", "exactly api"),
        ("exactly  (x)", "exactly  (x)"),
        ("not exactly api (x)", "not exactly api (x)"),
        ("exactly api (x) y", "exactly api (x) y"),
    ],
)
def test_an_audience_may_be_said_in_words(words: str, audience: str) -> None:
    assert read_policy(policy(aud=words)).rule.audience == audience


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"surprise": 1}, "surprise: is no member of a policy"),
        ({"b": 1, "a": 1}, "a: is no member of a policy"),
        ({"allowed_header_members": ["alg", "jku"]}, "allowed_header_members: may only name alg, typ and kid"),
        ({"allowed_header_members": "alg"}, "allowed_header_members: must be a list of strings"),
        ({"required": ["iss", 1]}, "required: must be a list of strings"),
        ({"required": None}, "required: must be a list of strings"),
        ({"iss": ""}, "iss: must be a non-empty string"),
        ({"iss": ["x"]}, "iss: must be a non-empty string"),
        ({"iss": None}, "iss: must be a non-empty string"),
        ({"aud": ["x"]}, "aud: must be a non-empty string"),
        ({"typ": None}, "typ: must be a non-empty string"),
        ({"leeway_s": True}, "leeway_s: must be a positive number"),
        ({"leeway_s": 0}, "leeway_s: must be a positive number"),
        ({"leeway_s": "60"}, "leeway_s: must be a positive number"),
        ({"leeway_s": float("inf")}, "leeway_s: must be a positive number"),
        ({"max_lifetime_s": -1}, "max_lifetime_s: must be a positive number"),
        ({"max_token_bytes": []}, "max_token_bytes: must be a positive number"),
        ({"max_header_bytes": 0}, "max_header_bytes: must be a positive number"),
        ({"keys": []}, "keys: must be an object"),
        ({"keys": None}, "exactly one of the members keys, key_file and jwks_url is needed"),
        ({"key_file": "a"}, "key_file: exactly one of the members keys, key_file and jwks_url is needed"),
        ({"keys": None, "key_file": ""}, "key_file: must be a non-empty string"),
        ({"keys": None, "jwks_url": 7}, "jwks_url: must be a non-empty string"),
        ({"jwks_ca_file": "a"}, "jwks_ca_file: goes with an https jwks_url alone"),
        ({"keys": None, "key_file": "a", "jwks_ca_file": "a"}, "jwks_ca_file: goes with an https jwks_url alone"),
        (
            {"keys": None, "jwks_url": "http://127.0.0.1/", "jwks_ca_file": "a"},
            "jwks_ca_file: goes with an https jwks_url alone",
        ),
    ],
)
def test_a_policy_that_cannot_be_kept_is_refused_by_member(members: dict[str, Any], told: str) -> None:
    assert fault(**members) == told


def test_a_fault_says_the_place_as_one_finds_it_in_the_file() -> None:
    with pytest.raises(PolicyFault) as caught:
        read_policy(policy(key_file="a"))
    assert caught.value.path == ("key_file",)


@pytest.mark.parametrize(
    ("members", "place"),
    [
        ({"key_file": "keys.json"}, KeyPlace(file="keys.json")),
        ({"jwks_url": "file:///a/keys.json"}, KeyPlace(file="/a/keys.json")),
        ({"jwks_url": "https://issuer.test:8443/keys?a=b"}, KeyPlace(url="https://issuer.test:8443/keys?a=b")),
        (
            {"jwks_url": "https://issuer.test/", "jwks_ca_file": "ca.pem"},
            KeyPlace(url="https://issuer.test/", ca_file="ca.pem"),
        ),
        ({"jwks_url": "http://127.0.0.1:8080/keys"}, KeyPlace(url="http://127.0.0.1:8080/keys")),
        ({"jwks_url": "https://a"}, KeyPlace(url="https://a")),
        ({"jwks_url": "http://[::1]/keys"}, KeyPlace(url="http://[::1]/keys")),
        ({"jwks_url": "http://localhost/keys"}, KeyPlace(url="http://localhost/keys")),
    ],
)
def test_keys_may_lie_elsewhere(members: dict[str, Any], place: KeyPlace) -> None:
    assert read_policy(policy(keys=None, **members)).key_place == place


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://issuer.test/", "must be an https URL without a user or a fragment"),
        ("file://host/keys", "must be an https URL without a user or a fragment"),
        ("keys.json", "must be an https URL without a user or a fragment"),
        ("https://", "must be an https URL without a user or a fragment"),
        ("https:///keys", "must be an https URL without a user or a fragment"),
        ("https://issuer.test:0/", "must be an https URL without a user or a fragment"),
        ("https://issuer.test:99999/", "must be an https URL without a user or a fragment"),
        ("https://[::1/", "must be an https URL without a user or a fragment"),
        ("https://user@issuer.test/", "must be an https URL without a user or a fragment"),
        ("https://issuer.test/#a", "must be an https URL without a user or a fragment"),
        ("https://issuer.test/a b", "must be an https URL without a user or a fragment"),
        ("https://issuer.test/\n", "must be an https URL without a user or a fragment"),
        ("https://issuer.test/" + "a" * 2000, "must be an https URL without a user or a fragment"),
        ("http://issuer.test/", "must be https, or http to a loopback address"),
        ("http://10.0.0.1/", "must be https, or http to a loopback address"),
        ("http://localhost.issuer.test/", "must be https, or http to a loopback address"),
    ],
)
def test_keys_are_fetched_from_nowhere_else(url: str, told: str) -> None:
    assert fault(keys=None, jwks_url=url) == f"jwks_url: {told}"


def checked(read: StrictPolicy, **members: Any) -> str:
    try:
        read.check_claims(claims(**members))
    except AuthError as refused:
        return f"{refused.code}: {refused.message}"
    return "good"


def test_claims_are_held_to_the_policy() -> None:
    read = read_policy(policy())
    assert checked(read) == "good"
    for name in ("iss", "aud", "sub", "team_id", "jti", "iat", "nbf", "exp"):
        assert checked(read, **{name: None}) == "jwt_claims: JWT lacks a required claim."
    for issuer in ("https://issuer.test/", "https://issuer.tes", "HTTPS://issuer.test", ["https://issuer.test"], ""):
        assert checked(read, iss=issuer) == "jwt_issuer: JWT issuer is not accepted."
    for subject in ("", "A", "a" * 64, "a b", "-a", "a\n", ["a"], 7):
        assert checked(read, sub=subject) == "jwt_subject: JWT subject is not accepted."
    assert checked(read, sub="a" * 63) == "good"


def test_what_a_policy_does_not_require_may_be_missing() -> None:
    read = read_policy(policy(required=["jti"]))
    assert checked(read, iss=None, sub=None, nbf=None) == "good"
    assert checked(read, jti=None) == "jwt_claims: JWT lacks a required claim."
    assert checked(read, iss="https://another.test") == "jwt_issuer: JWT issuer is not accepted."
    assert checked(read, sub="A") == "jwt_subject: JWT subject is not accepted."


def test_a_subject_is_made_of_these_characters_and_no_others() -> None:
    read = read_policy(policy())
    words = set(string.ascii_lowercase + string.digits)
    assert {character for character in ASCII if checked(read, sub=character) == "good"} == words
    assert {character for character in ASCII if checked(read, sub=f"a{character}a") == "good"} == words | set("_-")


def test_a_url_is_made_of_these_characters_and_no_others() -> None:
    def taken(character: str) -> bool:
        try:
            return read_policy(policy(keys=None, jwks_url=f"https://issuer.test/a?{character}")).key_place is not None
        except PolicyFault:
            return False

    marks = set("._~:/?@!$&'()*+,;=%-[]")
    assert {character for character in ASCII if taken(character)} == set(string.ascii_letters + string.digits) | marks
    assert read_policy(policy(keys=None, jwks_url="https://a.test/" + "a" * 1993)).key_place
    assert fault(keys=None, jwks_url="https://a.test/" + "a" * 1994).startswith("jwks_url: must be an https URL")
