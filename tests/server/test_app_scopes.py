"""Check that both tables of routes say what the one rule says, and that the walk finds a planted wrong scope."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jwt
import pytest
from flask import Flask, Response

from inference_api.errors import SettingError
from inference_api.server.app import SCOPES
from inference_api.server.identity import ASSERTION_HEADER
from proxy.admission import Admitter, RequestHead
from proxy.answers import Refusal
from proxy.auth import Authenticator, Claims, mint_assertion
from proxy.routes import ROUTES, RouteTable, Scope
from tests.integration.route_walk import KNOWN_CALLERS, NOBODY, Caller, Door, Route, needed_scope, plain, walk
from tests.server.conftest import INTERNAL_KEY, NOW
from tests.server.fakes import FakeClient

REQUEST_ID = "req_" + "ab" * 16
CALLERS = [NOBODY, *(caller for caller in KNOWN_CALLERS if caller.tenant == "alpha")]
"""Those whom scopes alone tell apart."""


def server_routes(app: Flask) -> dict[Route, str]:
    """Return the endpoint of every route."""
    rules = [(method, rule) for rule in app.url_map.iter_rules() for method in rule.methods or ()]
    return {plain(method, rule.rule): rule.endpoint for method, rule in rules if method != "HEAD"}


def proxy_door(admitter: Admitter, key: bytes) -> Door:
    """Return the proxy's decision as a door: 200 for who is let in."""

    def decide(route: Route, caller: Caller) -> int:
        bearer = jwt.encode({"team_id": caller.tenant, "scope": " ".join(caller.scopes or ())}, key, "HS256")
        headers = {} if caller is NOBODY else {"authorization": f"Bearer {bearer}"}
        try:
            admitter.admit(RequestHead(route[0], route[1].replace("<>", "x"), (1, 1), {"host": "x", **headers}))
        except Refusal as refusal:
            return refusal.status
        return 200

    return decide


def server_door(app: Flask) -> Door:
    """Return an application as a door, that the proxy's assertions come to."""
    app.config["PROPAGATE_EXCEPTIONS"] = False

    def send(route: Route, caller: Caller) -> int:
        method, path = route[0], route[1].replace("/docs/<>", "/docs/start.js").replace("<>", "mock")
        claims = Claims(caller.tenant, None, caller.scopes or frozenset(), None, {})
        assertion = mint_assertion(INTERNAL_KEY, claims, method=method, path=path, request_id=REQUEST_ID, now=NOW)
        headers = {} if caller is NOBODY else {ASSERTION_HEADER: assertion, "Request-Id": REQUEST_ID}
        status = app.test_client().open(path, method=method, headers=headers).status_code
        # There is no request of this id: who is told so was let in.
        return 200 if status == 404 and "<>" in route[1] else status

    return send


def test_both_tables_have_the_same_routes_with_the_scopes_of_the_rule(make_app: Callable[..., Flask]) -> None:
    at_proxy = {plain(it.method, it.template): it.scope.value if it.scope else "undecided" for it in ROUTES}
    at_server = {route: SCOPES[endpoint] or "public" for route, endpoint in server_routes(make_app()).items()}
    by_rule = {route: needed_scope(route) or "public" for route in at_proxy}
    assert at_proxy == by_rule == at_server


@pytest.mark.parametrize("scope", Scope)
def test_a_route_of_the_proxy_with_a_wrong_scope_is_found(scope: Scope) -> None:
    key = b"k" * 32
    authenticator = Authenticator.from_shared_secret(key, lambda: NOW)
    for index, planted in enumerate(ROUTES):
        routes = [*ROUTES[:index], dataclasses.replace(planted, scope=scope), *ROUTES[index + 1 :]]
        admitter = Admitter(RouteTable(routes), authenticator, trusted_hosts=frozenset(), max_body_bytes=1)
        faults = walk([plain(planted.method, planted.template)], CALLERS, proxy_door(admitter, key))
        assert bool(faults) == (scope is not planted.scope), (planted, faults)


@pytest.mark.parametrize("scope", [None, "inference", "metrics"])
def test_an_endpoint_of_the_server_with_a_wrong_scope_is_found(
    make_app: Callable[..., Flask], fake_client: FakeClient, monkeypatch: pytest.MonkeyPatch, scope: str | None
) -> None:
    app = make_app(anonymous=False)
    for route, endpoint in server_routes(app).items():
        with monkeypatch.context() as planted:
            planted.setitem(SCOPES, endpoint, scope)
            faults = walk([route], CALLERS, server_door(app))
        assert bool(faults) == (scope != needed_scope(route)), (route, faults)


@pytest.mark.parametrize("scope", ["", "Inference", "inference metrics", "admin"])
def test_a_scope_that_no_bearer_can_have_stops_the_start(
    make_app: Callable[..., Flask], monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    monkeypatch.setitem(SCOPES, "inspection.rows", scope)
    with pytest.raises(SettingError, match=r"without a declared scope: inspection\.rows$"):
        make_app()


def test_an_endpoint_that_came_after_the_start_is_closed(make_app: Callable[..., Flask]) -> None:
    app = make_app()
    ran = []

    def late() -> Response:
        ran.append(True)
        return Response()

    app.add_url_rule("/late", "late", late)
    response = app.test_client().get("/late")
    assert (response.status_code, response.headers["X-Error-Code"]) == (403, "forbidden")
    assert ran == []
