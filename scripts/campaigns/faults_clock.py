"""Turn the wall clock under a running service: the part `faults_clock`.

An hour and a day, back and forth, and to 1970, in the middle of streams. Streams go on at their pace, nobody takes the
service for hung, bearers are judged by the clock as it is now, and a tenant's window opens when its seconds have
passed, whatever the clock says. The clock is turned_clock.c, loaded into every process of the service: libfaketime
0.9.10 breaks Python's own waits, whether it fakes the monotonic clock or not. Without a compiler the part is not run.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import requests

from campaigns.faults_run import Run, is_ready
from campaigns.faults_streams import ECHO, Outcome, join_all, open_witnesses
from campaigns.part import CampaignError, Context
from tests.integration.service import SECRET, Service, bearer, running_service

SOURCE = Path(__file__).with_name("turned_clock.c")
HOUR, DAY = 3600, 86400
BEGINNING = 2 * DAY
"""Wall clock after the turn to 1970: late enough for bearers that had expired by then."""

NUM_STREAMS = 7
NUM_LETTERS = 60
TOKENS_PER_SECOND = "210"
"""Of the mock: thirty a second for each of the streams, which take two seconds and a little."""

STREAM_SECONDS = 8.0
OPEN_SECONDS = 10.0
LIFE_SECONDS = 600
LEEWAY_SECONDS = 60
"""The verifier's, on either side (docs/proxy.md)."""

WINDOW = {"count": 4, "seconds": 3}
"""Of the tenant whose window is looked at."""

WINDOW_TENANT = "windowed"
TIMEOUT_SECONDS = 10.0


class Clock:
    """The wall clock of a service: the true one and an offset, which holds for all its processes at once."""

    def __init__(self, folder: Path, library: Path) -> None:
        """Begin at the true time; `environ` is what a process that goes by this clock is started with."""
        self._file = folder / "offset"
        self._offset = 0
        self._file.write_bytes(struct.pack("=q", 0))
        self.environ = {"LD_PRELOAD": str(library), "TURNED_CLOCK_FILE": str(self._file)}

    def now(self) -> int:
        """Return what the service takes for the time."""
        return int(time.time()) + self._offset

    def turn(self, offset_seconds: int) -> None:
        """Turn the clock to the true time and an offset."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("=q", offset_seconds))
        self._offset = offset_seconds


def run(context: Context) -> dict[str, int]:
    """Turn the clock as often as the counts say; return how many streams ran meanwhile, and bearers were judged."""
    totals = {"turns": 0, "streams": 0, "bearers": 0}
    with tempfile.TemporaryDirectory(prefix="clock-") as folder:
        library = build_library(Path(folder))
        if library is None:
            context.count_not_run("turns of the clock", "there is no C compiler")
            return totals
        clock = Clock(Path(folder), library)
        tenants = Path(folder) / "tenants.json"
        tenants.write_text(json.dumps({"tenants": {WINDOW_TENANT: {"requests": [WINDOW]}}}))
        settings: dict[str, Any] = {**ECHO, **clock.environ, "PROXY_TENANTS_FILE": str(tenants)}
        with running_service(proxy=True, **settings, INFERENCE_API_MOCK_TOKENS_PER_SECOND=TOKENS_PER_SECOND) as service:
            this = Run(context, service, totals)
            pids = sorted(service.pids())
            for number, offset in zip(range(context.counts["turns"]), _offsets(this), strict=False):
                _turn(this, clock, offset, f"turn {number}, {offset:+d} s")
                totals["turns"] += 1
            is_same = sorted(service.pids()) == pids
            context.count("no process was replaced", None if is_same else "at least one was")
    return totals


def build_library(folder: Path) -> Path | None:
    """Compile what turns the clock, into `folder` (blocking); None without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "turned_clock.so"
    command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CampaignError(f"{SOURCE.name} does not compile: {done.stderr.strip()}")
    return library


def _offsets(run: Run) -> Iterator[int]:
    """Yield the turns in an order of the seed's, again and again; each is to the true clock and an offset."""
    rng = run.random("offsets")
    while True:
        offsets = [HOUR, -HOUR, DAY, -DAY, BEGINNING - int(time.time()), 0]
        rng.shuffle(offsets)
        yield from offsets


def _turn(run: Run, clock: Clock, offset: int, name: str) -> None:
    """Turn the clock in the middle of streams and of a full window, and look at both and at bearers."""
    began = time.monotonic()
    witnesses = open_witnesses(run.port, run.random(name), NUM_STREAMS, NUM_LETTERS, bearer())
    if not all(witness.wait_open(OPEN_SECONDS) for witness in witnesses):
        raise CampaignError(f"{name}: not every stream began within {OPEN_SECONDS:g} s")
    before = clock.now()
    statuses = [_status(run.service, bearer(WINDOW_TENANT)) for _ in range(WINDOW["count"] + 1)]
    full_at = time.monotonic()
    clock.turn(offset)
    run.context.count(f"{name}: the window is full", None if statuses[-1] == 429 else f"statuses {statuses}")
    for words, claims in _claims(before, clock.now()).items():
        header = {"Authorization": f"Bearer {jwt.encode({'team_id': 'alpha', **claims}, SECRET, 'HS256')}"}
        status, expected = _status(run.service, header), 200 if is_valid(claims, clock.now()) else 401
        run.context.count(f"{name}: a bearer {words}", None if status == expected else f"{status} for {expected}")
        run.totals["bearers"] += 1
    join_all(witnesses)
    for witness in witnesses:
        seconds = witness.ended_at - began
        fault = witness.fault() or (None if witness.outcome is Outcome.WHOLE else f"{witness.surface}: not whole")
        run.context.count(f"{name}: stream", fault or (f"{seconds:.1f} s" if seconds > STREAM_SECONDS else None))
    run.totals["streams"] += len(witnesses)
    time.sleep(max(0.0, full_at + WINDOW["seconds"] + 0.2 - time.monotonic()))
    status = _status(run.service, bearer(WINDOW_TENANT))
    run.context.count(f"{name}: the window opens in its time", None if status == 200 else f"status {status}")
    run.context.count(f"{name}: ready", None if is_ready(run.service) else "it is not")
    run.context.log(f"{name}: done")


def _claims(before: int, now: int) -> dict[str, dict[str, int]]:
    """Return claims of bearers that were made before the clock was turned, now, and long ago."""
    return {
        "of before": {"iat": before, "nbf": before, "exp": before + LIFE_SECONDS},
        "of now": {"iat": now, "nbf": now, "exp": now + LIFE_SECONDS},
        "that has expired": {"iat": now - 2 * LIFE_SECONDS, "exp": now - LIFE_SECONDS},
        "of tomorrow": {"iat": now + DAY, "nbf": now + DAY, "exp": now + DAY + LIFE_SECONDS},
    }


def is_valid(claims: dict[str, int], now: int) -> bool:
    """Tell what a bearer is by the clock alone."""
    begins = max(claims["iat"], claims.get("nbf", 0))
    return begins <= now + LEEWAY_SECONDS and claims["exp"] > now - LEEWAY_SECONDS


def _status(service: Service, headers: dict[str, str]) -> int:
    """GET /info through the proxy; return the status, or 0 if there was no answer in time."""
    try:
        return requests.get(f"{service.proxy_url}/info", headers=headers, timeout=TIMEOUT_SECONDS).status_code
    except requests.RequestException:
        return 0
