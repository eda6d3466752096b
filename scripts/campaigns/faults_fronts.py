"""Kill the processes between the clients and the backend: the part `faults_fronts`.

Two workers of the server and one of the proxy, each killed with SIGKILL while streams run, and now and then the process
that watches over them. Its streams end with a sign that they are not whole, within two seconds; all others go on to
their ends, byte for byte; the rows of the dead are free within a second; the service answers again. On the mock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from campaigns.faults_run import Run, is_ready
from campaigns.faults_streams import ECHO, Outcome, Witness, open_witnesses
from campaigns.part import CampaignError, Context
from tests.integration.service import Service, bearer, running_service, wait_for

NUM_LETTERS = 200
TOKENS_PER_SECOND = "1600"
"""Of the mock: a hundred a second for each of the streams, which so take two seconds."""

ROWS_SECONDS = 1.0
WATCH_SECONDS = 1.3
"""A worker notices within a second that the process that watched over it is gone, and ends."""

POLL_SECONDS = 0.02
END_SECONDS = 2.0
ANSWER_SECONDS = 5.0
OPEN_SECONDS = 15.0
SETTLED_SECONDS = 5.5
"""A front that dies before it has ever served so long counts as one that cannot start, and ends the service."""

SERVER, PROXY = "gunicorn_settings", "proxy.proxy"
"""In the command lines of all processes of the server, and of the proxy."""

ARBITER_EVERY = 5
"""So often it is not the worker that dies but the process that watches over it."""


def run(context: Context) -> dict[str, int]:
    """Kill workers of the server, then the proxy; return how many streams were open, and how they ended."""
    totals = {"worker_kills": 0, "proxy_kills": 0, "streams": 0, "whole": 0, "cut": 0, "slowest_rows_ms": 0}
    with running_service(
        proxy=True, **ECHO, INFERENCE_API_MOCK_TOKENS_PER_SECOND=TOKENS_PER_SECOND, INFERENCE_API_WORKERS="2"
    ) as service:
        this = Run(context, service, totals)
        time.sleep(SETTLED_SECONDS)
        for number in range(context.counts["worker_kills"]):
            _kill(this, f"worker {number}", _pick(this, number, SERVER))
            totals["worker_kills"] += 1
        for number in range(context.counts["proxy_kills"]):
            _kill(this, f"proxy {number}", _pick(this, number, PROXY))
            totals["proxy_kills"] += 1
        foreign = service.metric("inference_api_foreign_tokens_total")
        context.count("ids that match no rule", f"{foreign:g} of them" if foreign else None)
    return totals


def _pick(run: Run, number: int, part: str) -> int:
    """Return the process that dies in this round."""
    if number % ARBITER_EVERY == ARBITER_EVERY - 1:
        return run.service.arbiter_pid(part)
    wait_for(lambda: run.service.forked_pids_of(part), ANSWER_SECONDS, "a worker")
    return run.random(f"{part} {number}").choice(run.service.forked_pids_of(part))


def _kill(run: Run, name: str, victim: int) -> None:
    """End one process in the middle of streams through the proxy and past it, and look at all of them."""
    wait_until_answering(run, name)
    rng, half = run.random(name), run.context.counts["streams"] // 2
    proxied = open_witnesses(run.port, rng, half, NUM_LETTERS, bearer())
    direct = open_witnesses(run.service.port, rng, half, NUM_LETTERS, {})
    if not all(witness.wait_open(OPEN_SECONDS) for witness in [*proxied, *direct]):
        raise CampaignError(f"{name}: not every stream began within {OPEN_SECONDS:g} s")
    time.sleep(rng.uniform(0.0, 0.5))
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    seconds = _longest_misfit(run.service, [*proxied, *direct])
    run.context.count(f"{name}: rows of the dead", f"held for {seconds:.2f} s" if seconds > ROWS_SECONDS else None)
    run.totals["slowest_rows_ms"] = max(run.totals["slowest_rows_ms"], round(seconds * 1000))
    for witness in [*proxied, *direct]:
        witness.join()
        run.context.count(f"{name}: stream", _fault_of(witness, killed_at))
    if "proxy" in name:
        cut = [witness.surface for witness in direct if witness.outcome is not Outcome.WHOLE]
        run.context.count(f"{name}: streams past the proxy go on", f"cut: {cut}" if cut else None)
    outcomes = [witness.outcome for witness in [*proxied, *direct]]
    run.totals["streams"] += len(outcomes)
    run.totals["whole"] += outcomes.count(Outcome.WHOLE)
    run.totals["cut"] += outcomes.count(Outcome.CUT)
    run.context.log(f"{name}: {outcomes.count(Outcome.CUT)} of {len(outcomes)} streams cut")


def wait_until_answering(run: Run, name: str) -> None:
    """Wait for an answer by both ways, in time; raises CampaignError without one, for nothing can follow."""
    try:
        wait_for(lambda: is_ready(run.service) and answers(run), ANSWER_SECONDS, "an answer")
    except AssertionError as error:
        raise CampaignError(f"{name}: {error}") from None


def answers(run: Run) -> bool:
    """Tell whether a short stream through the proxy comes whole."""
    probe = Witness(run.port, "raw", "probe", bearer())
    probe.join()
    return probe.outcome is Outcome.WHOLE


def _longest_misfit(service: Service, witnesses: list[Witness]) -> float:
    """Watch until nothing can be cut any more; return for how long on end more rows were in use than streams open.

    A moment without any answer is none.
    """
    began = time.monotonic()
    since, longest = None, 0.0
    while (now := time.monotonic()) - began < WATCH_SECONDS or (since is not None and longest <= ROWS_SECONDS):
        # Counted before the rows: a stream that ends in between has given its row back.
        num_open = sum(not witness.is_over for witness in witnesses)
        is_misfit = False
        with contextlib.suppress(OSError, KeyError, ValueError):
            is_misfit = service.num_rows_in_use() > num_open
        since = (since or now) if is_misfit else None
        longest = max(longest, now - since if since is not None else 0.0)
        time.sleep(POLL_SECONDS)
    return longest


def _fault_of(witness: Witness, killed_at: float) -> str | None:
    fault = witness.fault()
    if fault is None and witness.outcome is Outcome.REFUSED:
        fault = f"{witness.surface}: refused, though it had begun"
    if fault is None and witness.outcome is Outcome.CUT and witness.ended_at - killed_at > END_SECONDS:
        fault = f"{witness.surface}: cut {witness.ended_at - killed_at:.2f} s after the kill"
    return fault
