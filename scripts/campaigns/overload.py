"""Ask for ten times what the service can do: the part `overload`.

Requests come at a steady pace, whatever becomes of them, through the proxy, on a small mock. Each one must be answered
whole or refused at once with a time to come back; the queue keeps both of its bounds, and nothing grows. The seed draws
the prompts' lengths.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

from campaigns.part import Context
from tests.integration.raw_http import RawStream
from tests.integration.service import Service, bearer, resident_bytes, running_service, wait_for

NUM_ROWS, NUM_PLACES, QUEUE_TOKENS = 4, 8, 200
NUM_TOKENS = 10
SERVED_PER_SECOND = 8
OVERLOAD = 10
NUM_CLIENTS = 96
"""More than can be open at once: every answered request waits for a second or two, every refused one for no time."""

MAX_PROMPT_TOKENS = 40
MAX_REFUSAL_SECONDS = 0.25
"""At the 99th percentile; what was measured is told."""

MAX_SLOWER_THAN_A_LOOK = 3.0
"""Allowed instead where other work holds the machine: as often as long as a GET straight at the server takes then."""

MAX_GROWTH_BYTES = 8 << 20
WARM_SHARE = 0.25
SAMPLE_SECONDS = 0.1
DRAIN_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended: its status, seconds to the whole answer, and what is wrong with it."""

    status: int
    seconds: float
    fault: str | None


def run(context: Context) -> dict[str, int]:
    """Send the requests; return how many were answered and refused, and how long refusals took."""
    with running_service(
        proxy=True,
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS=str(NUM_PLACES),
        INFERENCE_API_QUEUE_TOKENS=str(QUEUE_TOKENS),
        INFERENCE_API_MOCK_TOKENS_PER_SECOND=str(SERVED_PER_SECOND * NUM_TOKENS),
    ) as service:
        with _watched_queue(context, service) as looks:
            outcomes = _send_all(context, service)
        _check_token_bound(context, service)
        return _judge(context, outcomes, looks)


def _send_all(context: Context, service: Service) -> list[Outcome]:
    """Send every request when it is due (blocking), and compare memory after a warm-up with that at the end."""
    rng, num_requests = context.random, context.counts["requests"]
    lengths = [rng.randint(1, MAX_PROMPT_TOKENS) for _ in range(num_requests)]
    began = time.monotonic()
    memory: dict[int, int] = {}
    futures = []
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for number, length in enumerate(lengths):
            time.sleep(max(0.0, began + number / (SERVED_PER_SECOND * OVERLOAD) - time.monotonic()))
            futures.append(clients.submit(_ask, service, length))
            if number == int(num_requests * WARM_SHARE):
                memory = {pid: resident_bytes(pid) for pid in service.pids()}
    for pid, before in memory.items():
        grown = resident_bytes(pid) - before
        context.count("memory", f"a process grew by {grown} bytes" if grown > MAX_GROWTH_BYTES else None)
    return [future.result() for future in futures]


def _ask(service: Service, length: int) -> Outcome:
    began = time.monotonic()
    body = {"text": "x" * length, "max_tokens": NUM_TOKENS}
    try:
        with RawStream(service.proxy_port or 0, "/inference/mock", body, bearer()) as stream:
            status, text = stream.status, stream.read_all()
            seconds = time.monotonic() - began
            if status == 200:
                is_right = stream.whole and text == _digits(length)
                return Outcome(status, seconds, None if is_right else f"a 200 with {text!r}")
            retry_after = stream.headers.get("retry-after", "")
    except OSError as error:
        return Outcome(0, time.monotonic() - began, f"no answer: {error!r}")
    if status not in (429, 503):
        return Outcome(status, seconds, f"status {status}")
    return Outcome(status, seconds, None if retry_after.isdigit() and int(retry_after) >= 1 else "no Retry-After")


def _digits(prompt_tokens: int) -> bytes:
    """Return what the mock answers: each id is the last digit of its position."""
    return "".join(str((prompt_tokens + index) % 10) for index in range(NUM_TOKENS)).encode()


@contextlib.contextmanager
def _watched_queue(context: Context, service: Service) -> Iterator[list[float]]:
    """Look at the queue's length until the block ends; more than its places is a failed check.

    Yields how many seconds each look took: what any answer takes on this machine meanwhile.
    """
    over = threading.Event()
    seen: list[int] = []
    looks: list[float] = []

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            began = time.monotonic()
            seen.append(int(service.rows()["num_waiting"]))
            looks.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch, name="queue-watcher")
    watcher.start()
    try:
        yield looks
    finally:
        over.set()
        watcher.join()
    context.count("queue", None if seen and max(seen) == NUM_PLACES else f"{max(seen, default=0)} waited at most")


def _check_token_bound(context: Context, service: Service) -> None:
    """Let long prompts wait: as many as the bound on tokens has room for, though there are places for more."""
    wait_for(lambda: not service.num_rows_in_use(), DRAIN_SECONDS, "free rows")
    own = bearer()
    with contextlib.ExitStack() as streams:
        busy = {"text": "x", "max_tokens": 2000}
        running = [RawStream(service.proxy_port or 0, "/inference/mock", busy, own) for _ in range(NUM_ROWS)]
        for stream in running:
            streams.enter_context(stream).read_chunk()
        length = QUEUE_TOKENS // 4
        long = {"text": "x" * length, "max_tokens": 1}
        for _ in range(NUM_PLACES):
            streams.enter_context(RawStream(service.proxy_port or 0, "/inference/mock", long, own))
        fault = None
        try:
            wait_for(lambda: service.rows()["num_waiting"] == 4, 2.0, "four long prompts in the queue")
        except AssertionError as error:
            fault = f"{error}; {service.rows()['num_waiting']} wait"
        context.count("queue of long prompts", fault)


def _judge(context: Context, outcomes: list[Outcome], looks: list[float]) -> dict[str, int]:
    answered = [outcome for outcome in outcomes if outcome.status == 200]
    refused = sorted(outcome.seconds for outcome in outcomes if outcome.status in (429, 503))
    for outcome in outcomes:
        context.count("request", outcome.fault)
    lost = len(outcomes) - len(answered) - len(refused)
    context.count("answered and refused are all", f"{lost} are neither" if lost else None)
    context.count("some of each", None if answered and refused else f"{len(answered)} answered, {len(refused)} refused")
    worst = _quantile(refused, 0.99)
    is_fast = worst <= max(MAX_REFUSAL_SECONDS, MAX_SLOWER_THAN_A_LOOK * _quantile(sorted(looks), 0.99))
    context.count("refusals are fast", None if is_fast else f"{worst:.3f} s at the 99th percentile")
    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "refused": len(refused),
        "refusal_p50_ms": round(1000 * _quantile(refused, 0.5)),
        "refusal_p99_ms": round(1000 * worst),
    }


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
