"""Check that changed keys, policies and revocation lists come into force whole, and that wrong ones do not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from proxy.access import Access, AccessFiles
from proxy.auth import AuthError
from proxy.jws import decode_base64url
from proxy.keys import KeyFault
from proxy.located_json import FileFault
from proxy.policy import KeyPlace
from proxy.published_keys import FetchFault
from tests.proxy.signing import NOW, SECRET, claims, encode_part, key_entry, policy, public_jwk, sign

# SEC 2, version 2, section 2.4.2.
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
URL = "https://issuer.test/keys"


class Bench:
    """Hold the files of one proxy and a clock; what the issuer publishes is `published` (None: it is down)."""

    def __init__(self, folder: Path, **members: Any) -> None:
        self.policy_file = folder / "policy.json"
        self.key_file = folder / "keys.json"
        self.revocation_file = folder / "revoked"
        self.revocation_file.write_text("")
        self.published: Any = {"keys": [public_jwk("ES256")]}
        self.at = 1000.0
        self.url = URL
        self.num_fetches = 0
        self.write_policy(**members)

    def write_policy(self, **members: Any) -> None:
        self.policy_file.write_text(json.dumps(policy(**members), indent=1))

    def write_keys(self, **entries: object) -> None:
        self.key_file.write_text(json.dumps({"keys": entries}, indent=1))

    def fetch(self, place: KeyPlace) -> bytes:
        assert place.url == self.url
        self.num_fetches += 1
        if self.published is None:
            raise FetchFault("it did not answer in time")
        return json.dumps(self.published).encode()

    def open(self) -> Access:
        files = AccessFiles(b"", self.policy_file, self.revocation_file)
        return Access(files, lambda: NOW, self.fetch, lambda: self.at)


def refresh(access: Access) -> None:
    for group in access.watched:
        for watched in group:
            watched.refresh()


def verdict(access: Access, compact: str) -> str:
    """Return the tenant of a bearer, or the code of its refusal; as a header and as a key it must be the same."""
    outcomes = []
    for authenticate, header in ((access.authenticate, f"Bearer {compact}"), (access.authenticate_api_key, compact)):
        try:
            outcomes.append(authenticate(header).tenant)
        except AuthError as fault:
            outcomes.append(fault.code)
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


HS, ES = sign(claims()), sign(claims(jti="j-2"), by="ES256")


def test_a_policy_with_its_keys_is_in_force_and_follows_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    access = bench.open()
    assert (verdict(access, HS), verdict(access, ES)) == ("team-a", "team-a")
    bench.write_policy(keys={"es-1": key_entry("ES256")})
    assert verdict(access, HS) == "team-a", "nothing changes before the file is looked at"
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("jwt_key", "team-a")
    bench.write_policy(iss="https://another.test")
    refresh(access)
    assert verdict(access, ES) == "jwt_issuer"
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "policy.json:1: a member name in double quotes is expected"),
        ("[]", "policy.json:1: must be one JSON object"),
        ('{"iss": "x",\n\n"surprise": 1}', "policy.json:3: surprise: is no member of a policy"),
        (json.dumps(policy(keys={"a": {"alg": "HS256", "k_b64url": "AAAA"}}), indent=1), "this one has 3"),
        (json.dumps(policy(key_file="keys.json", keys=None)), "key_file: "),
        (" " * 262145, "is larger than 262144 bytes"),
        (
            json.dumps(policy())[:-1] + ', "iss": "https://issuer.test"}',
            "policy.json:1: iss: stands here a second time",
        ),
    ],
)
def test_a_wrong_policy_stops_the_start_and_later_the_old_one_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, told: str
) -> None:
    bench = Bench(tmp_path)
    access = bench.open()
    bench.policy_file.write_text(text)
    with pytest.raises(FileFault) as caught:
        bench.open()
    assert str(caught.value).startswith(str(bench.policy_file)) and told in str(caught.value)
    refresh(access)
    refresh(access)
    assert verdict(access, HS) == "team-a"
    assert len(caplog.messages) == 1 and told in caplog.messages[0]


def test_a_key_file_beside_the_policy_follows_its_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path, keys=None, key_file="keys.json")
    bench.write_keys(**{"hs-1": key_entry("HS256")})
    access = bench.open()
    assert (verdict(access, HS), verdict(access, ES)) == ("team-a", "jwt_key")
    bench.write_keys(**{"hs-1": key_entry("HS256"), "es-1": key_entry("ES256")})
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("team-a", "team-a"), "both while the keys change hands"
    bench.write_keys(**{"es-1": key_entry("ES256")})
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("jwt_key", "team-a")
    bench.write_keys(**{"es-1": {**key_entry("ES256"), "use": "enc"}})
    refresh(access)
    bench.key_file.unlink()
    refresh(access)
    assert verdict(access, ES) == "team-a"
    assert "keys.json:6: keys.es-1.use: is no member of a key for ES256" in caplog.messages[-2]
    assert "keys.json: cannot be read (No such file or directory)" in caplog.messages[-1]
    bench.key_file.write_text(json.dumps({"keys": [public_jwk("HS256")]}))
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("team-a", "jwt_key")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "keys.json: cannot be read (No such file or directory)"),
        ('{"keys":\n {"a": {"alg": "none"}}}', "keys.json:2: keys.a.alg: must be HS256, RS256, ES256 or EdDSA"),
        ('{"keys": {"a": {}, "a": {}}}', "keys.json:1: keys.a: stands here a second time"),
        ("[]", "keys.json:1: must be one JSON object"),
    ],
)
def test_a_wrong_key_file_stops_the_start_and_is_told_from_the_policy_on(
    tmp_path: Path, text: str | None, told: str
) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=f"file://{tmp_path}/keys.json")
    if text is not None:
        bench.key_file.write_text(text)
    with pytest.raises(FileFault) as caught:
        bench.open()
    line = bench.policy_file.read_text().split('"jwks_url"')[0].count("\n") + 1
    assert str(caught.value) == f"{bench.policy_file}:{line}: jwks_url: {tmp_path}/{told}"


def test_a_policy_that_names_another_key_file_brings_its_keys_along(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, key_file="keys.json")
    bench.write_keys(**{"hs-1": key_entry("HS256")})
    access = bench.open()
    other = tmp_path / "other.json"
    bench.write_policy(keys=None, key_file=str(other))
    refresh(access)
    assert verdict(access, HS) == "team-a", "the new policy is not in force: its keys are not there"
    other.write_text(json.dumps({"keys": [public_jwk("ES256")]}))
    bench.write_policy(keys=None, key_file=str(other), leeway_s=61)
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("jwt_key", "team-a")


def test_published_keys_are_fetched_at_the_start_and_early_for_an_unknown_id(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=URL)
    access = bench.open()
    assert (bench.num_fetches, verdict(access, ES), access.published_fault) == (1, "team-a", None)
    bench.published = {"keys": [public_jwk("RS256")]}
    bench.at += 30
    refresh(access)
    assert bench.num_fetches == 1
    rotated = sign(claims(), by="RS256")
    assert verdict(access, rotated) == "jwt_key" and bench.num_fetches == 1, "a request never fetches"
    refresh(access)
    assert (verdict(access, rotated), bench.num_fetches) == ("team-a", 2)
    assert verdict(access, sign(claims(), by="RS256")[:-8] + "AAAAAAAA") == "jwt_signature"
    bench.at += 31
    refresh(access)
    assert bench.num_fetches == 2, "a wrong signature under a known id asks for nothing"
    assert verdict(access, ES) == "jwt_key"
    refresh(access)
    assert bench.num_fetches == 3


def test_an_issuer_that_is_down_refuses_and_one_that_is_wrong_is_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=URL)
    bench.published = None
    access = bench.open()
    assert (verdict(access, ES), access.published_fault, access.has_keys) == ("jwt_key", None, False)
    bench.published = {"keys": [public_jwk("HS256")]}
    assert str(bench.open().published_fault) == "jwks_url:1: keys[0]: is a secret in a published set"
    bench.published = {"keys": [public_jwk("ES256")]}
    bench.at += 30
    refresh(access)
    assert (verdict(access, ES), access.has_keys) == ("team-a", True)


def test_a_policy_comes_into_force_with_published_keys_or_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    access = bench.open()
    bench.published = None
    bench.write_policy(keys=None, jwks_url=URL)
    refresh(access)
    assert verdict(access, HS) == "team-a"
    what = "no good key set could be fetched; write the policy anew to try again"
    line = bench.policy_file.read_text().split('"jwks_url"')[0].count("\n") + 1
    kept = "what was read before stays in force"
    assert caplog.messages[-1] == f"{bench.policy_file}:{line}: jwks_url: {what}; {kept}"
    bench.published = {"keys": [public_jwk("ES256")]}
    bench.write_policy(keys=None, jwks_url=URL, leeway_s=61)
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES), bench.num_fetches) == ("jwt_key", "team-a", 2)
    bench.published = None
    bench.write_policy(keys=None, jwks_url=URL, iss="https://another.test")
    refresh(access)
    assert verdict(access, ES) == "jwt_issuer", "keys that are there already need no new fetch"
    assert bench.num_fetches == 2


def test_a_policy_that_names_another_issuer_takes_its_keys(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=URL)
    access = bench.open()
    bench.url = "https://another.test/keys"
    bench.published = {"keys": [public_jwk("RS256")]}
    bench.write_policy(keys=None, jwks_url=bench.url)
    refresh(access)
    assert (verdict(access, ES), verdict(access, sign(claims(), by="RS256"))) == ("jwt_key", "team-a")


def test_a_policy_of_256_kib_is_read(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    text = json.dumps(policy())
    bench.policy_file.write_text(text.rjust(256 * 1024))
    assert verdict(bench.open(), HS) == "team-a"


def test_keys_that_come_while_the_policy_changes_are_in_force_with_the_new_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=URL)
    access = bench.open()
    assert verdict(access, ES) == "team-a"

    def change_the_policy_meanwhile(place: KeyPlace) -> bytes:
        bench.write_policy(keys=None, jwks_url=URL, leeway_s=30)
        access._refresh_rules()
        return json.dumps({"keys": [public_jwk("RS256")]}).encode()

    assert access._rules is not None and access._rules.published is not None
    access._rules.published._fetch = change_the_policy_meanwhile
    bench.at += 60
    assert [watched.refresh() for group in access.watched for watched in group] == [False, True, True]
    assert access._rules.policy.rule.leeway_seconds == 30
    assert (verdict(access, ES), verdict(access, sign(claims(), by="RS256"))) == ("jwt_key", "team-a")


def test_a_key_file_that_comes_after_the_policy_that_names_it_is_found(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    access = bench.open()
    bench.write_policy(keys=None, key_file="keys.json")
    long_ago = NOW - 1_000_000
    os.utime(bench.policy_file, (long_ago, long_ago))
    for _ in range(2):
        refresh(access)
        assert verdict(access, HS) == "team-a"
    bench.write_keys(**{"es-1": key_entry("ES256")})
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES)) == ("jwt_key", "team-a")
    looked: list[str] = []
    access._policy.look_again = lambda: looked.append("again")
    refresh(access)
    assert [watched.refresh() for group in access.watched for watched in group] == [False, True, False]
    assert looked == [], "once the keys are there, a policy that is as it was is not read again"


def test_certificates_lie_beside_the_policy_and_must_be_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keys=None, jwks_url=URL, jwks_ca_file="issuer.pem")
    told = r"policy\.json:\d+: jwks_ca_file: "
    with pytest.raises(FileFault, match=told + r"cannot be read \(No such file or directory\)$"):
        bench.open()
    os.mkfifo(tmp_path / "issuer.pem")
    with pytest.raises(FileFault, match=told + r".*/issuer\.pem: is not a regular file$"):
        bench.open()
    (tmp_path / "issuer.pem").unlink()
    (tmp_path / "issuer.pem").write_text("")
    access = bench.open()
    assert access._rules is not None and access._rules.published is not None
    assert access._rules.published.place.ca_file == str(tmp_path / "issuer.pem")


def test_a_revoked_bearer_is_refused_and_its_open_calls_are_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    bench.revocation_file.write_text("# gone before the start\nj-0\n")
    access = bench.open()
    cut: list[str] = []
    for token_id in ("j-1", "j-2"):
        access.open_calls.open(token_id, lambda token_id=token_id: cut.append(token_id))
    assert verdict(access, sign(claims(jti="j-0"))) == "jwt_revoked"
    assert verdict(access, HS) == "team-a"
    bench.revocation_file.write_text("j-1\n")
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES), cut) == ("jwt_revoked", "team-a", ["j-1"])
    bench.revocation_file.write_text("j-1\nj-2 j-3\n")
    refresh(access)
    assert (verdict(access, HS), verdict(access, ES), cut) == ("jwt_revoked", "team-a", ["j-1"])
    assert "revoked:2: an id is" in caplog.messages[-1]
    bench.revocation_file.unlink()
    refresh(access)
    assert verdict(access, HS) == "jwt_revoked", "a list that is lost takes nothing back"


def test_the_twin_of_a_revoked_signature_is_revoked_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    signed, _, encoded = ES.rpartition(".")
    signature = decode_base64url(encoded)
    other = P256_ORDER - int.from_bytes(signature[32:])
    twin = f"{signed}.{encode_part(signature[:32] + other.to_bytes(32))}"
    assert (verdict(bench.open(), ES), verdict(bench.open(), twin)) == ("team-a", "team-a")
    bench.revocation_file.write_text("j-2")
    assert (verdict(bench.open(), ES), verdict(bench.open(), twin)) == ("jwt_revoked", "jwt_revoked")


def test_a_shared_secret_has_a_revocation_list_too(tmp_path: Path) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text("j-1")
    shared = {"alg": "HS256"}
    access = Access(AccessFiles(SECRET, None, revoked), lambda: NOW)
    assert verdict(access, sign({"team_id": "t", "token_id": "j-1"}, shared)) == "jwt_revoked"
    assert verdict(access, sign({"team_id": "t", "jti": "j-2"}, shared)) == "t"
    assert verdict(access, sign({"team_id": "t"}, {**shared, "kid": "a"})) == "jwt_key"
    assert [[watched.refresh() for watched in group] for group in access.watched] == [[False]], "there is no issuer"
    with pytest.raises(AuthError, match=r"^JWT has been revoked\.$"):
        access.authenticate_api_key(sign({"team_id": "t", "token_id": "j-1"}, shared))
    assert verdict(access, sign({"team_id": "t"}, shared)) == "t", "without an id there is nothing to revoke"
    revoked.write_text("j-2")
    refresh(access)
    assert verdict(access, sign({"team_id": "t", "jti": "j-2"}, shared)) == "jwt_revoked"
    assert access.published_fault is None


def test_without_a_list_nothing_is_revoked_and_a_missing_one_stops_the_start(tmp_path: Path) -> None:
    access = Access(AccessFiles(SECRET, None, None), lambda: NOW)
    assert verdict(access, sign({"team_id": "t", "jti": "j"}, {"alg": "HS256"})) == "t"
    refresh(access)
    with pytest.raises(FileFault, match="revoked: cannot be read"):
        Access(AccessFiles(SECRET, None, tmp_path / "revoked"), lambda: NOW)
    with pytest.raises(KeyFault):
        Access(AccessFiles(b"", None, None), lambda: NOW)
