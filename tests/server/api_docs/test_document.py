"""The description of every route: complete, and true to what the routes parse with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from inference_api.errors import SettingError
from inference_api.server.api_docs.described import DESCRIBED
from inference_api.server.api_docs.document import refuse_undescribed
from inference_api.server.validation import NATIVE_FIELDS
from proxy.routes import ROUTES


@pytest.fixture
def app(make_app: Callable[..., Flask]) -> Flask:
    return make_app()


@pytest.fixture
def document(app: Flask) -> dict[str, Any]:
    response = app.test_client().get("/openapi.json")
    assert (response.status_code, response.content_type) == (200, "application/json")
    return response.get_json()


def test_every_route_of_the_application_stands_in_the_document_and_no_other(app, document) -> None:
    routes = {
        (method.lower(), re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    found = {(method, path) for path, operations in document["paths"].items() for method in operations}
    assert found == routes


def test_every_route_of_the_document_passes_the_proxy_and_no_other(document) -> None:
    found = {
        (method.upper(), re.sub(r"{\w+}", "<>", path))
        for path, operations in document["paths"].items()
        for method in operations
    }
    assert found == {(route.method, re.sub(r"<\w+>", "<>", route.template)) for route in ROUTES}


def test_a_route_that_nobody_described_stops_the_start(app: Flask) -> None:
    left = {endpoint: one for endpoint, one in DESCRIBED.items() if endpoint != "openai.chat"}
    with pytest.raises(SettingError, match=r"endpoints without a description: openai\.chat$"):
        refuse_undescribed(app, left)


def test_nothing_is_described_that_is_not_there(app: Flask) -> None:
    assert DESCRIBED.keys() == {rule.endpoint for rule in app.url_map.iter_rules()}


def test_each_reference_leads_to_a_schema(document) -> None:
    references = set(re.findall(r"'\$ref': '([^']+)'", str(document)))
    assert references
    for reference in references:
        target: Any = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        assert target["type"] == "object"


def test_operations_have_names_of_their_own_a_summary_and_a_bearer_where_one_is_needed(document) -> None:
    operations = [one for operations in document["paths"].values() for one in operations.values()]
    assert len({one["operationId"] for one in operations}) == len(operations)
    assert all(one["summary"].endswith(".") for one in operations)
    is_open = {
        path for path, methods in document["paths"].items() if any(not one["security"] for one in methods.values())
    }
    assert is_open == {"/", "/health", "/health/live", "/health/ready", "/openapi.json", "/docs", "/docs/{asset}"}


def test_a_native_body_is_described_by_the_table_that_parses_it(document) -> None:
    schema = document["components"]["schemas"]["NativeBodyWithContext"]
    assert list(schema["properties"]) == [field.name for field in NATIVE_FIELDS]
    assert schema["properties"]["top_k"] | {"description": ""} == {
        "description": "",
        "type": "integer",
        "minimum": 1,
        "maximum": 1000,
        "default": 40,
    }
    assert "rag_context" not in document["components"]["schemas"]["NativeBody"]["properties"]


def test_what_is_posted_may_carry_an_idempotency_key(document) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names = [parameter["name"] for parameter in operation.get("parameters", ())]
            assert ("Idempotency-Key" in names) == (method == "post"), path


def test_the_root_takes_a_text_beside_json_and_no_other_route_does(document) -> None:
    takes_text = {
        path
        for path, operations in document["paths"].items()
        if "text/plain" in operations.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert takes_text == {"/"}
    assert "application/json" in document["paths"]["/"]["post"]["requestBody"]["content"]
