"""Check that the part `jwt` finds a hole: each rule is switched off in turn, and a mutant must get in or trip over."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import proxy.auth
import proxy.claims
import proxy.jws
from proxy.auth import Authenticator
from tests.proxy.signing import NOW, policy

ROOT = Path(__file__).parents[2]
NUM_MUTANTS = 600


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("campaigns.jwt_mutants")


def make_context(folder: Path, num_mutants: int = NUM_MUTANTS, seed: int = 11) -> Any:
    counts = {"mutants": num_mutants, "header_forms": 0}
    return importlib.import_module("campaigns.part").Context("jwt", counts, seed, folder)


def without(rule: str, monkeypatch: pytest.MonkeyPatch) -> Authenticator:
    """Return an authenticator that does not keep one rule."""
    whole = Authenticator.from_policy(policy(), lambda: NOW)
    assert whole.policy is not None
    read_claims = proxy.auth.claims_from

    def unread(name: str) -> Callable[..., object]:
        def read(payload: dict[str, Any], rule: object, now: float) -> object:
            return read_claims({key: value for key, value in payload.items() if key != name}, rule, now)

        return read

    def change(**members: object) -> Authenticator:
        return dataclasses.replace(whole, policy=dataclasses.replace(whole.policy, **members))

    if rule == "signature":
        monkeypatch.setattr(proxy.auth, "_check_signature", lambda key, jws: None)
    elif rule in ("aud", "nbf"):
        monkeypatch.setattr(proxy.auth, "claims_from", unread(rule))
    elif rule == "lifetime":
        return change(rule=dataclasses.replace(whole.policy.rule, max_lifetime_seconds=None))
    elif rule == "leeway":
        return change(rule=dataclasses.replace(whole.policy.rule, leeway_seconds=1e12))
    elif rule == "required":
        return change(required=frozenset({"iss", "sub"}))
    elif rule == "header members":
        return change(header_members=frozenset({"alg", "typ", "kid", "crit", "b64", "zip", "cty", "jku"}))
    elif rule == "one name":
        monkeypatch.setattr(proxy.jws, "_unique_names", dict)
    elif rule == "utf-8":
        monkeypatch.setattr(proxy.auth, "parse_object", json.loads)
    elif rule == "tenant's name":
        monkeypatch.setattr(proxy.claims, "TENANT_NAME", importlib.import_module("re").compile(r"(?s).*"))
    elif rule == "algorithm":
        monkeypatch.setattr(Authenticator, "_select_key", lambda self, header: self.keys.get(header.get("kid")))
    elif rule == "no exception":
        monkeypatch.setattr(proxy.auth, "parse_compact", lambda text, **_sizes: text.split(".")[2] and 1 / 0)
    return whole


RULES = ["signature", "aud", "nbf", "lifetime", "leeway", "required", "header members", "one name", "utf-8"]
RULES += ["tenant's name", "algorithm", "no exception"]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_not_kept_is_found(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str
) -> None:
    context = make_context(tmp_path)
    authenticator = without(rule, monkeypatch)
    try:
        mutants.try_mutants(context, authenticator)
    except importlib.import_module("campaigns.part").CampaignError:
        pass
    assert context.tally.failed


def test_with_every_rule_kept_nothing_is_found_and_a_seed_draws_the_same_again(
    mutants: ModuleType, tmp_path: Path
) -> None:
    first, again = make_context(tmp_path), make_context(tmp_path)
    totals = mutants.try_mutants(first, Authenticator.from_policy(policy(), lambda: NOW))
    assert first.tally.failed == [] and totals["mutants"] == NUM_MUTANTS and totals["respelled"] == 30
    assert all(totals[mutation.__name__] > 20 for mutation in mutants.MUTATIONS)
    assert mutants.try_mutants(again, Authenticator.from_policy(policy(), lambda: NOW)) == totals


def test_an_authenticator_that_refuses_everything_is_found(mutants: ModuleType, tmp_path: Path) -> None:
    context = make_context(tmp_path, 1)
    with pytest.raises(importlib.import_module("campaigns.part").CampaignError):
        mutants.try_mutants(context, Authenticator.from_policy(policy(iss="https://another.test"), lambda: NOW))
    assert all(failure.startswith(("good", "respelled")) for failure in context.tally.failed)


def test_a_mutant_is_never_the_bearer_itself(mutants: ModuleType) -> None:
    rng = random.Random(3)
    good = mutants.sign(mutants.claims())
    for mutation in mutants.MUTATIONS:
        assert all(mutants._draw_mutant(rng, mutation, good, "HS256") != good for _ in range(100))


def test_the_statuses_that_are_right_are_read_off_the_header(mutants: ModuleType) -> None:
    headers = importlib.import_module("campaigns.jwt_headers")
    good = frozenset({"a.b.c"})
    assert {form: headers._wanted(form, "a.b.c", good) for form in ("key", "no scheme", "twice", "elsewhere")} == {
        "key": {200},
        "no scheme": {401},
        "twice": {400},
        "elsewhere": {401},
    }
    assert headers._wanted("no scheme", "Bearer a.b.c", good) == {200}
    assert headers._wanted("key", " a.b.c", good) == {200}
    assert 200 not in headers._wanted("bearer", " a.b.c", good)
    assert headers._fault(200, {401}, 1) and headers._fault(401, {401}, 1) and headers._fault(200, {200}, 0)
    assert headers._fault(200, {200}, 1) is None
