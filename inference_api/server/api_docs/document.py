"""Make the OpenAPI document of an application from what its routes parse with: pydantic models and the native table.

Runs in PROCESS 1, when somebody asks for the first time. A route that nobody described stops the start, so that the
document names every one of them. Knows no request.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flask import Flask
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from werkzeug.routing import Rule

from inference_api import __version__
from inference_api.errors import SettingError
from inference_api.server.body_fields import Field
from inference_api.server.idempotency import KEY_HEADER, MAX_KEY_CHARS
from inference_api.server.validation import MAX_SEED, NATIVE_FIELDS, RAG_CONTEXT, TEXT

OPENAPI_VERSION = "3.1.0"
SCHEMA_PLACE = "#/components/schemas/{model}"
JSON, EVENTS, TEXT_PLAIN = "application/json", "text/event-stream", "text/plain"

ERROR_STATUSES = {
    "400": "The request is malformed or out of bounds; the message names the field, its value and what is allowed.",
    "401": "No valid bearer.",
    "403": "The bearer lacks the route's scope.",
    "404": "Unknown, or another tenant's.",
    "409": "Ended by its tenant before it had said anything; or the idempotency key stands for another call.",
    "413": "The body is larger than the limit.",
    "500": "The engine failed on this request.",
    "503": "The queue is full, or the service starts or stops; `Retry-After` says when to come back.",
    "504": "A deadline passed.",
}

_KEY_PARAMETER = {
    "name": KEY_HEADER,
    "in": "header",
    "required": False,
    "description": "Names a call that makes something: what is sent again with it gets the first one's answer.",
    "schema": {"type": "string", "pattern": "^[!-~]+$", "minLength": 1, "maxLength": MAX_KEY_CHARS},
}

OPEN_STATUSES = ("400", "500", "503", "504")
"""Of a route that needs no bearer and reads no body."""


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """What the document says of a route beyond its path, method and first docstring line."""

    tag: str
    answers: tuple[str, ...] = (JSON,)
    """Media types of a 200, or of `status`."""
    bodies: tuple[type[BaseModel], ...] = ()
    """What it parses, by what the body says."""
    native: bool = False
    """It parses a native body; `rag_context` is known where `native_rag` says so."""
    native_rag: bool = False
    status: str = "200"
    faults: tuple[str, ...] = ()
    """Statuses beside ERROR_STATUSES, with the latter's meaning of their surface."""
    is_open: bool = False
    """Whether no bearer is needed."""
    takes_text: bool = False
    """A body that is no JSON is a prompt."""


def refuse_undescribed(app: Flask, described: Mapping[str, Described]) -> None:
    """Raise SettingError if an endpoint of the application is not described."""
    missing = sorted({rule.endpoint for rule in app.url_map.iter_rules()} - described.keys())
    if missing:
        raise SettingError(f"endpoints without a description: {', '.join(missing)}")


def make_document(app: Flask, described: Mapping[str, Described]) -> dict[str, Any]:
    """Return the document of all routes, every one of which is described; takes a tenth of a second."""
    models = {model for one in described.values() for model in one.bodies}
    keyed, definitions = models_json_schema(
        [(model, "validation") for model in sorted(models, key=_model_key)], ref_template=SCHEMA_PLACE
    )
    schemas: dict[Any, Any] = {model: schema for (model, _), schema in keyed.items()}
    paths: dict[str, dict[str, Any]] = {}
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        for method in _methods(rule):
            operation = _operation(app, rule, method, described[rule.endpoint], schemas)
            paths.setdefault(_path(rule), {})[method.lower()] = operation
    components = dict(definitions.get("$defs", {}))
    components["NativeBody"] = native_schema(rag_context=False)
    components["NativeBodyWithContext"] = native_schema(rag_context=True)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "inference_api", "version": __version__},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
        },
    }


def native_schema(*, rag_context: bool) -> dict[str, Any]:
    """Return the schema of a native body."""
    fields = [field for field in NATIVE_FIELDS if rag_context or field is not RAG_CONTEXT]
    return {
        "type": "object",
        "properties": {field.name: _field_schema(field) for field in fields},
        "required": [TEXT.name],
        "additionalProperties": False,
    }


def _field_schema(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": field.summary}
    low, high = field.bounds or (None, None)
    if field.kind is list:
        items = {"type": "integer", "minimum": 0} if field.entry is int else _text_schema(low, high)
        schema |= {"type": "array", "items": items, "maxItems": field.max_entries}
    elif field.kind is dict:
        numbers = {"type": "number", "minimum": low, "maximum": high}
        schema |= {"type": "object", "additionalProperties": numbers, "maxProperties": field.max_entries}
    else:
        schema["type"] = {str: "string", int: "integer", float: "number", bool: "boolean"}[field.kind]
        if low is not None:
            schema |= {"minimum": low, "maximum": high if high != MAX_SEED else MAX_SEED}
        if field is TEXT:
            schema["minLength"] = 1
    if field.default is not None:
        schema["default"] = field.default
    return schema


def _text_schema(low: float | None, high: float | None) -> dict[str, Any]:
    return {"type": "string", "minLength": low, "maxLength": high}


def _operation(app: Flask, rule: Rule, method: str, described: Described, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    first_line = (app.view_functions[rule.endpoint].__doc__ or "").strip().partition("\n")[0]
    operation: dict[str, Any] = {
        "operationId": f"{rule.endpoint}.{method.lower()}" if len(_methods(rule)) > 1 else rule.endpoint,
        "summary": first_line,
        "tags": [described.tag],
        "security": [] if described.is_open else [{"bearer": []}],
        "responses": dict(_responses(described, has_parameters=bool(rule.arguments))),
    }
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]+$"}}
        for name in sorted(rule.arguments)
    ]
    if method == "POST":
        parameters.append(_KEY_PARAMETER)
    if parameters:
        operation["parameters"] = parameters
    schema = _body_schema(described, schemas)
    if schema is not None:
        content = {JSON: {"schema": schema}}
        if described.takes_text:
            content[TEXT_PLAIN] = {"schema": {"type": "string", "minLength": 1}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _body_schema(described: Described, schemas: Mapping[Any, Any]) -> Any:
    if described.native:
        name = "NativeBodyWithContext" if described.native_rag else "NativeBody"
        return {"$ref": SCHEMA_PLACE.format(model=name)}
    bodies = [schemas[model] for model in described.bodies]
    if not bodies:
        return None
    return bodies[0] if len(bodies) == 1 else {"oneOf": bodies}


def _responses(described: Described, *, has_parameters: bool) -> Iterator[tuple[str, Any]]:
    yield described.status, {"description": "The answer.", "content": {kind: {} for kind in described.answers}}
    statuses = {**ERROR_STATUSES, **dict.fromkeys(described.faults, "As this API tells a fault.")}
    for status in sorted(statuses):
        is_possible = not described.is_open or status in OPEN_STATUSES or (status == "404" and has_parameters)
        if status != described.status and is_possible:
            text = statuses[status]
            yield status, {"description": text, "content": {kind: {} for kind in (JSON, TEXT_PLAIN)}}


def _methods(rule: Rule) -> list[str]:
    return sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})


def _path(rule: Rule) -> str:
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)


def _model_key(model: type[BaseModel]) -> str:
    return f"{model.__module__}.{model.__qualname__}"
