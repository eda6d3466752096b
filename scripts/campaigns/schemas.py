"""Ask for answers that keep to random JSON schemas: the part `schemas`.

Bounded schemas, whose answers must come to their own end whatever is drawn, and free ones, whose answers may run into
max_tokens; each answer that ended by itself must be valid. On the mock, and with the real model's sampling at full
batches. The seed draws every schema.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import random
from collections.abc import Mapping
from typing import Any

import requests

from campaigns.part import Context, ServiceUnderTest
from tests.backend.json_schemas import keeps_to, make_schema

NUM_CLIENTS = 40
"""More than there are rows: some wait while others decode."""

MAX_TOKENS = 1500
"""No bounded schema's longest answer comes near to it."""

FREE_MAX_TOKENS = 200
TIMEOUT_SECONDS = 600.0
QUESTION = "Describe something in JSON."


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One answer to ask for."""

    name: str
    schema: dict[str, Any]
    is_bounded: bool
    seed: int


def run(context: Context) -> dict[str, int]:
    """Ask for every schema's answer; return how many ended by themselves, and how many at max_tokens."""
    totals = {"ended": 0, "cut": 0}
    rng = context.random
    for engine, is_mock in (("mock", True), ("model", False)):
        cases = _draw(rng, engine, context.counts)
        if not cases:
            continue
        with context.service(mock=is_mock, INFERENCE_API_MOCK_TOKENS_PER_SECOND="0") as service:
            context.log(f"{len(cases)} schemas on the {engine}")
            with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
                for case, end, fault in clients.map(functools.partial(_ask, service), cases):
                    context.count(case.name, fault)
                    if end is not None:
                        totals[end] += 1
    return totals


def _draw(rng: random.Random, engine: str, counts: Mapping[str, int]) -> list[Case]:
    cases = []
    for number in range(counts[f"bounded_on_{engine}"] + counts[f"free_on_{engine}"]):
        is_bounded = number < counts[f"bounded_on_{engine}"]
        schema = make_schema(rng, bounded=is_bounded)
        cases.append(Case(f"schema {number} on the {engine}", schema, is_bounded, rng.randrange(2**31)))
    return cases


def _ask(service: ServiceUnderTest, case: Case) -> tuple[Case, str | None, str | None]:
    """Return the case, how its answer ended (`ended`, `cut`) and what is wrong with it, if anything."""
    body = {
        "model": service.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS if case.is_bounded else FREE_MAX_TOKENS,
        "seed": case.seed,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "form", "schema": case.schema, "strict": True},
        },
    }
    bearer = {"Authorization": f"Bearer {service.jwt}"}
    try:
        answer = requests.post(f"{service.url}/v1/chat/completions", json=body, headers=bearer, timeout=TIMEOUT_SECONDS)
    except requests.RequestException as error:
        return case, None, f"{type(error).__name__} for {json.dumps(case.schema)}"
    if answer.status_code != 200:
        return case, None, f"status {answer.status_code} for {json.dumps(case.schema)}: {answer.text[:300]}"
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length" and not case.is_bounded:
        return case, "cut", None
    if choice["finish_reason"] != "stop":
        return case, None, f"ended by {choice['finish_reason']} for {json.dumps(case.schema)}: {text[-200:]!r}"
    return case, "ended", _fault_of(text, case.schema)


def _fault_of(text: str, schema: dict[str, Any]) -> str | None:
    try:
        is_valid = keeps_to(json.loads(text), schema)
    except ValueError as error:
        return f"no JSON for {json.dumps(schema)}: {text!r}: {error}"
    return None if is_valid else f"not valid for {json.dumps(schema)}: {text!r}"
