"""Own the Flask app of PROCESS 3: one door for every request, the core decides, the upstream answers.

Runs in the gevent worker. It turns a WSGI environ into a `RequestHead`, carries out the admission, and makes a Flask
answer of what comes back. It does not know how a bearer is verified, which routes exist or how sockets are watched.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from flask import Flask, Response, request

from proxy.access import Access, AccessFiles
from proxy.admission import Admission, Admitter, RequestHead
from proxy.answers import ERROR_CODE_HEADER, Refusal, error_headers
from proxy.auth import Claims, mint_assertion
from proxy.config import Settings
from proxy.connection import ClientLeft
from proxy.cors import CrossOrigin
from proxy.error_bodies import refusal_body
from proxy.forward import AnswerTruncated, Upstream, UpstreamAnswer
from proxy.headers import AnswerFault, answer_headers, identity_headers, upstream_headers, valid_request_id
from proxy.limits import CallLimits, LimitHeaders, open_tenants, redis_client
from proxy.logs import TRANSACTION_LOGGER
from proxy.open_calls import CallRevoked
from proxy.routes import RouteTable
from proxy.shared_bodies import SharedBodies
from proxy.strangers import SharedAnswer, Strangers
from proxy.trace_context import TRACEPARENT_HEADER, Trace, continue_trace
from proxy.transaction import Transaction
from proxy.worker import AnswerBroken

_STATS_MEMBER = "__stats"
_MAX_STATS_ANSWER_BYTES = 1024 * 1024
_PUBLIC_TEXT = "text/plain"
# Whoever watches over the service asks these, and one answer of the server's does for all who wait for it.
_SHARED_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
_PUBLIC_ANSWER_SECONDS = 10.0


class RoutelessFlask(Flask):
    """Leave every path to the route table of the core, and nothing of a request for the garbage collector.

    Flask's router would add redirects, OPTIONS and its own 404 page. An exception that a request ends with, its own "no
    route" among them, it keeps in a cycle of some hundred objects, and to collect those of thousands of requests stops
    all others.
    """

    def create_url_adapter(self, _request: Any) -> None:
        """Return none, which makes Flask route nothing."""

    def should_ignore_error(self, _error: BaseException | None) -> bool:
        """Let Flask forget what a request ended with before its frames, which that refers to, have gone."""
        return True


class RelayedResponse(Response):
    """Carry an answer whose headers are exactly those given."""

    default_mimetype = None
    autocorrect_location_header = False


def create_app(settings: Settings, now: Callable[[], float] = time.time) -> Flask:
    """Build the app from settings; `now` gives Unix seconds. Raises FileFault, KeyFault or RouteFault.

    What its worker must refresh every few seconds is in the extension `watched`, a list for each greenlet.
    """
    files = AccessFiles(settings.jwt_secret or b"", settings.jwt_policy_file, settings.jwt_revocation_file)
    access = Access(files, now)
    tenants = open_tenants(settings)
    limits = CallLimits(lambda: tenants.value, settings.num_proxies, redis_client(settings))
    door = Door(settings, access, limits, now)
    app = RoutelessFlask("proxy", static_folder=None)
    # An unexpected exception leaves through the worker, which answers JSON and logs; Flask would write an HTML page.
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.before_request(lambda: door.answer(request.environ))
    app.extensions["watched"] = [*access.watched, [tenants], [limits.windows]]
    return app


class Door:
    """Let requests in, forward them, and give the answers back."""

    def __init__(self, settings: Settings, access: Access, limits: CallLimits, now: Callable[[], float]) -> None:
        """Put the parts together."""
        self._settings = settings
        self._now = now
        self._open_calls = access.open_calls
        self._admitter = Admitter(
            RouteTable(),
            access,
            trusted_hosts=settings.trusted_hosts,
            max_body_bytes=settings.max_body_bytes,
        )
        self._cross_origin = CrossOrigin(settings.cors_origins)
        self._limits = limits
        self._upstream = Upstream(
            settings.upstream_url,
            connect_timeout=settings.connect_timeout_seconds,
            read_timeout=settings.upstream_timeout_seconds,
        )
        self._public_bodies = SharedBodies()
        self._strangers = Strangers()
        self._logger = logging.getLogger(TRANSACTION_LOGGER)

    def answer(self, environ: Mapping[str, Any]) -> Response:
        """Answer one request; every way out writes one transaction line when the request has ended."""
        connection = environ["proxy.connection"]
        head = read_head(environ)
        origin = head.headers.get("origin")
        connection.error_headers = self._cross_origin.answer_headers(origin, [ERROR_CODE_HEADER])
        trace = continue_trace(head.headers.get(TRACEPARENT_HEADER), self._settings.trace_sample_ratio)
        path, address = head.target.partition("?")[0], str(environ.get("REMOTE_ADDR", ""))
        transaction = Transaction(path, address, time.monotonic, self._logger, trace.trace_id)
        connection.on_end(lambda: transaction.finish(client_left=connection.left, cut_reason=connection.cut_reason))
        request_id = "req_" + secrets.token_hex(16)
        client_id = valid_request_id(head.headers.get("x-request-id"))
        identity = identity_headers(request_id, client_id)
        limit_headers: LimitHeaders = ()
        has_waited = self._cross_origin.is_preflight(head.method, head.headers)
        try:
            if has_waited:
                response = self._answer_preflight(head, identity)
            else:
                admission = self._admitter.admit(head)
                transaction.claims = admission.claims
                if admission.claims is None:
                    has_waited = True
                    response = self._answer_stranger(connection, head, admission, (request_id, client_id), trace)
                else:
                    admission, limit_headers = self._enter(connection, admission, admission.claims)
                    answer = self._forward(connection, head, admission, request_id, trace)
                    headers = _selected_headers(answer.headers, request_id, client_id)
                    # HTTP/1.0 has no chunks: a broken answer would look whole. It gets a length, or a 5xx.
                    response = self._respond(answer, headers, transaction, is_whole=head.version < (1, 1))
        except Refusal as refusal:
            if transaction.claims is None and not has_waited:
                self._strangers.wait_for_turn()
            connection.refuse(malformed=refusal.status == HTTPStatus.BAD_REQUEST)
            body = refusal_body(path, refusal, request_id, head.headers.get("content-type", ""))
            response = RelayedResponse(body, refusal.status, [*error_headers(refusal), *identity])
        response.headers.extend(limit_headers)
        response.headers.extend(self._cross_origin.answer_headers(origin, response.headers.keys()))
        transaction.status_code = response.status_code
        return response

    def _answer_preflight(self, head: RequestHead, identity: Sequence[tuple[str, str]]) -> Response:
        self._strangers.wait_for_turn()
        allowed = self._cross_origin.preflight_headers(head.headers, self._admitter.methods(head))
        return RelayedResponse(None, HTTPStatus.NO_CONTENT, [*allowed, *identity])

    def _enter(self, connection: Any, admission: Admission, claims: Claims) -> tuple[Admission, LimitHeaders]:
        # Nothing may wait between the check of a bearer and this, or its revocation could miss the call.
        cut = partial(connection.cut, CallRevoked())
        connection.on_end(self._open_calls.open(claims.token_id, cut))
        connection.take_place()
        call = self._limits.enter(claims, admission.template)
        connection.on_end(call.leave)
        return replace(admission, claims=call.claims), call.headers

    def _forward(
        self, connection: Any, head: RequestHead, admission: Admission, request_id: str, trace: Trace
    ) -> UpstreamAnswer:
        assertion = None
        body = connection.read_body(self._settings.max_body_bytes) if admission.has_body else None
        if admission.claims is not None:
            assertion = mint_assertion(
                self._settings.internal_key,
                admission.claims,
                method=admission.method,
                path=admission.path,
                request_id=request_id,
                now=self._now(),
            )
        headers = upstream_headers(head.headers, request_id=request_id, assertion=assertion, trace=trace)
        target = admission.path + ("?" + admission.query if admission.query else "")
        connection.watch()
        try:
            most = _PUBLIC_ANSWER_SECONDS if admission.claims is None else None
            answer = self._upstream.send(admission.method, target, headers, body, most_seconds=most)
        except (ClientLeft, CallRevoked) as left:
            # Thrown into a connect, it leaves the only reference to the socket in a frame: urllib3 closes it on OSError
            # alone. Without those frames the socket is closed here and now.
            raise left.with_traceback(None) from None
        connection.on_end(answer.close)
        return answer

    def _answer_stranger(
        self, connection: Any, head: RequestHead, admission: Admission, ids: tuple[str, str | None], trace: Trace
    ) -> Response:
        path = admission.path
        is_shared = path in _SHARED_PATHS and admission.method == "GET" and not admission.query
        # Who leaves while waiting for a turn is noticed; no public route has a body.
        connection.watch()
        came_at = time.monotonic()
        with self._strangers.turn():
            shared = self._strangers.asked_since(came_at, path) if is_shared else None
            if shared is not None:
                is_bodiless = False
                headers = _selected_headers(shared.headers, *ids)
                response: Response = RelayedResponse(shared.body, shared.status, headers)
            else:
                # Strangers may read as slowly as they like, but no thread of the server waits for them.
                asked_at = time.monotonic()
                answer = self._forward(connection, head, admission, ids[0], trace)
                is_bodiless = answer.bodiless
                try:
                    response = self._respond(answer, _selected_headers(answer.headers, *ids), None, is_whole=True)
                finally:
                    answer.close()
                if is_shared:
                    kept = [(name, value) for name, value in answer.headers if name.lower() != "request-id"]
                    self._strangers.keep(path, SharedAnswer(asked_at, answer.status, kept, response.get_data()))
        connection.bound_answer()
        if not is_bodiless:
            body, release = self._public_bodies.hold(response.get_data())
            connection.on_end(release)
            response.response = [body]
        return response

    def _respond(
        self, answer: UpstreamAnswer, headers: list[tuple[str, str]], transaction: Transaction | None, *, is_whole: bool
    ) -> Response:
        """Make the client's answer; without a transaction it is a stranger's."""
        kind = answer.header("Content-Type").partition(";")[0].strip().lower()
        if not 200 <= answer.status < 300 and not (400 <= answer.status < 600):
            raise Refusal(502, "upstream_status", "Inference server gave an unexpected status.")
        if answer.bodiless:
            return _bodiless(answer, headers)
        public_text = transaction is None and kind == _PUBLIC_TEXT
        if answer.status >= 400 and kind != "application/json" and not public_text:
            raise _upstream_error(answer)
        if kind == "application/json" and (answer.length or 0) <= _MAX_STATS_ANSWER_BYTES and answer.length is not None:
            body, stats = take_stats(answer.read_all(_MAX_STATS_ANSWER_BYTES))
            if transaction is not None:
                transaction.stats = stats
            return RelayedResponse(body, answer.status, headers)
        if is_whole:
            return RelayedResponse(answer.read_all(self._settings.max_buffered_answer_bytes), answer.status, headers)
        if answer.length is not None:
            headers = [*headers, ("Content-Length", str(answer.length))]
        return RelayedResponse(_stream(answer), answer.status, headers, direct_passthrough=True)


def read_head(environ: Mapping[str, Any]) -> RequestHead:
    """Turn a WSGI environ into the core's view: the target as it was sent, header names in lower case."""
    headers = {name[5:].lower().replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")}
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.lower().replace("_", "-")] = environ[name]
    major, _, minor = environ["SERVER_PROTOCOL"].removeprefix("HTTP/").partition(".")
    return RequestHead(environ["REQUEST_METHOD"], environ["RAW_URI"], (int(major), int(minor)), headers)


def take_stats(body: bytes) -> tuple[bytes, object]:
    """Take the statistics member out of a JSON object; other bodies come back unchanged, byte by byte."""
    if _STATS_MEMBER.encode() not in body:
        return body, None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body, None
    if not isinstance(value, dict) or _STATS_MEMBER not in value:
        return body, None
    stats = value.pop(_STATS_MEMBER)
    return json.dumps(value, ensure_ascii=False).encode("utf-8"), stats


def _stream(answer: UpstreamAnswer) -> Iterator[bytes]:
    # An empty piece makes gunicorn send the head now: the upstream has decided on it, the client need not wait.
    yield b""
    try:
        if answer.chunked:
            yield from answer.read_chunks()
            return
        while chunk := answer.read_some():
            yield chunk
    except AnswerTruncated as fault:
        raise AnswerBroken(f"upstream stopped in the middle ({fault})") from None


def _bodiless(answer: UpstreamAnswer, headers: list[tuple[str, str]]) -> Response:
    if answer.length is not None:
        headers = [*headers, ("Content-Length", str(answer.length))]
    return RelayedResponse(None, answer.status, headers)


def _selected_headers(
    headers: Sequence[tuple[str, str]], request_id: str, client_id: str | None
) -> list[tuple[str, str]]:
    try:
        return answer_headers(headers, request_id=request_id, client_id=client_id)
    except AnswerFault:
        raise Refusal(502, "upstream_headers", "Inference server sent an invalid header.") from None


def _upstream_error(answer: UpstreamAnswer) -> Refusal:
    retry_after = answer.header("Retry-After")
    headers = {"Retry-After": retry_after} if retry_after.isdigit() else {}
    return Refusal(answer.status, "upstream_error", f"Inference server answered {answer.status}.", headers)
