"""Kill and stop the decode backend while streams run: the part `faults_backend`.

Every open stream must end within two seconds with a sign that it is not whole, new calls wait or are refused with a
time to come back, the service is ready again within five seconds, and nothing that an earlier backend made is ever
delivered. A hung backend, stopped or in a step without end, is noticed and replaced. Through the proxy, on the mock.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from campaigns.faults_run import Run, checked, is_ready
from campaigns.faults_streams import ECHO, Outcome, Witness, draw_prompt, join_all, open_witnesses
from campaigns.part import CampaignError, Context
from tests.integration.service import Service, bearer, running_service, wait_for

NUM_LETTERS = 400
TOKENS_PER_SECOND = "1280"
"""Of the mock, over 32 rows: a stream would take ten seconds, so that all are open when the fault strikes."""

WATCHDOG_SECONDS = 3.0
END_SECONDS = 2.0
READY_SECONDS = 5.0
GIVE_UP_SECONDS = 30.0
RED_SECONDS = 6.0
OPEN_SECONDS = 15.0
PROBE_SECONDS = 0.2
SETTLED_SECONDS = 5.5
"""A backend that has served for so long is started again at once; one that dies in a row waits longer and longer."""

KILLS_IN_A_ROW = 4
HANG_TEXT = "HANGTHESTEP"


def run(context: Context) -> dict[str, int]:
    """Break the backend as often as the counts say; return how many streams were open, and how they ended."""
    totals = {"kills": 0, "hangs": 0, "streams": 0, "cut": 0, "refused": 0, "slowest_ready_ms": 0}
    with running_service(
        proxy=True,
        **ECHO,
        INFERENCE_API_MOCK_TOKENS_PER_SECOND=TOKENS_PER_SECOND,
        INFERENCE_API_MOCK_FAULTS=f"hang:{HANG_TEXT}",
        INFERENCE_API_WATCHDOG_SECONDS=str(WATCHDOG_SECONDS),
    ) as service:
        this = Run(context, service, totals)
        for number in range(context.counts["kills"]):
            if number % KILLS_IN_A_ROW == 0:
                time.sleep(SETTLED_SECONDS)
            _kill(this, f"kill {number}")
        time.sleep(SETTLED_SECONDS)
        for number in range(context.counts["hangs"]):
            _hang(this, f"hang {number}")
        foreign = service.metric("inference_api_foreign_tokens_total")
        context.count("ids that match no rule", f"{foreign:g} of them" if foreign else None)
    return totals


def _kill(run: Run, name: str) -> None:
    """End the backend with SIGKILL in the middle of all streams, and look what its clients see."""
    with _streams(run, name, END_SECONDS) as broken_at:
        os.kill(run.service.backend_pid, signal.SIGKILL)
        broken_at.append(time.monotonic())
        probes = _probe_until_ready(run, name)
        seconds = time.monotonic() - broken_at[0]
        late = f"after {seconds:.1f} s" if seconds > READY_SECONDS else None
        run.context.count(f"{name}: ready again", late)
        run.totals["slowest_ready_ms"] = max(run.totals["slowest_ready_ms"], round(seconds * 1000))
        join_all(probes)
        for probe in probes:
            run.context.count(f"{name}: a call while there is no backend", probe.fault())
        run.totals["refused"] += sum(probe.outcome is Outcome.REFUSED for probe in probes)
    run.totals["kills"] += 1


def _hang(run: Run, name: str) -> None:
    """Stop the backend, or let its engine hang in a step: to its clients both are the same."""
    service, hung = run.service, run.service.backend_pid
    culprit = None
    # One row is left for the call that hangs the step: it must not wait in the queue.
    with _streams(run, name, WATCHDOG_SECONDS + END_SECONDS, num_spare=1) as broken_at:
        broken_at.append(time.monotonic())
        if run.random(f"{name}, kind").random() < 0.5:
            os.kill(hung, signal.SIGSTOP)
        else:
            culprit = Witness(run.port, "raw", HANG_TEXT, bearer())
        with checked(run.context, f"{name}: readiness red"):
            wait_for(lambda: not is_ready(service), RED_SECONDS, "readiness red")
        with checked(run.context, f"{name}: another backend"):
            wait_for(lambda: _backend(service) not in (None, hung), WATCHDOG_SECONDS + READY_SECONDS, "another backend")
        with checked(run.context, f"{name}: ready again"):
            wait_for(lambda: is_ready(service), READY_SECONDS, "ready again")
    if culprit is not None:
        culprit.join()
        is_told = culprit.outcome in (Outcome.REFUSED, Outcome.CUT)
        run.context.count(f"{name}: the call that hung the step", None if is_told else culprit.outcome.value)
    run.totals["hangs"] += 1


@contextlib.contextmanager
def _streams(run: Run, name: str, end_seconds: float, num_spare: int = 0) -> Iterator[list[float]]:
    """Have rows decode while the block breaks something and notes when; then count every stream.

    Raises CampaignError if they do not begin.
    """
    if not is_ready(run.service):
        raise CampaignError(f"{name}: the service is not ready")
    rng = run.random(name)
    witnesses = open_witnesses(run.port, rng, run.context.counts["streams"] - num_spare, NUM_LETTERS, bearer())
    if not all(witness.wait_open(OPEN_SECONDS) for witness in witnesses):
        raise CampaignError(f"{name}: not every stream began within {OPEN_SECONDS:g} s")
    time.sleep(rng.uniform(0.0, 0.7))
    broken_at: list[float] = []
    yield broken_at
    join_all(witnesses)
    for witness in witnesses:
        run.context.count(f"{name}: stream", _fault_of_a_cut(witness, broken_at[0] + end_seconds))
    run.totals["cut"] += sum(witness.outcome is Outcome.CUT for witness in witnesses)
    run.totals["streams"] += len(witnesses)
    last = max(witness.ended_at for witness in witnesses) - broken_at[0]
    run.context.log(f"{name}: {len(witnesses)} streams, the last ended after {last:.2f} s")


def _fault_of_a_cut(witness: Witness, ends_by: float) -> str | None:
    """Return what is wrong with a stream that the fault must have cut."""
    if witness.fault() is not None or witness.outcome is not Outcome.CUT:
        return witness.fault() or f"{witness.surface}: ended {witness.outcome.value}"
    late = witness.ended_at - ends_by
    return f"{witness.surface}: ended {late:.2f} s too late" if late > 0 else None


def _probe_until_ready(run: Run, name: str) -> list[Witness]:
    """Send a call every moment until the service is ready; raises CampaignError if it never is."""
    rng = run.random(f"{name}, calls")
    began = time.monotonic()
    probes: list[Witness] = []
    while len(probes) < 2 or not is_ready(run.service):
        if time.monotonic() - began > GIVE_UP_SECONDS:
            raise CampaignError(f"not ready again within {GIVE_UP_SECONDS:g} s")
        probes.append(Witness(run.port, "raw", draw_prompt(rng, 20), bearer()))
        time.sleep(PROBE_SECONDS)
    return probes


def _backend(service: Service) -> int | None:
    return next(iter(service.pids_of("inference_api.backend.main")), None)
