"""Say who calls: check the proxy's assertion once, at arrival.

Runs in PROCESS 1. Without the proxy's assertion nobody reaches a route that needs a tenant; on a loopback bind with
the development switch on, a caller without one is the tenant 'local'. Reads only what the proxy signed: no header of
a client says who it is.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from inference_api.config import Settings, jwt_secret
from inference_api.errors import ForbiddenError, SettingError, UnauthenticatedError
from proxy.auth import AuthError, Claims, derive_internal_key, verify_assertion

ASSERTION_HEADER = "X-Internal-Assertion"
_REQUEST_ID = re.compile(r"req_[0-9a-f]{32}")

LOCAL_CLAIMS = Claims(
    tenant="local", token_id=None, scopes=frozenset({"inference", "metrics"}), expires_at=None, quotas={}
)


class Identity:
    """Authenticate calls with the internal key; `allow_anonymous` is the development switch."""

    def __init__(self, key: bytes, now: Callable[[], float], *, allow_anonymous: bool) -> None:
        self._key = key
        self._now = now
        self._allow_anonymous = allow_anonymous

    def authenticate(
        self, *, method: str, path: str, assertion: str | None, request_id: str, scope: str, on_loopback: bool
    ) -> Claims:
        """Return the caller's claims; `on_loopback` tells whether the call came in on a loopback address.

        Raises UnauthenticatedError without a valid assertion for this very call, ForbiddenError without the scope.
        """
        if assertion is None:
            if self._allow_anonymous and on_loopback:
                return LOCAL_CLAIMS
            raise UnauthenticatedError("This address serves the proxy only; send the request to the proxy.")
        try:
            claims = verify_assertion(
                self._key, assertion, method=method, path=path, request_id=request_id, now=self._now()
            )
        except AuthError:
            raise UnauthenticatedError("The proxy's assertion is not valid for this request.") from None
        if scope not in claims.scopes:
            raise ForbiddenError(f"This route needs the scope '{scope}'.")
        return claims


def is_loopback_socket(sock: socket.socket | None) -> bool:
    """Tell whether a connection came in on a loopback address; without a socket (a test client) it did.

    Asked of the socket itself: what the settings say is not what a gunicorn option has bound.
    """
    if sock is None:
        return True
    address = ipaddress.ip_address(str(sock.getsockname()[0]))
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def choose_request_id(proposed: str | None) -> str:
    """Return the proxy's request id, which its assertion is bound to, or draw one for a call without a proxy."""
    if proposed is not None and _REQUEST_ID.fullmatch(proposed):
        return proposed
    return f"req_{secrets.token_hex(16)}"


def read_internal_key(settings: Settings) -> bytes:
    """Return the key of the proxy's assertions; raise SettingError if it is weak.

    It is INTERNAL_AUTH_KEY, or in INTERNAL_AUTH_KEY_FILE; for a server and a proxy that were started by hand with
    nothing but JWT_SECRET it is derived from that; otherwise it is in the run folder, where the supervisor made it.
    """
    if settings.internal_auth_key:
        return settings.internal_auth_key.encode()
    secret = jwt_secret()
    if secret and not settings.internal_auth_key_file:
        return derive_internal_key(secret.encode())
    path: Path = settings.key_path
    try:
        mode = path.stat().st_mode
        # Of a pipe, reading would wait for who writes to it.
        if not stat.S_ISREG(mode):
            raise SettingError(f"INTERNAL_AUTH_KEY_FILE={path} is no regular file")
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingError(f"INTERNAL_AUTH_KEY_FILE={path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise SettingError(f"INTERNAL_AUTH_KEY_FILE={path} can be read by others: chmod 600 {path}")
    if len(key) < 32:
        raise SettingError(f"INTERNAL_AUTH_KEY_FILE={path} holds {len(key)} bytes; at least 32 are needed.")
    return key
