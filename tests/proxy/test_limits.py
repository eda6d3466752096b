"""Check which calls the limits of a tenant let in, what a refused one is told, and that a call gives back its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.answers import Refusal
from proxy.auth import mint_assertion, verify_assertion
from proxy.claims import Claims
from proxy.config import read_settings
from proxy.limits import CallLimits, LimitedCall, go_duration, open_tenants
from proxy.tenants import Allowance, TenantRules, Tenants, Window

ROUTE = "/chat/<model>"


class Clock:
    """Seconds that go by when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def claims(tenant: str = "a", **quotas: object) -> Claims:
    return Claims(tenant, None, frozenset({"inference"}), None, quotas)


def make(clock: Clock, rules: TenantRules, **named: TenantRules) -> CallLimits:
    return CallLimits(lambda: Tenants(rules, named), now=clock)


def refused(limits: CallLimits, caller: Claims, template: str = ROUTE) -> Refusal:
    with pytest.raises(Refusal) as caught:
        limits.enter(caller, template)
    return caught.value


def windows(*pairs: tuple[int, int]) -> TenantRules:
    return TenantRules(Allowance(tuple(Window(count, seconds) for count, seconds in pairs)))


def told(call: LimitedCall) -> Mapping[str, str]:
    return {name.removeprefix("x-ratelimit-").removesuffix("-requests"): value for name, value in call.headers}


def test_a_window_is_exact_at_its_edge(clock: Clock) -> None:
    limits = make(clock, windows((2, 60)))
    limits.enter(claims(), ROUTE)
    clock.seconds += 59
    limits.enter(claims(), ROUTE)
    clock.seconds += 0.999
    assert refused(limits, claims()).headers["Retry-After"] == "1"
    clock.seconds = 1060.0
    limits.enter(claims(), ROUTE)
    refused(limits, claims())
    clock.seconds = 1118.99
    refused(limits, claims())
    clock.seconds = 1119.0
    limits.enter(claims(), ROUTE)


def test_a_refused_call_is_told_which_limit_and_when_again(clock: Clock) -> None:
    limits = make(clock, windows((1, 600)))
    limits.enter(claims(), ROUTE)
    clock.seconds += 230.5
    refusal = refused(limits, claims())
    assert (refusal.status, refusal.code) == (429, "rate_limited")
    assert refusal.message == "Too many requests, try again later: at most 1 in 600 s; again in 370 s."
    assert refusal.headers == {
        "Retry-After": "370",
        "x-ratelimit-limit-requests": "1",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "6m10s",
    }


def test_waiting_as_long_as_told_is_enough(clock: Clock) -> None:
    limits = make(clock, windows((1, 60)))
    limits.enter(claims(), ROUTE)
    clock.seconds += 12.3
    clock.seconds += int(refused(limits, claims()).headers["Retry-After"])
    limits.enter(claims(), ROUTE)


def test_a_refused_call_counts_nowhere(clock: Clock) -> None:
    rules = TenantRules(Allowance((Window(3, 60),)), {ROUTE: Allowance((Window(1, 10),))})
    limits = make(clock, rules)
    limits.enter(claims(), ROUTE)
    for _ in range(5):
        assert "on /chat/<model>" in refused(limits, claims()).message
    assert told(limits.enter(claims(), "/rows"))["remaining"] == "1"
    clock.seconds += 10
    assert told(limits.enter(claims(), ROUTE))["remaining"] == "0"


def test_every_limited_answer_says_the_tightest_limit(clock: Clock) -> None:
    limits = make(clock, windows((2, 10), (100, 3600)))
    assert told(limits.enter(claims(), ROUTE)) == {"limit": "2", "remaining": "1", "reset": "10s"}
    clock.seconds += 9.5
    assert told(limits.enter(claims(), ROUTE)) == {"limit": "2", "remaining": "0", "reset": "500ms"}
    assert limits.enter(claims("b"), ROUTE).headers[1] == ("x-ratelimit-remaining-requests", "1")


def test_a_call_without_a_limit_says_none(clock: Clock) -> None:
    limits = make(clock, TenantRules())
    assert all(not limits.enter(claims(), ROUTE).headers for _ in range(100))


def test_the_longest_full_window_says_when_again(clock: Clock) -> None:
    limits = make(clock, windows((1, 10), (1, 100)))
    limits.enter(claims(), ROUTE)
    assert refused(limits, claims()).headers["Retry-After"] == "100"


def test_open_calls_are_bounded_and_a_place_comes_back_when_one_ends(clock: Clock) -> None:
    limits = make(clock, TenantRules(Allowance(connections=2)))
    first, _second = limits.enter(claims(), ROUTE), limits.enter(claims(), "/rows")
    refusal = refused(limits, claims())
    assert (refusal.status, refusal.code, refusal.headers) == (429, "calls_limited", {"Retry-After": "1"})
    assert refusal.message == "Too many open calls: at most 2 at once; try again when one has ended."
    limits.enter(claims("b"), ROUTE)
    first.leave()
    limits.enter(claims(), ROUTE)


def test_open_calls_of_a_route_leave_the_other_routes_alone(clock: Clock) -> None:
    limits = make(clock, TenantRules(route_limits={ROUTE: Allowance(connections=1)}))
    limits.enter(claims(), ROUTE)
    assert "at most 1 at once on /chat/<model>" in refused(limits, claims()).message
    limits.enter(claims(), "/rows")


def test_a_limit_of_open_calls_that_appears_counts_those_that_are_open_already(clock: Clock) -> None:
    rules = [TenantRules()]
    limits = CallLimits(lambda: Tenants(rules[0]), now=clock)
    first, second = limits.enter(claims(), ROUTE), limits.enter(claims(), ROUTE)
    rules[0] = TenantRules(Allowance(connections=2))
    assert refused(limits, claims()).code == "calls_limited"
    rules[0] = TenantRules(route_limits={ROUTE: Allowance(connections=2)})
    assert "on /chat/<model>" in refused(limits, claims()).message
    limits.enter(claims(), "/rows").leave()
    first.leave()
    limits.enter(claims(), ROUTE).leave()
    second.leave()
    assert not limits._num_open


def test_a_bearer_that_brings_its_limit_counts_the_open_calls_of_those_that_brought_none(clock: Clock) -> None:
    limits = make(clock, TenantRules())
    limits.enter(claims(), ROUTE)
    assert refused(limits, claims(connections=1)).code == "calls_limited"
    limits.enter(claims(), ROUTE)


def test_a_call_over_its_window_keeps_no_place(clock: Clock) -> None:
    limits = make(clock, TenantRules(Allowance((Window(1, 10),), 1)))
    limits.enter(claims(), ROUTE).leave()
    for _ in range(3):
        assert refused(limits, claims()).code == "rate_limited"
    clock.seconds += 10
    limits.enter(claims(), ROUTE)
    assert refused(limits, claims()).code == "calls_limited"


def test_nothing_is_kept_of_calls_that_have_ended(clock: Clock) -> None:
    limits = make(clock, TenantRules(Allowance((Window(1, 10),), 1)))
    for number in range(200):
        limits.enter(claims(f"tenant-{number}"), ROUTE).leave()
    assert not limits._num_open


def test_a_claim_lowers_a_limit_and_never_lifts_one(clock: Clock) -> None:
    limits = make(clock, windows((3, 60)))
    assert told(limits.enter(claims(requests_per_minute=100), ROUTE))["limit"] == "3"
    limits.enter(claims(requests_per_minute=2), ROUTE)
    refused(limits, claims(requests_per_minute=2))
    limits.enter(claims(), ROUTE)


@pytest.mark.parametrize("quotas", [{"requests_per_minute": 0}, {"connections": "3"}, {"requests_per_minute": True}])
def test_a_wrong_quota_claim_is_the_bearers_fault(clock: Clock, quotas: dict[str, Any]) -> None:
    refusal = refused(make(clock, TenantRules()), claims(**quotas))
    assert (refusal.status, refusal.code) == (401, "jwt_quota")
    assert next(iter(quotas)) in refusal.message


def test_the_mode_of_the_prompts_goes_on_with_the_claims_and_no_bearer_sets_it(clock: Clock) -> None:
    limits = make(clock, TenantRules(prompt_validator="strip"), b=TenantRules())
    assert limits.enter(claims(budget=7), ROUTE).claims.quotas == {"budget": 7, "prompt_validator": "strip"}
    assert limits.enter(claims("b", budget=7), ROUTE).claims.quotas == {"budget": 7}
    assert refused(limits, claims("b", prompt_validator="off")).status == 401


def test_a_bearer_with_all_the_quotas_that_it_may_have_reaches_a_server_that_holds_its_prompts(clock: Clock) -> None:
    limits = make(clock, TenantRules(prompt_validator="reject"))
    quotas: dict[str, Any] = {str(number): number for number in range(32)}
    stamped = limits.enter(claims(**quotas), ROUTE).claims
    call = {"method": "POST", "path": "/chat/mock", "request_id": "req_1", "now": 1000.0}
    passed = verify_assertion(b"k" * 32, mint_assertion(b"k" * 32, stamped, **call), **call)  # type: ignore[arg-type]
    assert passed.quotas == {**quotas, "prompt_validator": "reject"}


def test_a_changed_count_goes_on_with_what_was_counted(clock: Clock) -> None:
    rules = [windows((3, 60))]
    limits = CallLimits(lambda: Tenants(rules[0]), now=clock)
    limits.enter(claims(), ROUTE)
    limits.enter(claims(), ROUTE)
    rules[0] = windows((2, 60))
    refused(limits, claims())
    rules[0] = windows((3, 60))
    limits.enter(claims(), ROUTE)


def test_several_proxies_without_redis_have_a_share_each(clock: Clock) -> None:
    rules = TenantRules(Allowance((Window(9, 60),), 5))
    limits = CallLimits(lambda: Tenants(rules), num_proxies=4, now=clock)
    assert [told(limits.enter(claims(), ROUTE))["remaining"]] == ["1"]
    refused(limits, claims())


def test_without_redis_each_proxy_lets_at_least_one_call_pass(clock: Clock) -> None:
    limits = CallLimits(lambda: Tenants(windows((1, 60))), num_proxies=4, now=clock)
    limits.enter(claims(), ROUTE)
    assert refused(limits, claims()).code == "rate_limited"
    clock.seconds += 60
    limits.enter(claims(), ROUTE)


def test_a_window_that_appears_begins_empty(clock: Clock) -> None:
    rules = [windows((2, 60))]
    limits = CallLimits(lambda: Tenants(rules[0]), now=clock)
    limits.enter(claims(), ROUTE)
    limits.enter(claims(), ROUTE)
    rules[0] = windows((2, 60), (2, 10))
    refused(limits, claims())
    rules[0] = windows((2, 10))
    assert told(limits.enter(claims(), ROUTE))["remaining"] == "1"


def test_the_setting_is_a_minute_of_every_tenant_and_zero_is_none() -> None:
    def rules(per_minute: str) -> TenantRules:
        environ = {"JWT_SECRET": "0123456789abcdef0123456789abcdef", "PROXY_REQUESTS_PER_MINUTE": per_minute}
        return open_tenants(read_settings(environ, port=0, upstream_url="http://127.0.0.1:1")).value.default

    assert rules("7").calls.requests == (Window(7, 60),)
    assert not rules("0").calls.requests


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (59.1, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"), (86399, "23h59m59s")],
)
def test_durations_are_written_as_go_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text
