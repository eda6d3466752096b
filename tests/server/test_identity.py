"""Check who a caller is: by the proxy's assertion for this very call, or 'local' where that is switched on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from inference_api.config import Settings
from inference_api.errors import ForbiddenError, SettingError, UnauthenticatedError
from inference_api.server.identity import Identity, choose_request_id, is_loopback_socket, read_internal_key
from proxy.auth import Claims, mint_assertion

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
    with pytest.raises(UnauthenticatedError, match="proxy"):
        _authenticate(None)
    assert _authenticate(None, anonymous=True).tenant == "local"


def test_the_proxys_request_id_is_taken_and_anything_else_replaced() -> None:
    assert choose_request_id(REQUEST_ID) == REQUEST_ID
    for proposed in (None, "", "mine", REQUEST_ID + "0", REQUEST_ID.upper(), REQUEST_ID + "\n", "x" + REQUEST_ID):
        chosen = choose_request_id(proposed)
        assert chosen != proposed
        assert len(chosen) == 36 and chosen.startswith("req_")
    assert choose_request_id(None) != choose_request_id(None)


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


def test_a_short_or_absent_key_file_stops_the_start_and_names_the_setting(settings: Settings) -> None:
    with pytest.raises(SettingError, match="INTERNAL_AUTH_KEY_FILE"):
        read_internal_key(settings)
    settings.key_path.write_text("hunch")
    settings.key_path.chmod(0o600)
    with pytest.raises(SettingError, match="holds 5 bytes") as caught:
        read_internal_key(settings)
    assert "hunch" not in str(caught.value)


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
    ],
)
def test_loopback_is_asked_of_the_socket_itself(address: str, is_loopback: bool) -> None:
    class Socket:
        def getsockname(self) -> tuple[str, int]:
            return address, 7000

    assert is_loopback_socket(Socket()) is is_loopback


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 64)
    key.chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"):
        read_internal_key(Settings(internal_auth_key_file=str(key)))
