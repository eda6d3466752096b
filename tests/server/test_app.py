"""Check what surrounds every route: identity and scopes, request ids, and JSON for every error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from gunicorn.http.errors import InvalidChunkExtension, InvalidChunkSize, InvalidHeaderName

from inference_api.errors import SettingError
from inference_api.server.app import SCOPES
from inference_api.server.bodies import StrictModel
from inference_api.server.identity import ASSERTION_HEADER
from proxy.auth import Claims, mint_assertion
from tests.server.conftest import INTERNAL_KEY, NOW
from tests.server.fakes import FakeClient

REQUEST_ID = "req_" + "ab" * 16


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


def _headers(method: str, path: str, *scopes: str, tenant: str = "alpha") -> dict[str, str]:
    claims = Claims(tenant, None, frozenset(scopes), None, {})
    assertion = mint_assertion(INTERNAL_KEY, claims, method=method, path=path, request_id=REQUEST_ID, now=NOW)
    return {ASSERTION_HEADER: assertion, "Request-Id": REQUEST_ID}


def test_the_scope_table_names_every_endpoint_and_no_other(app: Flask) -> None:
    assert {rule.endpoint for rule in app.url_map.iter_rules()} == SCOPES.keys()


def models_of(base: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for model in base.__subclasses__():
        yield from (model, *models_of(model))


def described(model: type[StrictModel]) -> object:
    model.model_rebuild()
    return model.__pydantic_core_schema__


def lists_in(schema: object) -> Iterator[dict[str, Any]]:
    """Find the lists of one of pydantic's schemas."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        schema = [member for name, member in schema.items() if name != "metadata"]
    if isinstance(schema, list | tuple):
        for member in schema:
            yield from lists_in(member)


def test_no_list_of_any_body_gathers_a_fault_for_each_of_its_entries(app: Flask) -> None:
    models = [model for model in models_of(StrictModel) if model.__module__.startswith("inference_api.")]
    found = [(model, schema) for model in models for schema in lists_in(described(model))]
    assert len(found) > 20
    for model, schema in found:
        takes_anything = schema.get("items_schema", {"type": "any"})["type"] == "any"
        assert takes_anything or "max_length" in schema or schema.get("fail_fast"), (model, schema)


@pytest.mark.parametrize("fault", [InvalidChunkSize(b"x"), InvalidChunkExtension("x"), InvalidHeaderName("X")])
def test_a_body_that_is_no_chunks_is_the_callers_fault(app: Flask, fault: Exception) -> None:
    class BrokenBody:
        def read(self, _size: int = -1) -> bytes:
            raise fault

    answer = app.test_client().post(
        "/v1/completions",
        content_type="application/json",
        environ_overrides={"wsgi.input": BrokenBody(), "wsgi.input_terminated": True},
    )
    told = answer.get_json()["error"]["message"]
    assert (answer.status_code, told) == (400, "The body is not framed correctly.")


def test_only_health_and_the_description_are_open_to_everybody() -> None:
    assert {endpoint for endpoint, scope in SCOPES.items() if scope is None} == {
        "health.root",
        "health.health",
        "health.live",
        "health.ready",
        "api_docs.document",
        "api_docs.page",
        "api_docs.asset",
    }


def test_an_endpoint_without_a_declared_scope_stops_the_start(make_app, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SCOPES, "inspection.rows")
    with pytest.raises(SettingError, match=r"without a declared scope: inspection\.rows$"):
        make_app()


@pytest.mark.parametrize("rule", sorted(endpoint for endpoint, scope in SCOPES.items() if scope is not None))
def test_no_route_with_a_scope_answers_a_caller_without_an_assertion(make_app, fake_client: FakeClient, rule) -> None:
    app = make_app(anonymous=False)
    (found,) = [candidate for candidate in app.url_map.iter_rules() if candidate.endpoint == rule]
    method = sorted((found.methods or set()) - {"HEAD", "OPTIONS"})[0]
    path = str(found).replace("<model>", "mock").replace("<request_id>", "req_1")
    response = app.test_client().open(path, method=method, json={"text": "x"})
    assert (response.status_code, response.headers["X-Error-Code"]) == (401, "unauthenticated")
    assert response.is_json
    assert fake_client.submits == [] and fake_client.queries == []


def test_the_assertion_decides_the_tenant_and_the_request_id(make_app, fake_client: FakeClient) -> None:
    app = make_app(anonymous=False)
    headers = _headers("POST", "/inference/mock", "inference")
    response = app.test_client().post("/inference/mock", json={"text": "x"}, headers=headers)
    assert response.status_code == 200
    assert (fake_client.last.tenant, fake_client.last.request_id) == ("alpha", REQUEST_ID)
    assert response.headers["Request-Id"] == REQUEST_ID


def test_a_missing_scope_is_forbidden(make_app) -> None:
    app = make_app(anonymous=False)
    response = app.test_client().get("/metrics", headers=_headers("GET", "/metrics", "inference"))
    assert (response.status_code, response.get_json()["message"]) == (403, "This route needs the scope 'metrics'.")


def test_a_clients_own_id_is_echoed_and_never_a_key(app: Flask, fake_client: FakeClient) -> None:
    ids = set()
    for _ in range(2):
        response = app.test_client().post("/inference/mock", json={"text": "x"}, headers={"X-Request-Id": "mine"})
        assert response.headers["X-Request-Id"] == "mine"
        ids.add(response.headers["Request-Id"])
        assert fake_client.last.request_id == response.headers["Request-Id"]
    assert len(ids) == 2 and "mine" not in ids


def test_without_an_id_of_its_own_a_client_is_told_ours_twice(app: Flask) -> None:
    response = app.test_client().get("/rows")
    assert response.headers["X-Request-Id"] == response.headers["Request-Id"]


def test_an_error_carries_the_request_id_too(app: Flask) -> None:
    response = app.test_client().post("/inference/mock", data=b"{", content_type="application/json")
    assert response.status_code == 400
    assert response.headers["Request-Id"].startswith("req_")


@pytest.mark.parametrize("path", ["/nowhere", "/rows/", "/static/app.js", "/inference", "/chat/mock/more"])
def test_an_unknown_route_is_json(app: Flask, path: str) -> None:
    response = app.test_client().get(path)
    assert response.get_json() == {"status_code": 404, "message": f"Unknown route: GET {path}"}
    assert response.status_code == 404


def test_a_wrong_method_is_json_and_names_the_right_ones(app: Flask) -> None:
    response = app.test_client().get("/chat/mock")
    assert response.status_code == 405
    assert response.get_json() == {
        "status_code": 405,
        "message": "Method GET is not allowed here. Allowed: POST.",
    }
    assert set(response.headers["Allow"].split(", ")) == {"POST"}


def test_a_body_over_the_limit_is_refused_with_the_limit(app: Flask, fake_client: FakeClient) -> None:
    response = app.test_client().post("/chat/mock", json={"text": "x" * 4096})
    assert response.status_code == 413
    assert response.headers["X-Error-Code"] == "body_too_large"
    assert "2048 bytes" in response.get_json()["message"]
    assert fake_client.submits == []


def test_a_defect_of_ours_is_logged_and_nothing_of_it_told(
    app: Flask, fake_client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake_client.refusal = ZeroDivisionError("inner secret")
    with caplog.at_level(logging.ERROR):
        response = app.test_client().post("/chat/mock", json={"text": "prompt words"})
    assert response.get_json() == {"status_code": 500, "message": "Internal error."}
    assert "ZeroDivisionError" in caplog.text
    assert "prompt words" not in caplog.text


def test_no_answer_sets_a_cookie(app: Flask) -> None:
    for path in ("/health", "/rows", "/nowhere"):
        assert "Set-Cookie" not in app.test_client().get(path).headers
