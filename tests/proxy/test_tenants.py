"""Check that a tenants file is read strictly, with the line of each fault, and whose word holds when several speak."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.claims import Claims
from proxy.located_json import FileFault
from proxy.tenants import Allowance, QuotaClaimFault, TenantRules, Tenants, Window, parse_tenants

SETTING = Allowance((Window(600, 60),))
MINUTE = '{"count": 10, "seconds": 60}'


def parse(text: str) -> Tenants:
    return parse_tenants(text.encode(), "tenants.json", SETTING)


def rules(tenants: Tenants, tenant: str, **quotas: object) -> TenantRules:
    return tenants.rules_of(Claims(tenant, None, frozenset(), None, quotas))


def test_a_whole_file_is_read() -> None:
    tenants = parse("""{
        "default": {"connections": 8, "prompt_validator": "reject"},
        "tenants": {
            "team-a": {
                "requests": [{"count": 5, "seconds": 1}, {"count": 900, "seconds": 3600}],
                "connections": 2,
                "route_limits": {"/chat/<model>": {"requests": [{"count": 10, "seconds": 60}], "connections": 1}},
                "prompt_validator": "strip"
            }
        }
    }""")
    assert rules(tenants, "team-a") == TenantRules(
        Allowance((Window(5, 1), Window(900, 3600)), 2),
        {"/chat/<model>": Allowance((Window(10, 60),), 1)},
        "strip",
    )
    assert rules(tenants, "another") == TenantRules(Allowance((Window(600, 60),), 8), {}, "reject")


def test_what_a_tenant_does_not_say_the_default_says_and_then_the_setting() -> None:
    tenants = parse("""{
        "default": {"route_limits": {"/rows": {"connections": 1}, "/info": {"connections": 2}}},
        "tenants": {"a": {"route_limits": {"/rows": {"connections": 5}}}, "b": {"requests": []}}
    }""")
    assert rules(tenants, "a").calls == SETTING
    assert rules(tenants, "a").route_limits == {"/rows": Allowance(None, 5), "/info": Allowance(None, 2)}
    assert rules(tenants, "b").calls.requests == ()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "1: a JSON value is expected"),
        ("[]", "1: must be a JSON object"),
        ('{"defaults": {}}', "1: defaults: is not known here; known are default, tenants"),
        ('{"tenants":\n[]}', "1: tenants: must be a JSON object"),
        ('{"tenants": {\n"A": {}}}', "2: tenants.A: a tenant's name"),
        ('{"tenants": {\n"a": {},\n"a": {}}}', "3: tenants.a: stands here a second time"),
        ('{"tenants": {"a": {\n"weight": 2}}}', "2: tenants.a.weight: is not known here"),
        ('{"default": {\n"connections": 0}}', "2: default.connections: must be a whole number, 1 to 65536"),
        ('{"default": {"connections": true}}', "1: default.connections: must be a whole number"),
        ('{"default": {"connections": 2.0}}', "1: default.connections: must be a whole number"),
        ('{"default": {"prompt_validator": "on"}}', "1: default.prompt_validator: must be one of off, reject, strip"),
        ('{"default": {"prompt_validator": null}}', "1: default.prompt_validator: must be one of"),
        ('{"default": {"prompt_validator": ["off"]}}', "1: default.prompt_validator: must be one of"),
        ('{"default": {"requests": {}}}', "1: default.requests: must be a list of at most 4 windows"),
        (f'{{"default": {{"requests": [{", ".join([MINUTE] * 5)}]}}}}', "1: default.requests: must be a list"),
        (f'{{"default": {{"requests": [{MINUTE},\n{MINUTE}]}}}}', "2: default.requests[1].seconds: another window"),
        ('{"default": {"requests": [{"count": 1}]}}', "1: default.requests[0]: seconds is missing"),
        ('{"default": {"requests": [{"count": 0, "seconds": 1}]}}', "requests[0].count: must be a whole number"),
        ('{"default": {"requests": [{"count": 1, "seconds": 86401}]}}', "seconds: must be a whole number, 1 to 86400"),
        ('{"default": {"requests": [{"count": 1, "seconds": 1, "per": 1}]}}', "requests[0].per: is not known here"),
        ('{"default": {"route_limits": {"/run": {}}}}', "route_limits./run: is not a route that needs a bearer"),
        ('{"default": {"route_limits": {"/health": {}}}}', "route_limits./health: is not a route that needs a bearer"),
        (
            '{"default": {"route_limits": {"/rows": {"prompt_validator": "off"}}}}',
            "prompt_validator: is not known here",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, fault: str) -> None:
    with pytest.raises(FileFault) as caught:
        parse(text)
    assert str(caught.value).startswith("tenants.json:") and fault in str(caught.value)


def test_the_example_of_the_documents_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    (example,) = re.findall(r"<!-- example: tenants -->\n```json\n(.*?)```", page, re.DOTALL)
    tenants = parse(example)
    assert tenants.default.calls == Allowance((Window(60, 60),), 8)
    assert rules(tenants, "team-a").prompt_validator == "reject" and rules(tenants, "team-b").calls.requests == ()


def test_a_claim_lowers_what_is_said_and_says_what_is_not() -> None:
    tenants = parse(
        '{"tenants": {"a": {"requests": [{"count": 10, "seconds": 60}], "connections": 4}, "b": {"requests": []}}}'
    )
    lower = rules(tenants, "a", requests_per_minute=3, connections=2).calls
    assert lower == Allowance((Window(3, 60),), 2)
    assert rules(tenants, "a", requests_per_minute=30, connections=20).calls == Allowance((Window(10, 60),), 4)
    assert rules(tenants, "b", requests_per_minute=3, connections=2).calls == Allowance((Window(3, 60),), 2)
    assert rules(tenants, "a", tokens_per_day=5).calls == Allowance((Window(10, 60),), 4)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "3", None])
def test_a_claim_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(QuotaClaimFault, match="connections"):
        rules(Tenants(), "a", connections=value)


def test_no_bearer_names_the_mode_of_its_prompts() -> None:
    with pytest.raises(QuotaClaimFault, match="prompt_validator"):
        rules(Tenants(), "a", prompt_validator="off")
