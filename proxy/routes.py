"""Own the route table: every method and path the proxy forwards, and the scope each one needs.

Pure; checked when the proxy starts. It knows names and patterns, not who calls or what a route does. What is not in
the table does not exist for a client; a route without a declared scope stops the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from proxy.answers import Refusal


class Scope(Enum):
    """Say what a bearer must be allowed to do."""

    PUBLIC = "public"
    INFERENCE = "inference"
    METRICS = "metrics"


class RouteFault(ValueError):
    """Stop the start: the table itself is wrong."""


@dataclass(frozen=True, slots=True)
class Route:
    """Forward `method` on paths that match `template`; `scope` None means nobody decided, and stops the start."""

    method: str
    template: str
    scope: Scope | None

    @property
    def pattern(self) -> re.Pattern[str]:
        """Compile the template: literal text, `<model>` or `<id>` segments."""
        parts = re.split(r"(<[a-z]+>)", self.template)
        return re.compile("".join(_SEGMENTS.get(part, re.escape(part)) for part in parts))


# No percent sign is in any alphabet, so a path has one spelling; "." and ".." are names that URL libraries rewrite.
_SEGMENTS: Mapping[str, str] = {
    "<model>": r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._:-]{1,128}",
    "<id>": r"[A-Za-z0-9_-]{1,128}",
}

ROUTES = (
    Route("GET", "/", Scope.PUBLIC),
    Route("GET", "/health", Scope.PUBLIC),
    Route("GET", "/health/live", Scope.PUBLIC),
    Route("GET", "/health/ready", Scope.PUBLIC),
    Route("POST", "/inference/<model>", Scope.INFERENCE),
    Route("POST", "/predictions/<model>", Scope.INFERENCE),
    Route("POST", "/chat/<model>", Scope.INFERENCE),
    Route("GET", "/rows", Scope.INFERENCE),
    Route("GET", "/info", Scope.INFERENCE),
    Route("POST", "/v1/chat/completions", Scope.INFERENCE),
    Route("POST", "/v1/completions", Scope.INFERENCE),
    Route("POST", "/v1/embeddings", Scope.INFERENCE),
    Route("GET", "/v1/models", Scope.INFERENCE),
    Route("GET", "/v1/models/<model>", Scope.INFERENCE),
    Route("GET", "/v1/requests/<id>", Scope.INFERENCE),
    Route("DELETE", "/v1/requests/<id>", Scope.INFERENCE),
    Route("POST", "/v1/responses", Scope.INFERENCE),
    Route("GET", "/v1/responses/<id>", Scope.INFERENCE),
    Route("POST", "/v1/responses/<id>/cancel", Scope.INFERENCE),
    Route("POST", "/v1/messages", Scope.INFERENCE),
    Route("POST", "/v1/messages/count_tokens", Scope.INFERENCE),
    Route("POST", "/", Scope.INFERENCE),
    Route("POST", "/generate", Scope.INFERENCE),
    Route("POST", "/generate_stream", Scope.INFERENCE),
    Route("POST", "/tokenize", Scope.INFERENCE),
    Route("POST", "/detokenize", Scope.INFERENCE),
    Route("POST", "/apply-template", Scope.INFERENCE),
    Route("GET", "/slots", Scope.INFERENCE),
    Route("GET", "/props", Scope.INFERENCE),
    Route("GET", "/metrics", Scope.METRICS),
    Route("GET", "/openapi.json", Scope.PUBLIC),
    Route("GET", "/docs", Scope.PUBLIC),
    Route("GET", "/docs/<model>", Scope.PUBLIC),
)


class RouteTable:
    """Find the one route of a method and a path."""

    def __init__(self, routes: Iterable[Route] = ROUTES) -> None:
        """Check the routes; raise RouteFault for one without a scope, a doubled one or an unknown segment name."""
        self._routes: list[tuple[re.Pattern[str], dict[str, Route]]] = []
        by_template: dict[str, dict[str, Route]] = {}
        for route in routes:
            if route.scope is None:
                raise RouteFault(f"route {route.method} {route.template} declares no scope")
            if not set(re.findall(r"<[a-z]+>", route.template)) <= set(_SEGMENTS):
                raise RouteFault(f"route {route.method} {route.template} has an unknown segment")
            methods = by_template.setdefault(route.template, {})
            if route.method in methods:
                raise RouteFault(f"route {route.method} {route.template} is declared twice")
            methods[route.method] = route
            if route.method == "GET" and route.scope is Scope.PUBLIC:
                methods["HEAD"] = Route("HEAD", route.template, route.scope)
        for template, methods in by_template.items():
            self._routes.append((Route("GET", template, None).pattern, methods))
        self._all_methods = sorted({method for methods in by_template.values() for method in methods})

    def find(self, method: str, path: str) -> Route:
        """Return the route; raise Refusal 404 for an unknown path, 405 with Allow for a wrong method.

        A method that no route has (TRACE, CONNECT …) is a 405 wherever it points.
        """
        by_method = self._by_method(path)
        if method in by_method:
            return by_method[method]
        if by_method or method not in self._all_methods:
            raise _method_refused(sorted(by_method) or self._all_methods)
        raise _route_unknown()

    def methods(self, path: str) -> list[str]:
        """List the methods of a path; raise Refusal 404 for an unknown one."""
        by_method = self._by_method(path)
        if not by_method:
            raise _route_unknown()
        return sorted(by_method)

    def _by_method(self, path: str) -> Mapping[str, Route]:
        return next((methods for pattern, methods in self._routes if pattern.fullmatch(path)), {})


def _route_unknown() -> Refusal:
    return Refusal(404, "not_found", "No such route.")


def _method_refused(allowed: list[str]) -> Refusal:
    return Refusal(405, "method_not_allowed", "Method is not allowed here.", {"Allow": ", ".join(allowed)})
