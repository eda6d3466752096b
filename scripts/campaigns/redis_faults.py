"""Take Redis away from proxies that count together, in several ways, while calls go on: the part `redis`.

Two proxies share a limit that their clients ask for many times over. Redis is killed, stopped, replaced by something
that answers wrongly, or by something that answers after 2 s; then it comes back, empty if it was ended. Checked of each
fault: how many calls passed in any window, how long the slowest call took, that bearers are still told apart, and that
the proxies go back to Redis. Needs the program redis-server; the seed draws the order and the moments.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import requests

from campaigns.part import Context
from tests.integration.echo_upstream import EchoUpstream
from tests.integration.proxy_process import ProxyProcess, bearer
from tests.redis_server import RedisServer, answering, running_redis

LIMIT = 20
WINDOW_SECONDS = 3
MOST_PASSED = 1.2
MEDIAN_SECONDS = 0.15
SLOWEST_SECONDS = 1.5
"""50 ms for Redis, the rest for a machine that does other things as well: without the bound it would be 2 or 10 s."""

RETURN_SECONDS = 6.0
STALL_SECONDS = 10.0
FAULT_SECONDS = 3.0
NUM_GROUPS = 2
_PACE_SECONDS = 0.03
# A client sees a call pass a little before or after the proxy does.
_CLOCK_SECONDS = 0.3
_RIGHT_ANSWER = b"*4\r\n:1\r\n:999000000\r\n:1\r\n:1\r\n"


@dataclasses.dataclass(slots=True)
class Calls:
    """What calls came to: when one passed, and how long each took."""

    passed: list[float] = dataclasses.field(default_factory=list)
    took_seconds: list[float] = dataclasses.field(default_factory=list)
    num_refused: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def most_in_a_window(self) -> int:
        """Return the largest number of calls that passed within one window."""
        times, length = sorted(self.passed), WINDOW_SECONDS - _CLOCK_SECONDS
        return max((sum(0 <= later - first < length for later in times) for first in times), default=0)


def run(context: Context) -> dict[str, int]:
    """Make all faults; return how many there were, and how many calls passed and were refused meanwhile."""
    totals = {"faults": 0, "passed": 0, "refused": 0}
    if shutil.which("redis-server") is None:
        context.count_not_run("redis", "redis-server is not installed")
        return totals
    rng = context.random
    kinds = list(itertools.islice(itertools.cycle(FAULTS), context.counts["faults"]))
    groups = [(kinds[index::NUM_GROUPS], random.Random(rng.random())) for index in range(min(NUM_GROUPS, len(kinds)))]
    with concurrent.futures.ThreadPoolExecutor(NUM_GROUPS) as pool:
        for results in pool.map(lambda group: _run_group(context, *group), groups):
            for calls in results:
                totals["faults"] += 1
                totals["passed"] += len(calls.passed)
                totals["refused"] += calls.num_refused
    return totals


def _run_group(context: Context, kinds: Sequence[str], rng: random.Random) -> list[Calls]:
    with (
        tempfile.TemporaryDirectory(prefix="redis-faults-") as folder,
        EchoUpstream() as upstream,
        running_redis() as redis,
    ):
        file = Path(folder) / "tenants.json"
        window = {"count": LIMIT, "seconds": WINDOW_SECONDS}
        file.write_text(json.dumps({"tenants": {"team-a": {"requests": [window]}}}))
        start = functools.partial(
            ProxyProcess, upstream.port, PROXY_TENANTS_FILE=str(file), REDIS_URL=redis.url, PROXY_REPLICAS="2"
        )
        with start() as first, start() as second:
            for proxy in (first, second):
                # It listens before its worker has loaded everything.
                requests.get(f"http://127.0.0.1:{proxy.port}/health", timeout=60)
            return [make_fault(context, kind, redis, (first, second), rng) for kind in kinds]


def make_fault(
    context: Context, kind: str, redis: RedisServer, proxies: Sequence[ProxyProcess], rng: random.Random
) -> Calls:
    """Make one fault while calls go on, and count the checks of it."""
    lines = [len(proxy.lines) for proxy in proxies]
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(len(proxies)) as pool:
        running = [pool.submit(_call, proxy, stop) for proxy in proxies]
        try:
            time.sleep(rng.uniform(0.5, 1.5))
            with FAULTS[kind](redis):
                still_known = _bearers_are_told_apart(proxies)
                time.sleep(STALL_SECONDS if kind == "stalled" else FAULT_SECONDS)
            returned = _wait_for_return(proxies, lines)
            time.sleep(rng.uniform(0.2, 0.8))
        finally:
            stop.set()
        seen = [future.result() for future in running]
    calls = Calls(
        passed=[moment for each in seen for moment in each.passed],
        took_seconds=[seconds for each in seen for seconds in each.took_seconds],
        num_refused=sum(each.num_refused for each in seen),
        faults=[fault for each in seen for fault in each.faults],
    )
    _check(context, kind, calls)
    context.count(f"{kind}: bearers", None if still_known else "bearers were not told apart")
    context.count(f"{kind}: return", None if returned else f"not back within {RETURN_SECONDS} s, or not told once")
    return calls


def _check(context: Context, kind: str, calls: Calls) -> None:
    most, median = calls.most_in_a_window(), statistics.median(calls.took_seconds)
    slowest = max(calls.took_seconds)
    context.log(
        f"{kind}: at most {most} of {LIMIT} in a window; {len(calls.took_seconds)} calls, median"
        f" {median * 1000:.0f} ms, slowest {slowest * 1000:.0f} ms"
    )
    context.count(f"{kind}: answers", calls.faults[0] if calls.faults else None)
    context.count(f"{kind}: limit", None if most <= LIMIT * MOST_PASSED else f"{most} passed, the limit is {LIMIT}")
    context.count(f"{kind}: something passes", None if most >= LIMIT * 0.1 else f"{most} passed")
    is_slow = slowest > SLOWEST_SECONDS or median > MEDIAN_SECONDS
    context.count(f"{kind}: delay", f"median {median:.3f} s, slowest {slowest:.3f} s" if is_slow else None)


def _call(proxy: ProxyProcess, stop: threading.Event) -> Calls:
    calls = Calls()
    with requests.Session() as session:
        session.trust_env = False
        session.headers["Authorization"] = f"Bearer {bearer()}"
        while not stop.wait(_PACE_SECONDS):
            began = time.monotonic()
            try:
                status = session.get(f"http://127.0.0.1:{proxy.port}/rows", timeout=10).status_code
            except requests.RequestException as fault:
                calls.faults.append(type(fault).__name__)
                continue
            ended = time.monotonic()
            calls.took_seconds.append(ended - began)
            if status == 200:
                calls.passed.append(ended)
            elif status == 429:
                calls.num_refused += 1
            else:
                calls.faults.append(f"status {status}")
    return calls


def _bearers_are_told_apart(proxies: Sequence[ProxyProcess]) -> bool:
    statuses = []
    for proxy in proxies:
        for jwt in (bearer(team_id="team-b"), bearer(team_id="team-b") + "x", bearer(exp=1)):
            headers = {"Authorization": f"Bearer {jwt}"}
            answer = requests.get(f"http://127.0.0.1:{proxy.port}/rows", headers=headers, timeout=10)
            statuses.append(answer.status_code)
    return statuses == [200, 401, 401] * len(proxies)


def _wait_for_return(proxies: Sequence[ProxyProcess], num_lines_before: Sequence[int]) -> bool:
    """Wait until each proxy says that Redis is back; say whether each told of every change once, in turn."""
    deadline = time.monotonic() + RETURN_SECONDS
    for proxy, before in zip(proxies, num_lines_before, strict=True):
        while not (told := _told_changes(proxy.lines[before:])) or told[-1] != "back":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        # A machine that is busy for longer than Redis' budget may make more than one outage of it.
        if told != ["gone", "back"] * (len(told) // 2):
            return False
    return True


def _told_changes(lines: Sequence[str]) -> list[str]:
    return ["back" if "Redis answers again" in line else "gone" for line in lines if "Redis" in line]


@contextlib.contextmanager
def _killed(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    yield
    redis.start()


@contextlib.contextmanager
def _stalled(redis: RedisServer) -> Iterator[None]:
    redis.signal(signal.SIGSTOP)
    yield
    redis.signal(signal.SIGCONT)


@contextlib.contextmanager
def _wrong(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    with answering(b"+OK\r\n", redis.port):
        yield
    redis.start()


@contextlib.contextmanager
def _slow(redis: RedisServer) -> Iterator[None]:
    redis.kill()
    with answering(_RIGHT_ANSWER, redis.port, delay_seconds=2.0):
        yield
    redis.start()


FAULTS: dict[str, Callable[[RedisServer], contextlib.AbstractContextManager[None]]] = {
    "killed": _killed,
    "stalled": _stalled,
    "wrong": _wrong,
    "slow": _slow,
}
