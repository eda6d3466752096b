"""Own the limits of calls: windows and open calls of a tenant, on a route and in all, before the server hears of one.

Runs in the proxy's worker; the one impure file of its core: it counts, by the clock, here or in Redis. It does not know
what a call costs (tokens, rows and queue places are counted where they are spent), nor who may call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from proxy.answers import Refusal
from proxy.claims import Claims
from proxy.config import Settings
from proxy.counted_windows import CountedWindow, WindowState
from proxy.located_json import FileFault
from proxy.shared_windows import RemoteWindows, SharedWindows
from proxy.tenants import Allowance, QuotaClaimFault, TenantRules, Tenants, Window, parse_tenants
from proxy.watched_file import WatchedFile

_CALL_ENDS_SECONDS = "1"
_MINUTE_SECONDS = 60
PROMPT_VALIDATOR_MEMBER = "prompt_validator"

LimitHeaders = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LimitedCall:
    """Hold a call that may go on: its claims as they go to the server, what its answer says, and how to end it."""

    claims: Claims
    headers: LimitHeaders
    leave: Callable[[], None]


class CallLimits:
    """Let calls in as the rules of their tenants allow."""

    def __init__(
        self,
        tenants: Callable[[], Tenants],
        num_proxies: int = 1,
        connect: Callable[[], RemoteWindows] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what returns the rules in force, how many proxies share the limits, and what connects them."""
        self._tenants = tenants
        self._num_proxies = num_proxies
        self.windows = SharedWindows(num_proxies, connect, now)
        # By tenant and route, "" for all of a tenant's; only what is open is in it.
        self._num_open: dict[tuple[str, str], int] = {}

    def enter(self, claims: Claims, template: str) -> LimitedCall:
        """Count a call of a route, by its template; blocks for at most Redis' budget.

        Raises Refusal 429 with Retry-After for a call over a limit, which then counts nowhere, and 401 for a quota
        claim that is wrong. `leave` must be called once when the call has ended.
        """
        try:
            rules = self._tenants().rules_of(claims)
        except QuotaClaimFault as fault:
            raise Refusal(401, "jwt_quota", str(fault)) from None
        allowances = {"": rules.calls}
        if template in rules.route_limits:
            allowances[template] = rules.route_limits[template]
        # Whether limited or not: a limit may come, with the file or with a bearer's claim, while the call is open.
        places = [(claims.tenant, place) for place in ("", template)]
        self._check_open(claims.tenant, allowances)
        for place in places:
            self._num_open[place] = self._num_open.get(place, 0) + 1

        def leave() -> None:
            for place in places:
                self._num_open[place] -= 1
                if not self._num_open[place]:
                    del self._num_open[place]

        with _undone_on_refusal(leave):
            headers = self._take_windows(claims.tenant, allowances)
        return LimitedCall(_stamped(claims, rules), headers, leave)

    def _check_open(self, tenant: str, allowances: Mapping[str, Allowance]) -> None:
        for place, allowance in allowances.items():
            if allowance.connections is None:
                continue
            limit = max(1, allowance.connections // self._num_proxies)
            if self._num_open.get((tenant, place), 0) >= limit:
                raise Refusal(
                    429,
                    "calls_limited",
                    f"Too many open calls: at most {limit} at once{_on(place)}; try again when one has ended.",
                    {"Retry-After": _CALL_ENDS_SECONDS},
                )

    def _take_windows(self, tenant: str, allowances: Mapping[str, Allowance]) -> LimitHeaders:
        counted = [
            (place, CountedWindow(f"{tenant}:{place}", window.count, window.seconds))
            for place, allowance in allowances.items()
            for window in allowance.requests or ()
        ]
        if not counted:
            return ()
        states = self.windows.take([window for _place, window in counted])
        full = [(state, *entry) for state, entry in zip(states, counted, strict=True) if state.is_full]
        if full:
            # The one that is full for the longest: before its time no call passes.
            state, place, window = max(full, key=lambda entry: entry[0].reset_seconds)
            raise _window_refused(state, place, window)
        tightest = min(range(len(states)), key=lambda index: states[index].remaining)
        return _headers(counted[tightest][1], states[tightest])


class FixedTenants:
    """Stand where a tenants file would, without one."""

    def __init__(self, value: Tenants) -> None:
        """Take the rules that hold for ever."""
        self.value = value

    def refresh(self) -> bool:
        """Say that nothing has changed."""
        return False


def open_tenants(settings: Settings) -> WatchedFile[Tenants] | FixedTenants:
    """Return the rules of all tenants: a file's, or without one what the setting says (blocking).

    Raises FileFault, naming file and line.
    """
    per_minute = settings.requests_per_minute
    setting = Allowance((Window(per_minute, _MINUTE_SECONDS),) if per_minute else ())
    file = settings.tenants_file
    if file is None:
        return FixedTenants(Tenants(TenantRules(setting)))
    try:
        return WatchedFile(file, lambda raw: parse_tenants(raw, str(file), setting), is_pure=True)
    except OSError as fault:
        raise FileFault(f"{file}: cannot be read ({fault.strerror})") from None


def redis_client(settings: Settings) -> Callable[[], RemoteWindows] | None:
    """Return what makes a client of the Redis that the settings name; None if they name none."""
    if not settings.redis_url:
        return None
    # Only here: without Redis its library, which is large, stays out of the process.
    from proxy.redis_windows import RedisWindows

    return lambda: RedisWindows(settings.redis_url)


def go_duration(seconds: float) -> str:
    """Write a duration as OpenAI's headers have it (Go's time.Duration): `12ms`, `59s`, `6m0s`, `1h0m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if whole >= _MINUTE_SECONDS else "") + f"{whole % 60}s"


@contextmanager
def _undone_on_refusal(undo: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


def _stamped(claims: Claims, rules: TenantRules) -> Claims:
    if rules.prompt_validator is None:
        return claims
    return replace(claims, quotas={**claims.quotas, PROMPT_VALIDATOR_MEMBER: rules.prompt_validator})


def _window_refused(state: WindowState, place: str, window: CountedWindow) -> Refusal:
    wait_seconds = max(1, math.ceil(state.reset_seconds))
    return Refusal(
        429,
        "rate_limited",
        f"Too many requests, try again later: at most {window.count} in {window.seconds} s{_on(place)}; again in"
        f" {wait_seconds} s.",
        {"Retry-After": str(wait_seconds), **dict(_headers(window, state))},
    )


def _headers(window: CountedWindow, state: WindowState) -> LimitHeaders:
    return (
        ("x-ratelimit-limit-requests", str(window.count)),
        ("x-ratelimit-remaining-requests", str(state.remaining)),
        ("x-ratelimit-reset-requests", go_duration(state.reset_seconds)),
    )


def _on(place: str) -> str:
    return f" on {place}" if place else ""
