"""Stop the service and reload its proxy under load: the part `faults_drain`.

SIGTERM: what has begun comes whole while the grace lasts, later calls are refused, and the service ends with status 0
within a second after it. SIGHUP of the proxy, and of the server's gunicorn: no call fails, and streams go on to their
ends in the worker that leaves. Clients go on calling all the while, so that one of them is always half-way. On the
mock.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from campaigns.faults_run import Run
from campaigns.faults_streams import ECHO, Outcome, Witness, draw_prompt, join_all, open_witnesses
from campaigns.part import CampaignError, Context
from tests.integration.service import Service, bearer, running_service, wait_for

NUM_STREAMS = 40
"""Eight more than there are rows: some wait in the queue when the signal comes."""

NUM_LETTERS = 100
TOKENS_PER_SECOND = "3200"
"""Of the mock: all streams take two seconds."""

GRACE_SECONDS = 8.0
OPEN_SECONDS = 15.0
NUM_CALLERS = 3
CALL_LETTERS = 5
PAUSE_SECONDS = 0.02
RELOAD_SECONDS = 2.0
NUM_RELOADED_STREAMS = 14
RELOADED = ("proxy.proxy", "gunicorn_settings")
"""In the command lines of what can be told to reload: the proxy first, then the server."""


class Callers:
    """Clients that send one short call after another until they are stopped; each call is a witness."""

    def __init__(
        self,
        port: int,
        rng: random.Random,
        *,
        until_refused: bool,
        headers: Callable[[], Mapping[str, str]] = bearer,
    ) -> None:
        """Start them; with `until_refused` each one stops by itself at its first refusal."""
        self._headers = headers
        self.calls: list[Witness] = []
        self._stopped = threading.Event()
        self._until_refused = until_refused
        prompts = [random.Random(rng.random()) for _ in range(NUM_CALLERS)]
        self._threads = [threading.Thread(target=self._call, args=(port, own)) for own in prompts]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let the calls under way end, and stop."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _call(self, port: int, rng: random.Random) -> None:
        while not self._stopped.wait(PAUSE_SECONDS):
            call = Witness(port, "completions", draw_prompt(rng, CALL_LETTERS), self._headers())
            call.join()
            self.calls.append(call)
            if self._until_refused and call.outcome is Outcome.REFUSED:
                return


def run(context: Context) -> dict[str, int]:
    """Drain and reload as often as the counts say; return how many streams and calls ran meanwhile."""
    totals = {"drains": 0, "reloads": 0, "streams": 0, "calls": 0, "slowest_drain_ms": 0}
    for number in range(context.counts["drains"]):
        _drain(context, totals, f"drain {number}")
    if context.counts["reloads"]:
        _reload_all(context, totals)
    return totals


def _drain(context: Context, totals: dict[str, int], name: str) -> None:
    """Send SIGTERM to a service of this round's own, in the middle of everything."""
    settings: dict[str, Any] = {"INFERENCE_API_GRACE_SECONDS": str(GRACE_SECONDS), **ECHO}
    with running_service(proxy=True, **settings, INFERENCE_API_MOCK_TOKENS_PER_SECOND=TOKENS_PER_SECOND) as service:
        this = Run(context, service, totals)
        rng = this.random(name)
        witnesses = open_witnesses(this.port, rng, NUM_STREAMS, NUM_LETTERS, bearer())
        _wait_until_taken(service, witnesses, name)
        with _calling(this, rng, until_refused=True) as callers:
            time.sleep(rng.uniform(0.0, 0.5))
            began = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = service.process.wait(GRACE_SECONDS + 1.0)
            seconds = time.monotonic() - began
        join_all(witnesses)
        _count_whole(this, name, [witness for witness in witnesses if witness.outcome is not Outcome.REFUSED])
        refused = sum(witness.outcome is Outcome.REFUSED for witness in witnesses)
        context.count(f"{name}: nothing that was sent is refused", f"{refused} were" if refused else None)
        _count_calls(this, name, callers, may_refuse=True)
        context.count(f"{name}: status 0 within the grace", None if status == 0 else f"{status} after {seconds:.1f} s")
    totals["drains"] += 1
    totals["slowest_drain_ms"] = max(totals["slowest_drain_ms"], round(seconds * 1000))
    context.log(f"{name}: {len(witnesses)} streams, {len(callers.calls)} calls, ended after {seconds:.2f} s")


def _wait_until_taken(service: Service, witnesses: list[Witness], name: str) -> None:
    """Wait until every stream has a row, waits in the queue or is over; raises CampaignError if that takes too long."""

    def are_taken() -> bool:
        # Counted after the rows: a stream that ends in between is in one of both numbers, never in none.
        rows = service.rows()
        num_over = sum(witness.is_over for witness in witnesses)
        return int(rows["num_rows_in_use"]) + int(rows["num_waiting"]) + num_over >= len(witnesses)

    try:
        wait_for(are_taken, OPEN_SECONDS, "all streams taken")
    except AssertionError as error:
        raise CampaignError(f"{name}: {error}") from None


def _reload_all(context: Context, totals: dict[str, int]) -> None:
    """Send SIGHUP to the proxy and to the server in turn, in one service."""
    with running_service(proxy=True, **ECHO, INFERENCE_API_MOCK_TOKENS_PER_SECOND=TOKENS_PER_SECOND) as service:
        this = Run(context, service, totals)
        for number in range(context.counts["reloads"]):
            name, part = f"reload {number}", RELOADED[number % len(RELOADED)]
            rng = this.random(name)
            before = set(service.forked_pids_of(part))
            with _calling(this, rng, until_refused=False) as callers:
                witnesses = open_witnesses(this.port, rng, NUM_RELOADED_STREAMS, NUM_LETTERS, bearer())
                if not all(witness.wait_open(OPEN_SECONDS) for witness in witnesses):
                    raise CampaignError(f"{name}: not every stream began within {OPEN_SECONDS:g} s")
                os.kill(service.arbiter_pid(part), signal.SIGHUP)
                time.sleep(RELOAD_SECONDS)
                join_all(witnesses)
            is_new = bool(set(service.forked_pids_of(part)) - before)
            context.count(f"{name}: another worker of {part}", None if is_new else "it is the same")
            _count_whole(this, name, witnesses)
            _count_calls(this, name, callers, may_refuse=False)
            totals["reloads"] += 1
            context.log(f"{name}: {part}, {len(witnesses)} streams, {len(callers.calls)} calls")


@contextlib.contextmanager
def _calling(run: Run, rng: random.Random, *, until_refused: bool) -> Iterator[Callers]:
    callers = Callers(run.port, rng, until_refused=until_refused)
    try:
        yield callers
    finally:
        callers.stop()


def _count_whole(run: Run, name: str, witnesses: list[Witness]) -> None:
    for witness in witnesses:
        fault = witness.fault()
        if fault is None and witness.outcome is not Outcome.WHOLE:
            fault = f"{witness.surface}: {witness.outcome.value} after {len(witness.told.text)} characters"
        run.context.count(f"{name}: stream", fault)
    run.totals["streams"] += len(witnesses)


def _count_calls(run: Run, name: str, callers: Callers, *, may_refuse: bool) -> None:
    """Count as one check that every call was answered whole, or refused as a whole where that may be."""
    allowed = {Outcome.WHOLE, Outcome.REFUSED} if may_refuse else {Outcome.WHOLE}
    wrong = [
        call.fault() or call.outcome.value for call in callers.calls if call.fault() or call.outcome not in allowed
    ]
    run.context.count(
        f"{name}: {len(callers.calls)} calls", f"{len(wrong)} failed, such as {wrong[0]}" if wrong else None
    )
    run.totals["calls"] += len(callers.calls)
