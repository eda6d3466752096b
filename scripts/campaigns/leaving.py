"""Let clients leave at twelve points, and let readers stall: the part `leaving`.

Through the proxy, on the mock, and judged by what the service itself shows: `/rows`, `/metrics`, descriptors and
threads in /proc, and the proxy's log. A row or a place must be free within a quarter of a second and a step, everything
else soon after; readers that take nothing cost the others nothing and are cut. The seed draws the moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

from campaigns.leave_points import LeavePoint, fault_of_wait, half_close, limited_bearer, open_beside, points
from campaigns.part import Context
from campaigns.stalled_readers import check_stalled_readers
from tests.integration.proxy_process import RawClient
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, in_parallel, running_service, wait_for

NUM_ROWS, NUM_PLACES = 3, 8
TOKENS_PER_SECOND = 200
NOTICE_SECONDS = 0.25
SLACK_SECONDS = 0.5
"""For a step, for asking, and for a machine that does other work too."""

STATE_SECONDS = 5.0
SETTLE_SECONDS = 10.0
SPARE_DESCRIPTORS = 2
"""A connection that is being asked over, and the one before it."""


def run(context: Context) -> dict[str, int]:
    """Leave as often as the counts say at each point, then stall; return how many left and how long rows took."""
    totals = {"leavers": 0, "slowest_row_ms": 0}
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS=str(NUM_PLACES),
        INFERENCE_API_PREFIX_REUSE="0",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="8",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND=str(TOKENS_PER_SECOND),
    ) as service:
        warm_up(service)
        for point in points(NUM_ROWS):
            slowest = _leave_often(context, service, point)
            totals["leavers"] += context.counts["leavers"]
            totals["slowest_row_ms"] = max(totals["slowest_row_ms"], round(1000 * slowest))
            context.log(f"{point.name}: the slowest after {slowest:.3f} s")
        _check_everything_serves(context, service)
    return totals | check_stalled_readers(context)


def warm_up(service: Service) -> None:
    """Let every thread of the server come up once, and every buffer be made."""
    in_parallel([lambda: _ask(service)] * (NUM_ROWS + NUM_PLACES))


def held(service: Service) -> dict[str, int]:
    """Return what the service holds now for whoever asks: rows in use and places in the queue."""
    rows = service.rows()
    return {"row": int(rows["num_rows_in_use"]), "place": int(rows["num_waiting"])}


def descriptors(service: Service) -> int:
    """Return the open descriptors of the server's worker and of the proxy, all processes together."""
    pids = [*service.worker_pids, *service.pids_of("proxy.proxy")]
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def num_threads(service: Service) -> int:
    """Return the threads of the server's worker (proc_pid_task(5))."""
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in service.worker_pids)


def _leave_often(context: Context, service: Service, point: LeavePoint) -> float:
    """Let clients leave one after another at a point; return the longest time until what one held was free."""
    rng, slowest = random.Random(f"{context.seed} {point.name}"), 0.0
    aborts = service.metric('inference_api_finished_total{reason="abort"}')
    with contextlib.ExitStack() as beside:
        open_beside(service, point.num_beside, beside)
        wait_for(lambda: held(service) == {"row": point.num_beside, "place": 0}, STATE_SECONDS, "the streams beside")
        open_before = descriptors(service)
        for number in range(context.counts["leavers"]):
            way = point.ways[number % len(point.ways)]
            fault, seconds = _leave_once(service, point, number % len(point.ways), rng)
            context.count(f"{point.name}, {way.__name__}", fault)
            slowest = max(slowest, seconds)
        fault = fault_of_wait(lambda: descriptors(service) <= open_before + SPARE_DESCRIPTORS, SETTLE_SECONDS)
        context.count(f"{point.name}: descriptors", fault and f"{descriptors(service)}, and {open_before} before")
    if point.holds:
        wait_for(lambda: not any(held(service).values()), STATE_SECONDS, "the end of the streams beside")
        num_aborts = service.metric('inference_api_finished_total{reason="abort"}') - aborts
        expected = context.counts["leavers"] + point.num_beside
        context.count(f"{point.name}: aborts", None if num_aborts == expected else f"{num_aborts:g} of {expected}")
    return slowest


def _leave_once(service: Service, point: LeavePoint, way: int, rng: random.Random) -> tuple[str | None, float]:
    """Bring one client to the point and let it leave; return what is wrong, and how long its row or place took."""
    leave, before = point.ways[way], {"row": point.num_beside, "place": 0}
    with RawClient(service.proxy_port or 0, receive_buffer_bytes=point.receive_buffer_bytes) as client:
        point.reach(client)
        if point.holds:
            holding = {**before, point.holds: before[point.holds] + 1}
            fault = fault_of_wait(lambda: held(service) == holding, STATE_SECONDS)
            if fault is not None:
                return f"never held its {point.holds}: {held(service)}", 0.0
            time.sleep(rng.uniform(0.0, 2 * NUM_ROWS / TOKENS_PER_SECOND))
        left_at = time.monotonic()
        leave(client)
        fault = fault_of_wait(lambda: held(service) == before, STATE_SECONDS)
        seconds = time.monotonic() - left_at
        if leave is half_close and fault is None and point.holds:
            client.sock.settimeout(STATE_SECONDS)
            client.read_to_end()  # the proxy closes, and says nothing more than what was under way
    if fault is None and point.holds and seconds > NOTICE_SECONDS + SLACK_SECONDS:
        fault = f"{seconds:.3f} s"
    return fault and f"not free: {fault}", seconds


def _check_everything_serves(context: Context, service: Service) -> None:
    """Fill every row and place at once: a thread, socket or permit that had not come back would be missing here."""
    threads = num_threads(service)
    texts = in_parallel([lambda: _ask(service)] * (NUM_ROWS + NUM_PLACES))
    wrong = [text for text in texts if text != b"1234567890"]
    context.count("all rows and places serve", f"{len(wrong)} do not: {wrong[:3]}" if wrong else None)
    grown = num_threads(service) - threads
    context.count("threads", f"{grown} more for requests that there were threads for" if grown > 0 else None)
    late, foreign = (service.metric(f"inference_api_{name}_tokens_total") for name in ("late", "foreign"))
    context.log(f"{late:g} late tokens")
    context.count("ids that match no rule", f"{foreign:g} of them" if foreign else None)


def _ask(service: Service) -> bytes:
    with RawStream(
        service.proxy_port or 0, "/inference/mock", {"text": "x", "max_tokens": 10}, limited_bearer()
    ) as stream:
        return stream.read_all()
