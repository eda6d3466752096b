"""Check what the public ports are given to: a taken one is told of, one that gunicorn was handed is its own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.fronts import Front, bind_fronts, bind_port, refuse_taken_ports


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """An address that somebody listens on, and no socket handed to this process."""
    for name in ("GUNICORN_FD", "LISTEN_FDS", "LISTEN_PID"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


def test_a_taken_port_is_refused_by_its_address(taken: tuple[str, int]) -> None:
    with pytest.raises(SettingError, match=f"127.0.0.1:{taken[1]}.*take another port"):
        refuse_taken_ports([taken], reuse_port=False)


def test_paths_and_descriptors_are_not_bound() -> None:
    refuse_taken_ports(["unix.sock", 7], reuse_port=False)


def test_a_port_to_be_shared_may_be_taken(taken: tuple[str, int]) -> None:
    refuse_taken_ports([taken], reuse_port=True)


@pytest.mark.parametrize("environ", [{"GUNICORN_FD": "5"}, {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}])
def test_the_port_of_a_socket_that_gunicorn_was_handed_may_be_taken(
    taken: tuple[str, int], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    refuse_taken_ports([taken], reuse_port=False)


def test_sockets_that_systemd_handed_to_another_process_are_not_gunicorns(
    taken: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LISTEN_FDS", "1")
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    with pytest.raises(SettingError):
        refuse_taken_ports([taken], reuse_port=False)


def test_the_proxy_gets_its_own_secret_and_not_flasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JWT_SECRET", "j" * 32)
    monkeypatch.setenv("FLASK_SECRET", "f" * 32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as cleanup:
        settings = Settings(port=port, flask_secret="f" * 32, internal_auth_key="k" * 32)
        server, proxy = bind_fronts(settings, ("127.0.0.1", 0), cleanup)
    assert (server.name, proxy.name) == ("gunicorn", "proxy")
    assert "f" * 32 in server.environ.values() and "j" * 32 not in server.environ.values()
    assert "j" * 32 in proxy.environ.values() and "f" * 32 not in proxy.environ.values()
    assert "k" * 32 in server.environ.values() and "k" * 32 in proxy.environ.values()


@pytest.mark.parametrize(
    ("bind", "proxy_bind"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1")]
)
def test_one_port_for_the_server_and_the_proxy_is_refused_with_both_settings(bind: str, proxy_bind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = f"INFERENCE_API_PORT and PROXY_PORT .* are both {port}; change one"
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingError, match=line):
        bind_fronts(Settings(bind=bind, port=port), (proxy_bind, port), cleanup)


def test_one_port_on_two_addresses_is_two_listeners() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with contextlib.ExitStack() as cleanup:
        for front in bind_fronts(Settings(port=port), ("127.0.0.2", port), cleanup):
            front.listen()


def test_an_address_that_is_taken_between_binding_and_listening_is_one_line() -> None:
    with contextlib.ExitStack() as cleanup:
        first = bind_port("127.0.0.1", 0, "FIRST", cleanup)
        port = first.getsockname()[1]
        second = bind_port("127.0.0.1", port, "SECOND", cleanup)
        first.listen()
        with pytest.raises(SettingError, match=rf"^SECOND: cannot listen on 127.0.0.1:{port}: Address already in use;"):
            Front("gunicorn", second, [], {}, "SECOND").listen()
