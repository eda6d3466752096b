"""Check that settings are read, and that a wrong one stops the start with its name and without its secret."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from proxy.auth import derive_internal_key
from proxy.config import ConfigError, Settings, read_settings

SECRET = "0123456789abcdef0123456789abcdef"
KEY = "an internal key of thirty-two bytes or more"


def read(environ: dict[str, str], **options: Any) -> Settings:
    return read_settings(environ, **{"port": 1223, "upstream_url": "http://127.0.0.1:7000", **options})


def fault(environ: dict[str, str], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(environ, **options)
    return str(caught.value)


def test_defaults_need_one_secret() -> None:
    settings = read({"JWT_SECRET": SECRET, "INTERNAL_AUTH_KEY": KEY})
    assert (settings.bind, settings.port, settings.upstream_url) == ("127.0.0.1", 1223, "http://127.0.0.1:7000")
    assert (settings.jwt_secret, settings.internal_key, settings.warnings) == (SECRET.encode(), KEY.encode(), ())
    assert SECRET not in repr(settings) and KEY not in repr(settings)


@pytest.mark.parametrize(
    ("environ", "log_format"), [({}, "text"), ({"LOG_FORMAT": ""}, "text"), ({"LOG_FORMAT": "json"}, "json")]
)
def test_the_log_is_text_unless_json_is_asked_for(environ: dict[str, str], log_format: str) -> None:
    assert read({"JWT_SECRET": SECRET, **environ}).log_format == log_format


def test_an_option_wins_over_the_environment() -> None:
    environ = {"JWT_SECRET": SECRET, "PROXY_BIND": "127.0.0.2", "PROXY_TRUSTED_HOSTS": "A.test, b.test"}
    assert read(environ).bind == "127.0.0.2"
    assert read(environ, bind="127.0.0.3").bind == "127.0.0.3"
    assert read(environ).trusted_hosts == {"a.test", "b.test"}


def test_without_a_key_of_its_own_the_assertion_key_is_derived_and_said() -> None:
    settings = read({"JWT_SECRET": SECRET})
    assert settings.internal_key == derive_internal_key(SECRET.encode())
    assert settings.warnings and "INTERNAL_AUTH_KEY" in settings.warnings[0]


@pytest.mark.parametrize("secret", ["short", "a-string-secret-at-least-256-bits-long"])
def test_a_weak_secret_is_a_warning_on_loopback_and_a_fault_elsewhere(secret: str) -> None:
    environ = {"JWT_SECRET": secret, "INTERNAL_AUTH_KEY": KEY}
    for bind in ("127.0.0.1", "::1", "localhost"):
        assert "JWT_SECRET" in read(environ, bind=bind).warnings[0]
    for bind in ("0.0.0.0", "::", "proxy.test"):
        assert "JWT_SECRET" in fault(environ, bind=bind) and secret not in fault(environ, bind=bind)
        assert read(environ, bind=bind, insecure_dev=True).warnings
        assert read({**environ, "INSECURE_DEV": "1"}, bind=bind).warnings


@pytest.mark.parametrize(
    ("environ", "options", "name"),
    [
        ({}, {}, "JWT_SECRET"),
        ({"PROXY_MAX_CONNECTIONS": "0"}, {}, "PROXY_MAX_CONNECTIONS"),
        ({"PROXY_MAX_BODY_BYTES": "many"}, {}, "PROXY_MAX_BODY_BYTES"),
        ({"PROXY_WRITE_STALL_SECONDS": "nan"}, {}, "PROXY_WRITE_STALL_SECONDS"),
        ({"PROXY_TRACE_SAMPLE_RATIO": "1.5"}, {}, "PROXY_TRACE_SAMPLE_RATIO must be 0 to 1"),
        ({"LOG_FORMAT": "xml"}, {}, "LOG_FORMAT"),
        ({"PROXY_TENANTS_FILE": "/nowhere"}, {}, "PROXY_TENANTS_FILE"),
        ({"PROXY_REPLICAS": "0"}, {}, "PROXY_REPLICAS"),
        ({"REDIS_URL": "127.0.0.1:6379"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "rediss://redis.test"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "redis://"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "redis://redis.test:x"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "redis://redis.test/prod"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "redis://redis.test/3/x"}, {}, "REDIS_URL"),
        ({"REDIS_URL": "redis://redis.test?socket_timeout=9"}, {}, "REDIS_URL"),
        ({"INTERNAL_AUTH_KEY": "short"}, {}, "INTERNAL_AUTH_KEY"),
        ({"INTERNAL_AUTH_KEY_FILE": "/nowhere"}, {}, "INTERNAL_AUTH_KEY_FILE"),
        ({"INTERNAL_AUTH_KEY_FILE": "/dev/null"}, {}, "INTERNAL_AUTH_KEY_FILE: /dev/null is no regular file"),
        ({"JWT_POLICY_FILE": "/nowhere"}, {}, "JWT_POLICY_FILE: cannot read /nowhere (No such file or directory)"),
        ({"JWT_REVOCATION_FILE": "/nowhere"}, {}, "JWT_REVOCATION_FILE: cannot read /nowhere"),
        ({}, {"port": 65536}, "--port"),
        ({}, {"upstream_url": "https://x"}, "--hostname"),
        ({}, {"upstream_url": "http://x:99999"}, "--hostname"),
        ({}, {"upstream_url": "http://user@x"}, "--hostname"),
    ],
)
def test_a_wrong_setting_is_named(environ: dict[str, str], options: dict[str, Any], name: str) -> None:
    secret = {} if name == "JWT_SECRET" else {"JWT_SECRET": SECRET}
    assert name in fault({**secret, **environ}, **options)


def test_a_pipe_in_a_files_place_does_not_hold_up_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = threading.Thread(target=read, args=({"JWT_SECRET": SECRET, "JWT_REVOCATION_FILE": str(pipe)},))
    reading.start()
    reading.join(5)
    waits_for_a_writer = reading.is_alive()
    if waits_for_a_writer:
        os.close(os.open(pipe, os.O_WRONLY))
        reading.join()
    assert not waits_for_a_writer


@pytest.mark.parametrize("url", ["redis://redis.test", "redis://:canary@redis.test:6380/1", "unix:///run/redis.sock"])
def test_the_place_of_redis_is_taken_and_never_shown(url: str) -> None:
    settings = read({"JWT_SECRET": SECRET, "REDIS_URL": url})
    assert settings.redis_url == url and url not in repr(settings)
    assert "canary" not in fault({"JWT_SECRET": SECRET, "REDIS_URL": url.replace("redis:", "rediss:") + "#canary"})


def test_the_key_file_must_be_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    environ = {"JWT_SECRET": SECRET, "INTERNAL_AUTH_KEY_FILE": str(path)}
    path.chmod(0o640)
    assert "chmod 600" in fault(environ)
    path.chmod(0o600)
    assert read(environ).internal_key == KEY.encode()
