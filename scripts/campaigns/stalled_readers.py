"""Let 32 readers take nothing of long answers: the second half of the part `leaving`.

Through the proxy, on the mock. Their rows run to the end, the others are served as before, no process keeps what was
not read, and the proxy cuts them when their time is over and says why. Knows no point at which a client leaves.
"""

from __future__ import annotations

import contextlib
import time

from campaigns.leave_points import FLOOD, FLOOD_PATH, SMALL_BUFFER_BYTES, fault_of_wait
from campaigns.part import Context
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, resident_bytes, running_service

STALL_SECONDS = 12
"""Longer than their rows take to end, and others need to show that nothing slows them down meanwhile."""

MAX_GROWTH_BYTES = 64 << 20
"""Of all processes together: less than what the readers have not read, which the kernel holds."""

MAX_SLOWER = 3.0
SLACK_SECONDS = 0.5
END_SECONDS = 30.0
CUT_SECONDS = 15.0
REASON = "cut_reason=write_stalled"


def check_stalled_readers(context: Context) -> dict[str, int]:
    """Run the readers and count the checks; return how many stalled and by how much all processes grew."""
    num_readers = context.counts["stalled"]
    with (
        running_service(
            proxy=True, INFERENCE_API_MOCK_TOKENS_PER_SECOND="6400", PROXY_WRITE_STALL_SECONDS=str(STALL_SECONDS)
        ) as service,
        contextlib.ExitStack() as stack,
    ):
        undisturbed = _timed_answers(service)
        before = _resident(service)
        readers = []
        for _ in range(num_readers):
            reader = RawStream(service.proxy_port or 0, FLOOD_PATH, FLOOD, bearer(), receive_bytes=SMALL_BUFFER_BYTES)
            readers.append(stack.enter_context(reader))
        statuses = [reader.status for reader in readers]
        context.count("stalled readers are served", None if set(statuses) == {200} else f"statuses {set(statuses)}")
        context.count("their rows end", fault_of_wait(lambda: not service.num_rows_in_use(), END_SECONDS))
        beside = _timed_answers(service)
        is_fast = beside < MAX_SLOWER * undisturbed + SLACK_SECONDS
        context.count("the others' speed", None if is_fast else f"{beside:.2f} s instead of {undisturbed:.2f} s")
        grown = _resident(service) - before
        context.count("memory", f"grew by {grown >> 20} MiB" if grown > MAX_GROWTH_BYTES else None)
        _check_cut(context, service, readers)
    return {"stalled": num_readers, "grown_mib": max(0, grown >> 20)}


def _check_cut(context: Context, service: Service, readers: list[RawStream]) -> None:
    """Wait until every reader is cut with a reason in the log; none may see its answer as whole."""
    fault = fault_of_wait(lambda: service.log.read_text().count(REASON) >= len(readers), CUT_SECONDS)
    context.count("cut with a reason", fault and f"{fault}; {service.log.read_text().count(REASON)} have one")
    for reader in readers:
        with contextlib.suppress(OSError):
            reader.read_all()
        context.count("a cut reader", "its answer looks whole" if reader.whole else None)


def _timed_answers(service: Service) -> float:
    """Return the seconds that ten answers of 200 tokens take, one after another."""
    began = time.monotonic()
    for _ in range(10):
        body = {"text": "x", "max_tokens": 200}
        with RawStream(service.proxy_port or 0, "/inference/mock", body, bearer()) as stream:
            stream.read_all()
    return time.monotonic() - began


def _resident(service: Service) -> int:
    return sum(map(resident_bytes, service.pids()))
