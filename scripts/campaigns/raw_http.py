"""Send raw requests, good, bad and forged, by three ways and see that each has one reading: the part `raw_http`.

For every connection: all that comes back is whole answers to its own requests, by an independent parser; what reached
the upstream was sent by this connection, is no more than that parser reads in it, and was answered to it alone; and a
request after it is answered as if nothing had been. Over the proxy the vectors' own expectations hold too.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence

from campaigns.part import Context
from campaigns.raw_http_cases import Case, canary, mutants, spoof_cases, vector_cases
from campaigns.raw_http_reading import Answer, AnswerFault, read_answers, read_requests
from campaigns.raw_http_routes import Route, exchange, find_nginx, nginx_route, proxy_route, server_route
from proxy.auth import AuthError, verify_assertion
from proxy.routes import RouteTable, Scope
from tests.integration.echo_upstream import Exchange
from tests.integration.proxy_process import INTERNAL_KEY
from tests.integration.raw_vectors import fault_of

NUM_CONNECTIONS = 32
"""At once; each is followed by its canary."""

BATCH = 480
NUM_ROUTES = 3
"""Ways in that share the mutants; without nginx its share is left out, so that a seed repeats the others'."""


def run(context: Context) -> dict[str, int]:
    """Do all cases by all ways; return how many connections there were and how many requests passed by each way."""
    totals: collections.Counter[str] = collections.Counter()
    nginx = find_nginx(context.folder / "nginx")
    if nginx is None:
        context.count_not_run("nginx", "there is no nginx, and no Debian package of it can be fetched")
    with contextlib.ExitStack() as stack:
        routes = [stack.enter_context(proxy_route()), stack.enter_context(server_route(context))]
        if nginx is not None:
            routes.append(stack.enter_context(nginx_route(nginx, context.folder / "nginx-run")))
        for route in routes:
            began, num_cases = time.monotonic(), 0
            cases = _cases(
                route, random.Random(f"{context.seed} {route.name}"), context.counts["mutants"] // NUM_ROUTES
            )
            # An assertion lasts 30 s: cases are made when their turn comes.
            while batch := list(itertools.islice(cases, BATCH)):
                asyncio.run(_send_all(context, route, batch, totals))
                num_cases += len(batch)
                _check_upstream(context, route, totals)
            context.log(f"{route.name}: {num_cases} cases in {time.monotonic() - began:.1f} s")
    return dict(totals)


def _cases(route: Route, rng: random.Random, num_mutants: int) -> Iterator[Case]:
    yield from vector_cases(rng, route.identify)
    yield from spoof_cases(rng)
    yield from mutants(rng, num_mutants, route.identify)


async def _send_all(context: Context, route: Route, cases: Sequence[Case], totals: collections.Counter[str]) -> None:
    places = asyncio.Semaphore(NUM_CONNECTIONS)

    async def send(case: Case) -> None:
        async with places:
            received = await exchange(route, case.pieces)
            context.count(f"{route.name}: {case.name}", _judge(route, case, received, totals))
            nonce = f"c{case.nonce[1:]}"
            received = await exchange(route, (canary(nonce, route.identify),))
            context.count(f"{route.name}: the canary after {case.name}", _judge_canary(route, nonce, received, totals))

    async with asyncio.TaskGroup() as group:
        for case in cases:
            group.create_task(send(case))
    totals["connections"] += 2 * len(cases)


def _judge(route: Route, case: Case, received: bytes, totals: collections.Counter[str]) -> str | None:
    try:
        answers = read_answers(received, headless=not route.reads_alone)
    except AnswerFault as fault:
        return f"{fault} for {case.raw!r}"
    passed = [answer for answer in answers if _is_passed(route, answer)]
    totals["passed"] += len(passed)
    faults = [_fault_of_passed(route, case, answer) for answer in passed]
    num_possible = len(read_requests(case.raw))
    if route.reads_alone and route.upstream is not None and len(passed) > num_possible:
        faults.append(f"{len(passed)} requests were taken where there are {num_possible}")
    if case.is_spoof and len(passed) != (1 if route.upstream is not None else 0):
        faults.append("a forged identity changed what becomes of the request")
    if case.vector is not None and route.name == "proxy":
        faults.append(fault_of(case.vector, [answer.status for answer in answers], len(passed)))
    told = "; ".join(filter(None, faults))
    return f"{told}; answered {[answer.status for answer in answers]} for {case.raw!r}" if told else None


def _is_passed(route: Route, answer: Answer) -> bool:
    """Tell whether a request got as far as this way leads: to the upstream's echo, or into the server's application."""
    return answer.echoed is not None if route.upstream is not None else "request-id" in answer.headers


def _fault_of_passed(route: Route, case: Case, answer: Answer) -> str | None:
    told = answer.headers.get("x-request-id", "")
    echoed = answer.echoed
    if echoed is None:
        # It answers by the head alone where that decides, as here: the model is not one of its own.
        was_sent = all(part.strip().encode("latin-1") in case.raw for part in told.split(","))
        is_damaged = f"X-Request-Id: {case.nonce}\r\n".encode() not in case.raw
        return None if was_sent or is_damaged else f"an answer to {told!r}"
    method, path = _target(echoed.line)
    if answer.status and echoed.headers.get("request-id") != answer.headers.get("request-id"):
        return f"the answer of request {echoed.headers.get('request-id')!r}"
    sent = [(request.method, request.path) for request in read_requests(case.raw)]
    read = any(method == its_method and its_path.endswith(path) for its_method, its_path in sent)
    if not (read if route.reads_alone else f"{method} ".encode() in case.raw and path.encode() in case.raw):
        return f"the upstream got {method} {path}, sent were {sent}"
    return None


def _target(request_line: str) -> tuple[str, str]:
    """Return method and path of a request line."""
    method, _, rest = request_line.partition(" ")
    return method, rest.partition(" ")[0].partition("?")[0]


def _judge_canary(route: Route, nonce: str, received: bytes, totals: collections.Counter[str]) -> str | None:
    try:
        answers = read_answers(received)
    except AnswerFault as fault:
        return str(fault)
    if len(answers) != 1 or not _is_passed(route, answers[0]):
        return f"answered {[answer.status for answer in answers]}, {received[:200]!r}"
    totals["passed"] += 1
    if answers[0].headers.get("x-request-id") != nonce:
        return f"an answer to {answers[0].headers.get('x-request-id')!r}"
    echoed = answers[0].echoed
    return None if echoed is None or f"/{nonce} " in echoed.line else f"the upstream got {echoed.line!r}"


def _check_upstream(context: Context, route: Route, totals: collections.Counter[str]) -> None:
    """Hold what the upstream has seen since against what was answered, and every identity against the bearer's."""
    passed = totals.pop("passed", 0)
    totals[f"passed_by_{route.name}"] += passed
    if route.upstream is None:
        return
    seen, route.upstream.seen = route.upstream.seen, []
    same = len(seen) == passed
    context.count(f"{route.name}: counts", None if same else f"{passed} were answered, the upstream saw {len(seen)}")
    for it in seen:
        context.count(f"{route.name}: identity of {it.request_line}", _fault_of_identity(it))


def _fault_of_identity(it: Exchange) -> str | None:
    """Say what is wrong with who a request says that it is from: exactly one assertion, for it, of the bearer.

    A mutant may have become a call of a public route, which has none.
    """
    method, path = _target(it.request_line)
    named = collections.Counter(name.lower() for name, _ in it.headers)
    if any("evil" in value for _, value in it.headers) or "x-team-id" in named or "smuggled" in it.request_line:
        return f"the upstream got {it.request_line} {it.headers}"
    is_public = RouteTable().find(method, path).scope is Scope.PUBLIC
    if named["x-internal-assertion"] != (0 if is_public else 1) or named["request-id"] != 1:
        return f"{named['x-internal-assertion']} assertions, {named['request-id']} ids"
    if is_public:
        return None
    request_id = it.header("Request-Id") or ""
    try:
        claims = verify_assertion(
            INTERNAL_KEY.encode(),
            it.header("X-Internal-Assertion") or "",
            method=method,
            path=path,
            request_id=request_id,
            now=time.time(),
        )
    except AuthError as fault:
        return f"the assertion is refused: {fault.code}"
    return None if claims.tenant == "team-a" else f"the tenant is {claims.tenant!r}"
