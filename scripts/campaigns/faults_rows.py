"""Let single rows fail among others that decode: the part `faults_rows`.

Logits that are not finite, no memory for a row, an exception in sampling; each on a call's first token or in
mid-stream. That call fails, with a status or with a sign that it is not whole, is counted, and what it had been sent is
its own; the other rows' texts are byte for byte those of a run in which nothing failed. On the mock, whose noise is a
function of a row's own ids and seed; then on the real model, with numbers that are poisoned in its checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import random
import string
from collections.abc import Iterator
from typing import Any

from campaigns.faults_model import check_model_rows
from campaigns.faults_streams import draw_prompt, parse_events
from campaigns.part import CampaignError, Context
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, running_service

KINDS = ("nan", "memory", "error")
NUM_NEIGHBOURS = 31
NUM_TOKENS = 200
NEEDLE = slice(6, 18)
"""The part of an undisturbed text that sets off the fault once the row has made it."""

TOKENS_PER_SECOND = "6400"
"""Of the mock: two hundred a second for each of 32 rows."""

NUM_CANDIDATES = 24
"""Of which some cannot be used as culprits."""

NEIGHBOUR_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call: its prompt, its seed, and the text that it makes if nothing fails."""

    prompt: str
    seed: int
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """A call whose row fails: at its first token, or once it has made the needle."""

    kind: str
    case: Case
    needle: str

    @property
    def delivered(self) -> str:
        """What it is sent before it fails."""
        return "" if self.needle in self.case.prompt else self.case.text[: NEEDLE.stop]


def run(context: Context) -> dict[str, int]:
    """Fail as many rows of each kind as the counts say; return how many, and how many neighbours ran beside them."""
    rng = context.random
    totals = {f"{kind}_rows": 0 for kind in KINDS} | {"neighbours": 0}
    settings: dict[str, Any] = {
        "INFERENCE_API_MOCK_MODE": "noise",
        "INFERENCE_API_MOCK_TOKENS_PER_SECOND": TOKENS_PER_SECOND,
    }
    neighbours = _draw_cases(rng, NUM_NEIGHBOURS)
    with running_service(proxy=True, **settings) as service:
        neighbours = _undisturbed(service, neighbours)
        culprits = list(_make_culprits(rng, _undisturbed(service, _draw_cases(rng, NUM_CANDIDATES))))
    faults = ",".join(f"{culprit.kind}:{culprit.needle}" for culprit in culprits)
    todo = [kind for kind in KINDS for _ in range(context.counts["rows_of_each_kind"])]
    rng.shuffle(todo)
    with running_service(proxy=True, **settings, INFERENCE_API_MOCK_FAULTS=faults) as service:
        chosen = [rng.choice([it for it in culprits if it.kind == kind]) for kind in todo]
        totals["neighbours"] = _fail_among(context, service, chosen, neighbours)
        for kind in KINDS:
            totals[f"{kind}_rows"] = todo.count(kind)
        counted = service.metric('inference_api_finished_total{reason="error"}')
        context.count("rows that failed are counted", _unlike(counted, len(todo)))
        foreign = service.metric("inference_api_foreign_tokens_total")
        context.count("ids that match no rule", _unlike(foreign, 0))
    return totals | check_model_rows(context)


def _draw_cases(rng: random.Random, count: int) -> list[Case]:
    return [Case(draw_prompt(rng, rng.randint(1, 60)), rng.randrange(2**31)) for _ in range(count)]


def _make_culprits(rng: random.Random, cases: list[Case]) -> Iterator[Culprit]:
    """Yield for each kind one that fails at its first token and one that fails in mid-stream."""
    # A setting loses the blanks at its ends.
    usable = [case for case in cases if case.text[NEEDLE].strip() == case.text[NEEDLE]]
    for kind, case in zip(KINDS, usable, strict=False):
        yield Culprit(kind, case, case.text[NEEDLE])
        needle = "".join(rng.choices(string.ascii_uppercase, k=12))
        yield Culprit(kind, Case(f"{case.prompt} {needle}", case.seed), needle)


def _undisturbed(service: Service, cases: list[Case]) -> list[Case]:
    """Return the cases with their texts; raises CampaignError if one has none."""
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as clients:
        answers = list(clients.map(lambda case: _stream(service, case), cases))
    if any(fault is not None for _, fault in answers):
        raise CampaignError(f"an undisturbed run failed: {[fault for _, fault in answers if fault]}")
    texts = [text for text, _ in answers]
    if len(set(texts)) != len(cases):
        raise CampaignError("the drawn cases are not told apart; take another seed")
    return [dataclasses.replace(case, text=text) for case, text in zip(cases, texts, strict=True)]


def _fail_among(context: Context, service: Service, culprits: list[Culprit], neighbours: list[Case]) -> int:
    """Send culprit after culprit while neighbours run again and again; return how many neighbours ran to their ends."""
    num_run = 0
    left = list(culprits)
    with concurrent.futures.ThreadPoolExecutor(NUM_NEIGHBOURS) as clients:
        while left:
            running = [clients.submit(_stream, service, case) for case in neighbours]
            while left and not all(future.done() for future in running):
                number, culprit = len(culprits) - len(left), left.pop()
                context.count(f"row {number}, {culprit.kind}", _fault_of_culprit(service, culprit, number))
            for case, future in zip(neighbours, running, strict=True):
                text, fault = future.result(NEIGHBOUR_SECONDS)
                context.count("neighbour", fault or (None if text == case.text else f"another text: {text[:40]!r}"))
            num_run += len(neighbours)
    return num_run


def _stream(service: Service, case: Case) -> tuple[str, str | None]:
    """Return a raw stream's text, and what is wrong with it."""
    body = {"text": case.prompt, "seed": case.seed, "max_tokens": NUM_TOKENS}
    with RawStream(service.proxy_port or 0, "/inference/mock", body, bearer()) as stream:
        if stream.status != 200:
            return "", f"status {stream.status}"
        text = stream.read_all().decode()
        return text, None if stream.whole else f"cut after {len(text)} characters"


def _fault_of_culprit(service: Service, culprit: Culprit, number: int) -> str | None:
    """Send a call whose row fails, over one of three surfaces; return what its client was told wrongly."""
    case, port = culprit.case, service.proxy_port or 0
    body = {"model": "mock", "prompt": case.prompt, "seed": case.seed, "max_tokens": NUM_TOKENS}
    if number % 3 == 0:
        raw = {"text": case.prompt, "seed": case.seed, "max_tokens": NUM_TOKENS}
        with RawStream(port, "/inference/mock", raw, bearer()) as stream:
            if not culprit.delivered:
                return _unlike(stream.status, 500)
            return _unlike((stream.read_all().decode(), stream.whole), (culprit.delivered, False))
    with RawStream(port, "/v1/completions", {**body, "stream": number % 3 == 1}, bearer()) as stream:
        answer = stream.read_all()
        if number % 3 == 2 or not culprit.delivered:
            kind = json.loads(answer).get("error", {}).get("type")
            return _unlike((stream.status, kind), (500, "server_error"))
        events = [data for _, data in parse_events(answer)]
    text = "".join(choice["text"] for data in events if isinstance(data, dict) for choice in data.get("choices", ()))
    kinds = [data["error"]["type"] for data in events if isinstance(data, dict) and "error" in data]
    return _unlike((text, kinds, "[DONE]" in events), (culprit.delivered, ["server_error"], False))


def _unlike(found: object, expected: object) -> str | None:
    return None if found == expected else f"{found!r} in place of {expected!r}"
