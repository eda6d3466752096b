"""Check on the running service that every route asks every kind of caller for what the one rule says, at both doors.

The proxy is sent bearers, the server itself assertions. That both tables are what the rule says, and that a planted
wrong scope is found, is in tests/server/test_app_scopes.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import jwt
import pytest
import requests

from proxy.auth import Claims, mint_assertion
from proxy.routes import ROUTES
from tests.integration.route_walk import KNOWN_CALLERS, NOBODY, Caller, Door, Route, plain, walk
from tests.integration.service import SECRET, Service, new_request_id, running_service

INTERNAL_KEY = "an-internal-key-of-these-tests-of-32-bytes"
PROXY_ROUTES = [plain(route.method, route.template) for route in ROUTES]

Credential = Callable[[str, str, Caller], Mapping[str, str]]


def sign(caller: Caller, key: str = SECRET, **claims: object) -> str:
    """Return a caller's JWT."""
    own = {"team_id": caller.tenant, "token_id": "one", "scope": " ".join(sorted(caller.scopes or ()))}
    return jwt.encode({**own, "exp": time.time() + 60, **claims}, key, "HS256")


def bearer_of(_method: str, _path: str, caller: Caller) -> Mapping[str, str]:
    return {"Authorization": f"Bearer {sign(caller)}"}


FULL = KNOWN_CALLERS[4]
UNKNOWN_BEARERS: dict[str, Mapping[str, str]] = {
    "no bearer": {},
    "garbage": {"Authorization": "Bearer garbage"},
    "a foreign key": {"Authorization": f"Bearer {sign(FULL, 'another-secret-of-at-least-32-bytes!')}"},
    "expired": {"Authorization": f"Bearer {sign(FULL, exp=time.time() - 3600)}"},
    "not yet valid": {"Authorization": f"Bearer {sign(FULL, nbf=time.time() + 3600)}"},
    "another scheme": {"Authorization": f"Basic {sign(FULL)}"},
    "without a tenant": {"X-Api-Key": jwt.encode({"scope": "inference metrics"}, SECRET, "HS256")},
    "a cookie": {"Cookie": f"Authorization={sign(FULL)}"},
    "our own assertion": {"X-Internal-Assertion": sign(FULL, INTERNAL_KEY)},
}


def assertion_of(
    method: str, path: str, caller: Caller, *, key: str = INTERNAL_KEY, age_seconds: float = 0.0
) -> dict[str, str]:
    """Return the headers of a call as the proxy makes them."""
    claims = Claims(caller.tenant, None, caller.scopes or frozenset(), None, {})
    request_id, now = new_request_id(), time.time() - age_seconds
    minted = mint_assertion(key.encode(), claims, method=method, path=path, request_id=request_id, now=now)
    return {"X-Internal-Assertion": minted, "Request-Id": request_id}


UNKNOWN_ASSERTIONS: dict[str, Credential] = {
    "none": lambda *_: {},
    "garbage": lambda *_: {"X-Internal-Assertion": "a.b.c"},
    "a bearer": bearer_of,
    "a bearer as one": lambda *_: {"X-Internal-Assertion": sign(FULL)},
    "a foreign key": lambda method, path, _: assertion_of(method, path, FULL, key="k" * 32),
    "expired": lambda method, path, _: assertion_of(method, path, FULL, age_seconds=60.0),
    "of another path": lambda method, path, _: assertion_of(method, path + "x", FULL),
    "of another method": lambda _method, path, _: assertion_of("PUT", path, FULL),
    "of another call": lambda method, path, _: {**assertion_of(method, path, FULL), "Request-Id": new_request_id()},
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service whose server takes nothing but the proxy's assertions."""
    settings = {"INFERENCE_API_INSECURE_DEV": "", "INTERNAL_AUTH_KEY": INTERNAL_KEY}
    with running_service(proxy=True, INFERENCE_API_MOCK_TOKENS_PER_SECOND="0", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def request_id(service: Service) -> str:
    """The public id of a request of tenant alpha."""
    answer = requests.post(
        f"{service.proxy_url}/inference/mock", json={"text": "x"}, headers=bearer_of("", "", FULL), timeout=30
    )
    assert answer.status_code == 200
    return answer.headers["Request-Id"]


def door_at(base_url: str, request_id: str, credential: Credential) -> Door:
    """Return a door that sends real calls."""
    session = requests.Session()
    session.trust_env = False

    def send(route: Route, caller: Caller) -> int:
        method, path = route[0], path_of(route, request_id)
        body = {"json": {"text": "x"}} if method == "POST" else {}
        answer = session.request(method, base_url + path, headers=credential(method, path, caller), timeout=30, **body)
        return answer.status_code

    return send


def path_of(route: Route, request_id: str) -> str:
    """Return a path that exists."""
    path = route[1].replace("/docs/<>", "/docs/start.js")
    if path.startswith("/v1/responses/"):
        return path.replace("<>", request_id.replace("req_", "resp_"))
    return path.replace("<>", request_id if path.startswith("/v1/requests/") else "mock")


def test_the_proxy_asks_every_caller_on_every_route_for_what_the_rule_says(service: Service, request_id: str) -> None:
    assert walk(PROXY_ROUTES, KNOWN_CALLERS, door_at(service.proxy_url, request_id, bearer_of)) == []
    for headers in UNKNOWN_BEARERS.values():
        door = door_at(service.proxy_url, request_id, lambda *_, sent=headers: sent)  # type: ignore[misc]
        assert walk(PROXY_ROUTES, [NOBODY], door) == [], headers


def test_the_server_asks_the_same_of_the_proxys_word(service: Service, request_id: str) -> None:
    assert walk(PROXY_ROUTES, KNOWN_CALLERS, door_at(service.url, request_id, assertion_of)) == []
    for name, credential in UNKNOWN_ASSERTIONS.items():
        assert walk(PROXY_ROUTES, [NOBODY], door_at(service.url, request_id, credential)) == [], name
