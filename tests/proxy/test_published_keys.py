"""Check when a published key set is fetched, kept and dropped, with a clock and an issuer of the test's own."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from proxy import published_keys
from proxy.policy import KeyPlace
from proxy.published_keys import FetchFault, PublishedKeys, fetch_published, read_published
from tests.proxy.signing import public_jwk


class Issuer:
    """Answer fetches with what the test says, and count them; `at` is the time."""

    def __init__(self, *key_ids: str) -> None:
        self.at = 1000.0
        self.num_fetches = 0
        self.answer: bytes | None = None
        self.publish(*key_ids)

    def publish(self, *key_ids: str) -> None:
        self.answer = json.dumps({"keys": [public_jwk("ES256", kid=key_id) for key_id in key_ids]}).encode()

    def fetch(self, place: KeyPlace) -> bytes:
        assert place.url == "https://issuer.test/keys"
        self.num_fetches += 1
        if self.answer is None:
            raise FetchFault("it did not answer in time")
        return self.answer


def begin(issuer: Issuer) -> PublishedKeys:
    return PublishedKeys(KeyPlace(url="https://issuer.test/keys"), issuer.fetch, lambda: issuer.at)


def test_a_set_is_fetched_at_once_and_again_before_a_minute_is_over() -> None:
    issuer = Issuer("a")
    keys = begin(issuer)
    assert (keys.fetched, dict(keys.keys), issuer.num_fetches) == (False, {}, 0)
    assert keys.refresh() and keys.fetched and set(keys.keys) == {"a"}
    issuer.publish("b")
    issuer.at += 54
    assert not keys.refresh() and issuer.num_fetches == 1
    issuer.at += 1
    assert keys.refresh() and set(keys.keys) == {"b"}, "the one that vanished is gone with the swap"
    assert issuer.num_fetches == 2


def test_unknown_ids_cause_one_fetch_in_thirty_seconds_however_many_come() -> None:
    issuer = Issuer("a")
    keys = begin(issuer)
    keys.refresh()
    fetched_at = []
    for _ in range(60):
        issuer.at += 0.5
        keys.ask_for_unknown()
        before = issuer.num_fetches
        keys.refresh()
        if issuer.num_fetches > before:
            fetched_at.append(issuer.at)
    assert fetched_at == [1030.0]
    issuer.at += 29
    keys.ask_for_unknown()
    keys.refresh()
    assert issuer.num_fetches == 2
    issuer.at += 1
    keys.refresh()
    assert issuer.num_fetches == 3, "what was asked for is remembered"
    issuer.at += 31
    keys.refresh()
    assert issuer.num_fetches == 3, "and forgotten once it was fetched"


def test_an_unknown_id_before_the_first_fetch_waits_for_nothing() -> None:
    issuer = Issuer("a")
    keys = begin(issuer)
    keys.ask_for_unknown()
    assert keys.refresh() and issuer.num_fetches == 1


def test_the_last_good_set_is_kept_for_an_hour_of_outage_and_then_dropped(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer("a")
    keys = begin(issuer)
    keys.refresh()
    issuer.answer = None
    while issuer.at + 30 <= 1000 + 3600:
        issuer.at += 30
        keys.refresh()
        assert set(keys.keys) == {"a"}
    assert issuer.num_fetches <= 1 + 3600 / 30
    issuer.at = 1000 + 3600.5
    assert keys.refresh() and dict(keys.keys) == {} and not keys.fetched
    assert [record.getMessage() for record in caplog.records] == [
        "jwks_url: it did not answer in time; the last good key set stays in force",
        "jwks_url: no good key set for an hour; every bearer is refused until there is one",
    ]
    issuer.publish("b")
    issuer.at += 30
    assert keys.refresh() and set(keys.keys) == {"b"}
    assert caplog.messages[-1] == "jwks_url: a good key set is there again"
    assert {record.name for record in caplog.records} == {"proxy"}


def test_a_wrong_set_is_refused_whole_and_the_old_one_stays(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer("a")
    keys = begin(issuer)
    keys.refresh()
    issuer.publish("b", "c", "b")
    for _ in range(3):
        issuer.at += 60
        assert not keys.refresh()
    assert set(keys.keys) == {"a"} and keys.fault is not None
    assert caplog.messages == [
        "jwks_url:1: keys[2].kid: b is the id of two keys; the last good key set stays in force"
    ], "told once"
    issuer.publish("b")
    issuer.at += 60
    assert keys.refresh() and keys.fault is None


def test_an_issuer_that_is_down_from_the_start_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    issuer = Issuer("a")
    issuer.answer = None
    keys = begin(issuer)
    assert not keys.refresh() and dict(keys.keys) == {} and keys.fault is None
    assert caplog.messages == ["jwks_url: it did not answer in time; every bearer is refused until it is there"]
    issuer.publish("a")
    issuer.at += 4.9
    assert not keys.refresh()
    issuer.at += 0.1
    assert keys.refresh() and set(keys.keys) == {"a"}, "soon: nobody gets in without"


def test_a_fault_tells_line_and_member_and_no_key() -> None:
    jwk = public_jwk("ES256", use="enc")
    with pytest.raises(
        ValueError, match=r"^jwks_url:3: keys\[0\]\.use: must be sig for a key that verifies$"
    ) as caught:
        read_published(json.dumps({"keys": [jwk]}).replace('"use"', '\n\n"use"').encode())
    assert jwk["x"] not in str(caught.value)
    assert logging.getLogger("proxy").level == logging.NOTSET


class Child:
    """Stand for `subprocess.run`: note what is run, and end as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.command: list[str] = []
        self.options: dict[str, Any] = {}
        self.ending: Exception | tuple[int, bytes, bytes] = (0, b"the set", b"")
        monkeypatch.setattr(published_keys.subprocess, "run", self.run)

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        self.command, self.options = command, options
        if isinstance(self.ending, Exception):
            raise self.ending
        return subprocess.CompletedProcess(command, *self.ending)

    def told(self, *ending: Any) -> str:
        self.ending = ending if len(ending) > 1 else ending[0]
        with pytest.raises(FetchFault) as caught:
            fetch_published(KeyPlace(url="https://issuer.test/"))
        return str(caught.value)


def test_the_child_is_isolated_and_is_told_the_url_and_its_certificates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    program = str(Path(published_keys.__file__).with_name("jwks_fetch.py"))
    assert fetch_published(KeyPlace(url="https://issuer.test/")) == b"the set"
    assert child.command == [sys.executable, "-I", program, "https://issuer.test/"]
    fetch_published(KeyPlace(url="https://issuer.test/", ca_file="/a/ca.pem"))
    assert child.command == [sys.executable, "-I", program, "https://issuer.test/", "/a/ca.pem"]
    assert child.options == {"env": {}, "capture_output": True, "timeout": 10.0, "check": False}


def test_how_a_child_ends_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    assert child.told(PermissionError(13, "no")) == "the fetch could not be run (PermissionError)"
    assert child.told(subprocess.TimeoutExpired("x", 10)) == "the fetch could not be run (TimeoutExpired)"
    assert child.told(-signal.SIGALRM, b"half", b"said\n") == "it did not answer in time"
    assert child.told(1, b"half", b"") == "the fetch ended with 1"
    assert child.told(-signal.SIGKILL, b"", b" \n") == "the fetch ended with -9"
    assert child.told(1, b"", b"first\nand\nthe last \xff\n\n") == "the last \ufffd"
    assert child.told(3, b"", b"a" * 201) == "a" * 200
