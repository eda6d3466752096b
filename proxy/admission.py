"""Own the decision about one request head: may it go on, as whom, and to which upstream path.

Pure: a `RequestHead` in, an `Admission` or a `Refusal` out, before one byte of the body is read. It does not know
sockets, Flask or the upstream. Order: target and Host, route and method, credentials, scope, body framing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import parse_qsl, urlencode

from proxy.answers import Refusal
from proxy.auth import AuthError, Claims
from proxy.routes import RouteTable, Scope

# RFC 9110 section 7.2 and RFC 3986 section 3.2.2: reg-name or IPv4, or a bracketed IPv6 literal, and a port.
_HOST = re.compile(r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,253})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
# RFC 3986 section 3.4, without the characters the grammar does not have.
_QUERY = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_MAX_QUERY_PAIRS = 64
_METHODS_WITH_BODY = frozenset({"POST"})


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Hold what the head of a request says; header names are lower case, repeated fields are joined with commas."""

    method: str
    target: str
    version: tuple[int, int]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Admission:
    """Let a request pass: where it goes (`path`, `query` as sent upstream) and who sends it (None on public routes).

    `template` is the route's, which names it whatever the path is.
    """

    method: str
    template: str
    path: str
    query: str
    claims: Claims | None
    has_body: bool


class CredentialCheck(Protocol):
    """What decides about credentials: an `Authenticator`, or the one that is in force at each call."""

    def authenticate(self, authorization_header: str) -> Claims:
        """Return the claims of an Authorization header; raise AuthError."""

    def authenticate_api_key(self, api_key_header: str) -> Claims:
        """Return the claims of an X-Api-Key header; raise AuthError."""


class Admitter:
    """Decide about request heads; one object serves all requests, it holds no state of any."""

    def __init__(
        self, table: RouteTable, authenticator: CredentialCheck, *, trusted_hosts: frozenset[str], max_body_bytes: int
    ) -> None:
        """Take the rules; an empty `trusted_hosts` accepts every valid Host: it never routes and is never repeated."""
        self._table = table
        self._authenticator = authenticator
        self._trusted_hosts = trusted_hosts
        self._max_body_bytes = max_body_bytes

    def admit(self, head: RequestHead) -> Admission:
        """Return where the request goes and as whom; raise Refusal."""
        path, query = self._split_target(head)
        route = self._table.find(head.method, path)
        claims = None
        if route.scope is not Scope.PUBLIC:
            claims = self._authenticate(head.headers)
            if route.scope is not None and route.scope.value not in claims.scopes:
                raise Refusal(403, "scope_missing", f"JWT scope must include '{route.scope.value}'.")
        return Admission(head.method, route.template, path, _rebuild_query(query), claims, self._check_framing(head))

    def methods(self, head: RequestHead) -> list[str]:
        """List the methods of the path that a request names, without asking who calls; raise Refusal."""
        path, _query = self._split_target(head)
        self._check_framing(head)
        return self._table.methods(path)

    def _split_target(self, head: RequestHead) -> tuple[str, str]:
        host = head.headers.get("host")
        if host is None and head.version >= (1, 1):
            # RFC 9112 section 3.2.
            raise Refusal(400, "host_missing", "Host header is required.")
        if host is not None:
            self._check_host(host)
        target = head.target
        if target.lower().startswith("http://"):
            # RFC 9112 section 3.2.2: absolute-form. It must name the host the client says it talks to.
            authority, slash, rest = target[len("http://") :].partition("/")
            if host is None or authority.lower() != host.lower():
                raise Refusal(400, "target_invalid", "Request target names another host.")
            target = slash + rest or "/"
        if not target.startswith("/") and head.method != "CONNECT":
            raise Refusal(400, "target_invalid", "Request target is not valid.")
        path, _, query = target.partition("?")
        if "#" in target or _QUERY.fullmatch(query) is None:
            raise Refusal(400, "target_invalid", "Request target is not valid.")
        return path, query

    def _check_host(self, host: str) -> None:
        match = _HOST.fullmatch(host)
        if match is None:
            raise Refusal(400, "host_invalid", "Host header is not valid.")
        if self._trusted_hosts and match.group("name").lower() not in self._trusted_hosts:
            raise Refusal(400, "host_untrusted", "Host header is not one of this service's names.")

    def _authenticate(self, headers: Mapping[str, str]) -> Claims:
        if "authorization" in headers and "x-api-key" in headers:
            raise Refusal(400, "two_credentials", "Send either Authorization or X-Api-Key, not both.")
        try:
            if "x-api-key" in headers:
                return self._authenticator.authenticate_api_key(headers["x-api-key"])
            return self._authenticator.authenticate(headers.get("authorization", ""))
        except AuthError as fault:
            raise Refusal(fault.status, fault.code, fault.message) from None

    def _check_framing(self, head: RequestHead) -> bool:
        coding = head.headers.get("transfer-encoding")
        if coding is not None and coding.strip().lower() != "chunked":
            raise Refusal(501, "coding_unsupported", "Transfer-Encoding must be chunked.")
        length = head.headers.get("content-length", "0")
        # The parser has refused everything but digits; more than 18 of them are never a body we would take.
        num_bytes = int(length) if len(length) <= 18 else self._max_body_bytes + 1
        has_body = coding is not None or num_bytes > 0
        if has_body and head.method not in _METHODS_WITH_BODY:
            raise Refusal(400, "body_unexpected", f"{head.method} takes no body.")
        if num_bytes > self._max_body_bytes:
            raise Refusal(413, "body_too_large", f"Request body is larger than {self._max_body_bytes} bytes.")
        if has_body and head.headers.get("content-encoding", "identity").lower() != "identity":
            raise Refusal(415, "content_encoding", "Content-Encoding must be identity.")
        return has_body


def _rebuild_query(query: str) -> str:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_PAIRS)
    except ValueError:
        raise Refusal(400, "query_invalid", "Query is not valid UTF-8 or has too many fields.") from None
    return urlencode(pairs)
