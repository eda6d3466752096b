"""Check who a caller is: by the proxy's assertion for this very call, or 'local' where that is switched on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inference_api.config import Settings
from inference_api.errors import ForbiddenError, SettingError, UnauthenticatedError
from inference_api.server.identity import (
    ASSERTION_HEADER,
    Identity,
    choose_request_id,
    is_loopback_socket,
    read_internal_key,
)
from proxy.auth import Claims, derive_internal_key, mint_assertion

KEY = b"k" * 32
NOW = 1_700_000_000.0
REQUEST_ID = "req_" + "0f" * 16
CLAIMS = Claims("alpha", "token-1", frozenset({"inference"}), NOW + 3600, {})
CALL = {"method": "POST", "path": "/chat/mock", "request_id": REQUEST_ID}


def _authenticate(
    assertion: str | None, *, now: float = NOW, anonymous: bool = False, on_loopback: bool = True, **changes: str
) -> Claims:
    call = {**CALL, "scope": "inference", "on_loopback": on_loopback, **changes}
    return Identity(KEY, lambda: now, allow_anonymous=anonymous).authenticate(assertion=assertion, **call)


def test_the_proxys_assertion_names_the_tenant() -> None:
    claims = _authenticate(mint_assertion(KEY, CLAIMS, **CALL, now=NOW))
    assert (claims.tenant, claims.scopes) == ("alpha", frozenset({"inference"}))


@pytest.mark.parametrize(
    "change", [{"method": "GET"}, {"path": "/inference/mock"}, {"request_id": "req_" + "00" * 16}], ids=str
)
def test_an_assertion_for_another_call_is_worth_nothing(change: dict[str, str]) -> None:
    assertion = mint_assertion(KEY, CLAIMS, **CALL, now=NOW)
    with pytest.raises(UnauthenticatedError):
        _authenticate(assertion, **change)


@pytest.mark.parametrize("age_seconds", [60.0, -60.0])
def test_an_assertion_lives_for_seconds_only(age_seconds: float) -> None:
    assertion = mint_assertion(KEY, CLAIMS, **CALL, now=NOW - age_seconds)
    with pytest.raises(UnauthenticatedError):
        _authenticate(assertion)


def test_an_assertion_of_another_key_is_refused_and_its_fault_not_told() -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        _authenticate(mint_assertion(b"x" * 32, CLAIMS, **CALL, now=NOW))
    assert str(caught.value) == "The proxy's assertion is not valid for this request."
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("assertion", ["", "x", "a.b.c", "\u00e9.\u00e9.\u00e9", "." * 5000])
@pytest.mark.parametrize("anonymous", [True, False])
def test_a_wrong_assertion_is_refused_even_where_none_is_needed(assertion: str, anonymous: bool) -> None:
    with pytest.raises(UnauthenticatedError):
        _authenticate(assertion, anonymous=anonymous)


def test_a_scope_that_the_bearer_lacks_is_forbidden_and_named() -> None:
    assertion = mint_assertion(KEY, CLAIMS, **CALL, now=NOW)
    with pytest.raises(ForbiddenError, match="'metrics'"):
        _authenticate(assertion, scope="metrics")


def test_without_an_assertion_nobody_is_served_unless_the_switch_is_on() -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        _authenticate(None)
    assert str(caught.value) == "This address serves the proxy only; send the request to the proxy."
    local = _authenticate(None, anonymous=True)
    assert local == Claims("local", None, frozenset({"inference", "metrics"}), None, {})
    with pytest.raises(AttributeError):
        local.scopes.add("more")  # type: ignore[attr-defined]


def test_the_proxys_request_id_is_taken_and_anything_else_replaced() -> None:
    assert choose_request_id(REQUEST_ID) == REQUEST_ID
    for proposed in (None, "", "mine", REQUEST_ID + "0", REQUEST_ID.upper(), REQUEST_ID + "\n", "x" + REQUEST_ID):
        chosen = choose_request_id(proposed)
        assert chosen != proposed
        assert len(chosen) == 36 and chosen.startswith("req_")
    assert choose_request_id(None) != choose_request_id(None)
    spellings = {digit: f"req_{digit * 32}" for digit in map(chr, range(128))}
    taken = {digit for digit, proposed in spellings.items() if choose_request_id(proposed) == proposed}
    assert taken == set("0123456789abcdef")


def test_the_assertion_has_a_header_of_its_own() -> None:
    assert ASSERTION_HEADER == "X-Internal-Assertion"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.delenv("JWT_SECRET", raising=False)
    return Settings(run_dir=str(tmp_path))


def test_the_key_of_the_settings_wins_over_the_key_file(settings: Settings) -> None:
    settings.key_path.write_text("f" * 40)
    settings.key_path.chmod(0o600)
    assert read_internal_key(settings) == b"f" * 40
    assert read_internal_key(dataclasses.replace(settings, internal_auth_key="s" * 40)) == b"s" * 40


def test_a_key_file_may_end_with_a_newline(settings: Settings) -> None:
    settings.key_path.write_text("f" * 40 + "\n")
    settings.key_path.chmod(0o600)
    assert read_internal_key(settings) == b"f" * 40


def test_a_key_file_is_a_file(settings: Settings) -> None:
    settings.key_path.symlink_to("/dev/null")
    with pytest.raises(SettingError, match="is no regular file"):
        read_internal_key(settings)


def test_a_short_or_absent_key_file_stops_the_start_and_names_the_setting(settings: Settings) -> None:
    path = settings.key_path
    with pytest.raises(SettingError) as caught:
        read_internal_key(settings)
    assert str(caught.value) == f"INTERNAL_AUTH_KEY_FILE={path} cannot be read: No such file or directory"
    path.write_text("h" * 31)
    path.chmod(0o600)
    with pytest.raises(SettingError) as caught:
        read_internal_key(settings)
    assert str(caught.value) == f"INTERNAL_AUTH_KEY_FILE={path} holds 31 bytes; at least 32 are needed."
    path.write_text("h" * 32)
    assert read_internal_key(settings) == b"h" * 32


def test_without_a_key_of_its_own_it_is_derived_from_the_shared_secret(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JWT_SECRET", "s\u00e9cret" * 8)
    assert read_internal_key(settings) == derive_internal_key(("s\u00e9cret" * 8).encode())
    settings.key_path.write_text("f" * 40)
    settings.key_path.chmod(0o600)
    named = dataclasses.replace(settings, internal_auth_key_file=str(settings.key_path))
    assert read_internal_key(named) == b"f" * 40


def test_an_anonymous_caller_is_served_on_loopback_only() -> None:
    with pytest.raises(UnauthenticatedError):
        _authenticate(None, anonymous=True, on_loopback=False)


@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.8.7", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.5", False),
        ("::ffff:10.0.0.5", False),
        ("fe80::1%eth0", False),
        ("::1%lo", True),
    ],
)
def test_loopback_is_asked_of_the_socket_itself(address: str, is_loopback: bool) -> None:
    class Socket:
        def getsockname(self) -> tuple[str, int]:
            return address, 7000

    assert is_loopback_socket(Socket()) is is_loopback


def test_without_a_socket_a_call_came_in_on_loopback() -> None:
    assert is_loopback_socket(None) is True


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(mode)
    with pytest.raises(SettingError) as caught:
        read_internal_key(Settings(internal_auth_key_file=str(key)))
    assert str(caught.value) == f"INTERNAL_AUTH_KEY_FILE={key} can be read by others: chmod 600 {key}"
