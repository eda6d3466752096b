"""Own the proxy's settings: the only reader of the environment in this package.

Runs once, before anything is bound. A wrong setting stops the start and says its name and its bound. It does not know
what the settings are for; the objects that do get a frozen value.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxy.auth import derive_internal_key
from proxy.cors import parse_origins

MIN_SECRET_BYTES = 32
# Secrets that stand in tutorials, tools and examples: known to everybody, whatever their length.
LISTED_SECRETS = frozenset(
    {
        "secret",
        "test-secret",
        "test-secret-456",
        "changeme",
        "your-secret-key",
        "your-256-bit-secret",
        "your_secret_key",
        "a-string-secret-at-least-256-bits-long",
        "a-valid-string-secret-that-is-at-least-512-bits-long-which-is-very-long",
    }
)


class ConfigError(ValueError):
    """Stop the start; the message is shown after `ERROR: ` and never contains a secret."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold every setting of the proxy; seconds and bytes are in the names."""

    bind: str
    port: int
    upstream_url: str
    jwt_secret: bytes | None = field(repr=False)
    internal_key: bytes = field(repr=False)
    jwt_policy_file: Path | None = None
    jwt_revocation_file: Path | None = None
    warnings: tuple[str, ...] = ()
    trusted_hosts: frozenset[str] = frozenset()
    cors_origins: frozenset[str] = frozenset()
    log_format: str = "text"
    max_connections: int = 16384
    requests_per_minute: int = 0
    tenants_file: Path | None = None
    num_proxies: int = 1
    redis_url: str = field(default="", repr=False)
    trace_sample_ratio: float = 0.0
    max_body_bytes: int = 256 * 1024
    max_buffered_answer_bytes: int = 8 * 1024 * 1024
    header_deadline_seconds: float = 10.0
    body_deadline_seconds: float = 30.0
    body_grace_seconds: float = 5.0
    body_min_bytes_per_second: float = 1024.0
    write_stall_seconds: float = 20.0
    connect_timeout_seconds: float = 2.0
    upstream_timeout_seconds: float = 610.0
    drain_grace_seconds: float = 30.0


_HIGHEST = 2.0**31 - 1
# Field of Settings -> (environment variable, lowest value, highest). 0 switches the request window off.
_NUMBERS: Mapping[str, tuple[str, float, float]] = {
    "max_connections": ("PROXY_MAX_CONNECTIONS", 1, _HIGHEST),
    "requests_per_minute": ("PROXY_REQUESTS_PER_MINUTE", 0, _HIGHEST),
    "num_proxies": ("PROXY_REPLICAS", 1, 1024),
    "trace_sample_ratio": ("PROXY_TRACE_SAMPLE_RATIO", 0, 1),
    "max_body_bytes": ("PROXY_MAX_BODY_BYTES", 1, _HIGHEST),
    "max_buffered_answer_bytes": ("PROXY_MAX_BUFFERED_ANSWER_BYTES", 1, _HIGHEST),
    "header_deadline_seconds": ("PROXY_HEADER_DEADLINE_SECONDS", 0.05, _HIGHEST),
    "body_deadline_seconds": ("PROXY_BODY_DEADLINE_SECONDS", 0.05, _HIGHEST),
    "body_grace_seconds": ("PROXY_BODY_GRACE_SECONDS", 0.05, _HIGHEST),
    "body_min_bytes_per_second": ("PROXY_BODY_MIN_BYTES_PER_SECOND", 0, _HIGHEST),
    "write_stall_seconds": ("PROXY_WRITE_STALL_SECONDS", 0.05, _HIGHEST),
    "connect_timeout_seconds": ("PROXY_CONNECT_TIMEOUT_SECONDS", 0.05, _HIGHEST),
    "upstream_timeout_seconds": ("PROXY_UPSTREAM_TIMEOUT_SECONDS", 0.05, _HIGHEST),
    "drain_grace_seconds": ("PROXY_DRAIN_GRACE_SECONDS", 0, _HIGHEST),
}


def process_environment() -> Mapping[str, str]:
    """Return the process's environment; the one place where this package touches it."""
    return os.environ


def read_settings(
    environ: Mapping[str, str], *, port: int, upstream_url: str, bind: str | None = None, insecure_dev: bool = False
) -> Settings:
    """Combine options and environment (an option wins); raise ConfigError for the first wrong setting."""
    secret = environ.get("JWT_SECRET", "")
    policy_file = _readable_file(environ, "JWT_POLICY_FILE")
    if not secret and policy_file is None:
        raise ConfigError("Expected JWT_SECRET environment variable to be provided")
    bind = bind or environ.get("PROXY_BIND") or "127.0.0.1"
    warnings = []
    if policy_file is None:
        relaxed = is_loopback(bind) or insecure_dev or environ.get("INSECURE_DEV") == "1"
        warnings += _check_secret(secret, relaxed=relaxed)
    internal_key = _read_internal_key(environ)
    if internal_key is None:
        if not secret:
            raise ConfigError("Expected INTERNAL_AUTH_KEY or INTERNAL_AUTH_KEY_FILE when JWT_POLICY_FILE is set")
        internal_key = derive_internal_key(secret.encode("utf-8"))
        warnings.append("INTERNAL_AUTH_KEY is not set: the key between proxy and server is derived from JWT_SECRET")
    return Settings(
        bind=bind,
        port=_check_port(port),
        upstream_url=_check_upstream(upstream_url),
        jwt_secret=secret.encode("utf-8") if policy_file is None else None,
        internal_key=internal_key,
        jwt_policy_file=policy_file,
        jwt_revocation_file=_readable_file(environ, "JWT_REVOCATION_FILE"),
        tenants_file=_readable_file(environ, "PROXY_TENANTS_FILE"),
        redis_url=_read_redis_url(environ),
        warnings=tuple(warnings),
        trusted_hosts=frozenset(environ.get("PROXY_TRUSTED_HOSTS", "").lower().replace(",", " ").split()),
        cors_origins=_read_cors_origins(environ),
        log_format=_read_log_format(environ),
        **_read_numbers(environ),
    )


def is_loopback(bind: str) -> bool:
    """Say whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"


def _check_secret(secret: str, *, relaxed: bool) -> list[str]:
    num_bytes = len(secret.encode("utf-8"))
    if num_bytes >= MIN_SECRET_BYTES and secret not in LISTED_SECRETS:
        return []
    what = "is a well-known example" if secret in LISTED_SECRETS else f"has {num_bytes} bytes"
    text = f"JWT_SECRET {what}: it needs at least {MIN_SECRET_BYTES} random bytes"
    if not relaxed:
        raise ConfigError(f"{text}; use --insecure-dev or INSECURE_DEV=1 to accept it on a bind that others can reach")
    return [text]


def _read_internal_key(environ: Mapping[str, str]) -> bytes | None:
    key = environ.get("INTERNAL_AUTH_KEY", "").encode("utf-8")
    name = "INTERNAL_AUTH_KEY"
    path = environ.get("INTERNAL_AUTH_KEY_FILE", "")
    if not key and path:
        name = "INTERNAL_AUTH_KEY_FILE"
        try:
            mode = Path(path).stat().st_mode
            # Of a pipe, reading would wait for who writes to it.
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{name}: {path} is no regular file")
            key = Path(path).read_bytes().strip()
        except OSError as fault:
            raise ConfigError(f"{name}: cannot read the file ({fault.strerror})") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"{name}: the file must be readable by its owner alone (chmod 600)")
    elif not key:
        return None
    if len(key) < MIN_SECRET_BYTES:
        raise ConfigError(f"{name} has {len(key)} bytes: it needs at least {MIN_SECRET_BYTES}")
    return key


def _readable_file(environ: Mapping[str, str], name: str) -> Path | None:
    path = environ.get(name, "")
    if not path:
        return None
    try:
        # Of a pipe, opening alone would wait for who writes to it; whoever reads the file says that it is none.
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as fault:
        raise ConfigError(f"{name}: cannot read {path} ({fault.strerror})") from None
    return Path(path)


def _read_redis_url(environ: Mapping[str, str]) -> str:
    url = environ.get("REDIS_URL", "")
    parts = urlsplit(url)
    try:
        has_place = bool(parts.path if parts.scheme == "unix" else parts.hostname) and parts.port != 0
    except ValueError:
        has_place = False
    # redis-py takes anything else for database 0, without a word.
    if parts.scheme == "redis" and re.fullmatch(r"/?|/[0-9]{1,4}", parts.path) is None:
        has_place = False
    # No TLS: a handshake would hold up all other requests. No query: it could lift the time-outs.
    if url and (parts.scheme not in ("redis", "unix") or not has_place or parts.query or parts.fragment):
        raise ConfigError("REDIS_URL must be redis://[user:password@]host:port[/number] or unix:///path")
    if url and importlib.util.find_spec("redis") is None:
        raise ConfigError("REDIS_URL needs the package redis: install it, or take the setting away")
    return url


def _read_cors_origins(environ: Mapping[str, str]) -> frozenset[str]:
    try:
        return parse_origins(environ.get("PROXY_CORS_ORIGINS", ""))
    except ValueError as fault:
        raise ConfigError(f"PROXY_CORS_ORIGINS: {fault}") from None


def _read_log_format(environ: Mapping[str, str]) -> str:
    text = environ.get("LOG_FORMAT") or "text"
    if text not in ("text", "json"):
        raise ConfigError(f"LOG_FORMAT must be text or json, got {text[:32]!r}")
    return text


def _read_numbers(environ: Mapping[str, str]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name, (variable, lowest, highest) in _NUMBERS.items():
        text = environ.get(variable, "")
        if not text:
            continue
        try:
            number = float(text) if name.endswith(("_second", "_seconds", "_ratio")) else int(text)
        except ValueError:
            raise ConfigError(f"{variable} must be a number, got {text[:32]!r}") from None
        if not lowest <= number <= highest:
            bounds = f"at least {lowest}" if highest == _HIGHEST else f"{lowest} to {highest}"
            raise ConfigError(f"{variable} must be {bounds}, got {text[:32]!r}")
        numbers[name] = number
    return numbers


def _check_port(port: int) -> int:
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be 0 to 65535, got {port}")
    return port


def _check_upstream(url: str) -> str:
    parts = urlsplit(url)
    try:
        port_valid = parts.port is None or parts.port > 0
    except ValueError:
        port_valid = False
    if (
        parts.scheme != "http"
        or not parts.hostname
        or not port_valid
        or parts.path.strip("/")
        or parts.query
        or parts.username
    ):
        raise ConfigError("--hostname must be the upstream as http://host:port")
    return f"http://{parts.netloc}"
