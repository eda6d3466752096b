"""Break backends and workers under self-identifying requests of many tenants: the part `isolation`.

Half of the clients come through the proxy as eight tenants, half to the server itself; some leave early. Meanwhile the
decode backend and the server's worker are killed at random moments. Whatever an answer came to, nothing in it may be
another's, no tenant may see another's request, and every request is accounted for. The seed draws clients and kills.
"""

from __future__ import annotations

import concurrent.futures
import os
import random
import signal
import threading

from campaigns.part import Context
from campaigns.self_identifying import Load, Prover, Result, Target
from tests.integration.service import Service, bearer, running_service, wait_for

NUM_CLIENTS = 64
NUM_TENANTS = 8
LEAVING_SHARE = 0.05
MIN_ANSWERED_SHARE = 0.75
READY_SECONDS = 20.0
FREE_SECONDS = 10.0
LONG_SECONDS = 20_000.0
"""Longer than any run."""


def run(context: Context) -> dict[str, int]:
    """Send the requests, kill meanwhile; return how they ended and how often something was killed."""
    with running_service(
        proxy=True, INFERENCE_API_MOCK_MODE="echo", INFERENCE_API_MOCK_TOKENS_PER_SECOND="0"
    ) as service:
        bearers = [bearer(f"tenant-{number}")["Authorization"].removeprefix("Bearer ") for number in range(NUM_TENANTS)]
        targets = [Target(service.proxy_url, bearers), Target(service.url, [])]
        num_each = context.counts["requests"] // len(targets)
        provers = []
        for index, target in enumerate(targets):
            target.probe()
            load = Load(num_each, NUM_CLIENTS // len(targets), LEAVING_SHARE, context.seed + index, index * num_each)
            provers.append(Prover(target, load))
        kills = _run_with_kills(context, service, provers)
        _check(context, service, provers)
        return {**_sum([prover.result for prover in provers]), **kills}


def _run_with_kills(context: Context, service: Service, provers: list[Prover]) -> dict[str, int]:
    """Run the provers at once (blocking) and kill as often as the counts say, evenly over their requests."""
    rng = context.random
    victims = ["backend"] * context.counts["backend_kills"] + ["worker"] * context.counts["worker_kills"]
    rng.shuffle(victims)
    total = sum(prover.load.requests for prover in provers)
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(provers) + 1) as runs:
        running = [runs.submit(prover.run) for prover in provers]
        killer = runs.submit(_kill_in_turn, service, provers, victims, rng, over, total)
        try:
            concurrent.futures.wait(running, LONG_SECONDS)
        finally:
            over.set()
        killed = killer.result()
        for done in running:
            done.result()
    context.count("kills", None if killed == len(victims) else f"only {killed} of {len(victims)} came to pass")
    return {"kills": killed}


def _kill_in_turn(
    service: Service, provers: list[Prover], victims: list[str], rng: random.Random, over: threading.Event, total: int
) -> int:
    """Kill one victim after another, each when its share of the requests has been made; return how many."""
    for number, victim in enumerate(victims):
        due = total * (number + rng.random()) / (len(victims) + 1)
        while sum(prover.num_done for prover in provers) < due:
            if over.wait(0.01):
                return number
        pid = service.backend_pid if victim == "backend" else service.worker_pids[0]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda gone=pid: gone not in service.pids(), READY_SECONDS, "its end")  # type: ignore[misc]
        wait_for(service.is_healthy, READY_SECONDS, f"health after a killed {victim}")
    return len(victims)


def _check(context: Context, service: Service, provers: list[Prover]) -> None:
    for prover in provers:
        result, door = prover.result, "the proxy" if len(prover.target.headers) > 1 else "the server"
        told = f"; {'; '.join(result.examples[:3])}" if result.examples else ""
        wrong = {name: result.outcomes[name] for name in ("foreign", "short")} | {"leaks": result.leaks}
        for name, count in wrong.items():
            context.count(f"{name} at {door}", f"{count}{told}" if count else None)
        answered, asked = result.outcomes["answered"], prover.load.requests
        is_enough = answered >= MIN_ANSWERED_SHARE * asked
        context.count(f"answered at {door}", None if is_enough else f"only {answered} of {asked}")
        accounted = result.outcomes.total()
        context.count(f"accounted at {door}", None if accounted == asked else f"{accounted} of {asked}")
    foreign = service.metric("inference_api_foreign_tokens_total")
    context.count("ids that match no rule", f"{foreign:g} of them" if foreign else None)
    fault = None
    try:
        wait_for(lambda: not service.num_rows_in_use() and not service.rows()["num_waiting"], FREE_SECONDS, "free rows")
    except AssertionError as error:
        fault = str(error)
    context.count("rows and queue after it", fault)


def _sum(results: list[Result]) -> dict[str, int]:
    figures = [result.figures() for result in results]
    return {name: sum(it[name] for it in figures) for name in figures[0]}
