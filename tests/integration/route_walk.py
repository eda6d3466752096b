"""Say what each kind of caller must get on each route, by one rule, and walk a door's routes with all of them.

The rule says which scope a route needs without reading either table, so that a table that says something else is found.
A door is a function that sends a call and returns its status: the proxy's, the server's own, or a part in memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", "/openapi.json", "/docs", "/docs/<>"})
"""Open to everybody for reading: health, and the description of the service."""

ID_PATHS = ("/v1/requests/<>", "/v1/responses/<>", "/v1/responses/<>/cancel")
"""About one request, which only its own tenant may know of."""

UNAUTHENTICATED, FORBIDDEN, UNKNOWN = 401, 403, 404

Route = tuple[str, str]
"""A method, and a path whose variable segments are `<>`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Somebody at the door: `scopes` None if it cannot say who it is."""

    name: str
    scopes: frozenset[str] | None
    tenant: str = "alpha"


NOBODY = Caller("nobody", None)
KNOWN_CALLERS = (
    Caller("without a scope", frozenset()),
    Caller("of another scope", frozenset({"batch", "Inference", "admin", "public"})),
    Caller("inference", frozenset({"inference"})),
    Caller("metrics", frozenset({"metrics"})),
    Caller("both", frozenset({"inference", "metrics"})),
    Caller("stranger", frozenset({"inference", "metrics"}), tenant="beta"),
)

Door = Callable[[Route, Caller], int]


def plain(method: str, template: str) -> Route:
    """Return a route of either table without the names of its segments."""
    return method, re.sub(r"<[^>]*>", "<>", template)


def needed_scope(route: Route) -> str | None:
    """Return the scope that a route must need; None: open to everybody. This is the rule."""
    method, path = route
    if method in ("GET", "HEAD") and path in OPEN_PATHS:
        return None
    return "metrics" if path == "/metrics" else "inference"


def fault_of(route: Route, caller: Caller, status: int) -> str | None:
    """Return what is wrong with an answer's status; None if it is what the rule says."""
    scope = needed_scope(route)
    if scope is None:
        expected = None
    elif caller.scopes is None:
        expected = UNAUTHENTICATED
    elif scope not in caller.scopes:
        expected = FORBIDDEN
    elif caller.tenant != "alpha" and route[1] in ID_PATHS:
        expected = UNKNOWN
    else:
        expected = None
    if expected is None:
        is_served = status < 500 and status not in (UNAUTHENTICATED, FORBIDDEN, UNKNOWN)
        return None if is_served else f"{route} with {caller.name}: {status}, and it must be served"
    return None if status == expected else f"{route} with {caller.name}: {status}, and it must be {expected}"


def walk(routes: Iterable[Route], callers: Iterable[Caller], door: Door) -> list[str]:
    """Send every caller to every route; return the faults."""
    known = list(callers)
    answers = ((route, caller, door(route, caller)) for route in routes for caller in known)
    return [fault for answer in answers if (fault := fault_of(*answer)) is not None]
