"""Own the rules of tenants: the tenants file, and what holds for one call by setting, file and bearer together.

Pure. It does not know how calls are counted, nor where the file lies. A member that is not known is a fault: a limit
that is silently dropped is none. The file is the operator's word; a bearer's quota claim can only lower what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.claims import TENANT_NAME, Claims
from proxy.located_json import MemberFault, MemberPath, parse_located
from proxy.routes import ROUTES, Scope

PROMPT_MODES = ("off", "reject", "strip")
MAX_COUNT = 1_000_000
MAX_WINDOW_SECONDS = 86_400
MAX_CALLS = 65_536
_MAX_WINDOWS = 4
_CLAIM_WINDOW_SECONDS = 60
# Public routes are not limited: nobody is known who could be told to wait.
_TEMPLATES = frozenset(route.template for route in ROUTES if route.scope is not Scope.PUBLIC)


class QuotaClaimFault(ValueError):
    """Refuse a bearer's quota claim; the message names the member and its bound."""


@dataclass(frozen=True, slots=True)
class Window:
    """Let `count` calls pass in any `seconds`."""

    count: int
    seconds: int


@dataclass(frozen=True, slots=True)
class Allowance:
    """Say how many calls may begin in which windows, and how many may be open at once; None: not said here."""

    requests: tuple[Window, ...] | None = None
    connections: int | None = None

    def over(self, other: Allowance) -> Allowance:
        """Return this allowance, filled up with what another says."""
        return Allowance(
            other.requests if self.requests is None else self.requests,
            other.connections if self.connections is None else self.connections,
        )


@dataclass(frozen=True, slots=True)
class TenantRules:
    """Hold what is said of one tenant: of all its calls, of those of a route by its template, and of its prompts."""

    calls: Allowance = Allowance()
    route_limits: Mapping[str, Allowance] = field(default_factory=dict)
    prompt_validator: str | None = None

    def over(self, other: TenantRules) -> TenantRules:
        """Return these rules, filled up with those of another; a route's allowance counts as one."""
        return TenantRules(
            self.calls.over(other.calls),
            {**other.route_limits, **self.route_limits},
            self.prompt_validator or other.prompt_validator,
        )


@dataclass(frozen=True, slots=True)
class Tenants:
    """Hold the rules of all tenants; `default` is for those that are not named, and for what is not said of one."""

    default: TenantRules = TenantRules()
    named: Mapping[str, TenantRules] = field(default_factory=dict)

    def rules_of(self, claims: Claims) -> TenantRules:
        """Return what holds for a call with these claims; raise QuotaClaimFault for a quota claim that is wrong."""
        rules = self.named.get(claims.tenant, self.default)
        return replace(rules, calls=_lowered(rules.calls, claims.quotas)) if claims.quotas else rules


def parse_tenants(raw: bytes, file: str, setting: Allowance) -> Tenants:
    """Read a tenants file, where `setting` holds for what it does not say; raise FileFault with file and line."""
    located = parse_located(raw, file)
    try:
        return _tenants(located.value, TenantRules(setting))
    except MemberFault as fault:
        raise located.fault(file, fault) from None


def _tenants(value: Any, setting: TenantRules) -> Tenants:
    members = _object(value, (), {"default", "tenants"})
    default = _rules(members.get("default", {}), ("default",)).over(setting)
    named = {}
    for name, rules in _object(members.get("tenants", {}), ("tenants",), None).items():
        place = ("tenants", name)
        if TENANT_NAME.fullmatch(name) is None:
            raise MemberFault("a tenant's name is 1 to 63 characters of a-z 0-9 _ -, not starting with _ or -", place)
        named[name] = _rules(rules, place).over(default)
    return Tenants(default, named)


def _rules(value: Any, path: MemberPath) -> TenantRules:
    members = _object(value, path, {"requests", "connections", "route_limits", "prompt_validator"})
    mode = members.get("prompt_validator")
    if "prompt_validator" in members and mode not in PROMPT_MODES:
        raise MemberFault(f"must be one of {', '.join(PROMPT_MODES)}", (*path, "prompt_validator"))
    route_limits = {}
    place = (*path, "route_limits")
    for template, allowance in _object(members.get("route_limits", {}), place, None).items():
        if template not in _TEMPLATES:
            raise MemberFault("is not a route that needs a bearer; docs/proxy.md lists them", (*place, template))
        names = {"requests", "connections"}
        route_limits[template] = _allowance(_object(allowance, (*place, template), names), (*place, template))
    return TenantRules(_allowance(members, path), route_limits, mode)


def _allowance(members: Mapping[str, Any], path: MemberPath) -> Allowance:
    connections = None
    if "connections" in members:
        connections = _whole(members["connections"], MAX_CALLS, (*path, "connections"))
    return Allowance(_windows(members, (*path, "requests")), connections)


def _windows(members: Mapping[str, Any], path: MemberPath) -> tuple[Window, ...] | None:
    if "requests" not in members:
        return None
    value = members["requests"]
    if not isinstance(value, list) or len(value) > _MAX_WINDOWS:
        raise MemberFault(f"must be a list of at most {_MAX_WINDOWS} windows", path)
    windows: dict[int, Window] = {}
    for index, entry in enumerate(value):
        place = (*path, index)
        window = _object(entry, place, {"count", "seconds"})
        for name in ("count", "seconds"):
            if name not in window:
                raise MemberFault(f"{name} is missing", place)
        seconds = _whole(window["seconds"], MAX_WINDOW_SECONDS, (*place, "seconds"))
        if seconds in windows:
            raise MemberFault("another window is as long", (*place, "seconds"))
        windows[seconds] = Window(_whole(window["count"], MAX_COUNT, (*place, "count")), seconds)
    return tuple(windows.values())


def _object(value: Any, path: MemberPath, names: set[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise MemberFault("must be a JSON object", path)
    for name in value:
        if names is not None and name not in names:
            raise MemberFault(f"is not known here; known are {', '.join(sorted(names))}", (*path, name))
    return value


def _whole(value: Any, highest: int, path: MemberPath) -> int:
    # True is an int in Python only.
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise MemberFault(f"must be a whole number, 1 to {highest}", path)
    return value


def _lowered(calls: Allowance, quotas: Mapping[str, object]) -> Allowance:
    """Lower an allowance to what a bearer's quota claim says; where nothing is said, the claim says it."""
    if "prompt_validator" in quotas:
        raise QuotaClaimFault("JWT quota claim must not have the member prompt_validator.")
    per_minute, connections = (_claimed(quotas, name) for name in ("requests_per_minute", "connections"))
    windows = {window.seconds: window for window in calls.requests or ()}
    if per_minute is not None:
        at_most = windows.get(_CLAIM_WINDOW_SECONDS, Window(per_minute, _CLAIM_WINDOW_SECONDS)).count
        windows[_CLAIM_WINDOW_SECONDS] = Window(min(per_minute, at_most), _CLAIM_WINDOW_SECONDS)
    if connections is not None and calls.connections is not None:
        connections = min(connections, calls.connections)
    return Allowance(tuple(windows.values()), calls.connections if connections is None else connections)


def _claimed(quotas: Mapping[str, object], name: str) -> int | None:
    value = quotas.get(name)
    if name not in quotas:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise QuotaClaimFault(f"JWT quota {name} must be a whole number of at least 1.")
    return value
