"""Look for what callers said in everything that the service writes or shows to others: the part `canary`.

Thousands of requests on all surfaces, good, bad, failing and left early, each with a canary of its own in every text;
once as an operator runs it, once with every debug switch on. Then no trace of any may be in a log, a metric, a view, a
traceback or a file of the run folder and the cache. The seed draws the requests. Texts go to no file of ours.
"""

from __future__ import annotations

import base64
import concurrent.futures
import http.client
import itertools
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from campaigns.canary_requests import FAULTS, PREFIX, CanaryRequest, make_crash, make_request
from campaigns.part import Context
from tests.integration.service import SECRET, Service, bearer, running_service, wait_for

NUM_CLIENTS = 24
TIMEOUT_SECONDS = 60.0
READY_SECONDS = 20.0
ALLOWED_FAULTS = (429, 502, 503, 504)
NUM_VIEWS = 50
SHOWN = ("/metrics", "/rows", "/slots", "/info", "/props", "/health", "/v1/models")

PLAIN: Mapping[str, Any] = {"INFERENCE_API_LOG_LEVEL": "info"}
DEBUGGED: Mapping[str, Any] = {
    "INFERENCE_API_LOG_LEVEL": "debug",
    "INFERENCE_API_LOG_FORMAT": "json",
    "LOG_FORMAT": "json",
    "FRONTEND_DEBUG_MODE": "1",
    "BACKEND_DEBUG_MODE": "1",
}


def run(context: Context) -> dict[str, int]:
    """Send the requests to both kinds of service and search; return how many were sent and how much was searched."""
    totals: Counter[str] = Counter()
    half, rng = context.counts["requests"] // 2, context.random
    for index, (name, settings) in enumerate({"plain": PLAIN, "debugged": DEBUGGED}.items()):
        numbers = range(index * half, (index + 1) * half)
        with running_service(
            proxy=True,
            INFERENCE_API_MOCK_MODE="echo",
            INFERENCE_API_MOCK_FAULTS=FAULTS,
            **settings,
        ) as service:
            requests = [make_request(number, rng, SECRET) for number in numbers]
            statuses, ids = _send_all(context, service, requests)
            _crash(context, service, numbers.stop)
            texts = {**shown_texts(service, ids), **written_texts(service)}
        _judge(context, name, statuses, texts)
        totals.update(requests=sum(statuses.values()), good=statuses[200], kib=sum(map(len, texts.values())) >> 10)
    return dict(totals)


def traces_of(text: str) -> dict[str, bytes]:
    """Return the shapes that a text could be written in: as it is, as ids, as hexadecimal digits, as base64."""
    data = text.encode()
    shapes = {"text": data, "hex": data.hex().encode()}
    shapes |= {f"ids{mark!r}": mark.join(map(str, data)).encode() for mark in (",", ", ", " ")}
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + data)
        # The first characters also hold the bytes before, the last ones those after.
        shapes[f"base64 +{shift}"] = whole[(shift * 8 + 5) // 6 : (shift + len(data)) * 8 // 6]
    return shapes


def find_traces(written: bytes, secrets: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the name of each secret that stands in what was written, with the line, its own part left out."""
    lowered = written.lower()
    for name, secret in secrets.items():
        at = lowered.find(secret.lower())
        if at >= 0:
            line = written[written.rfind(b"\n", 0, at) + 1 : at]
            yield f"{name} after {line[-120:]!r}"


def secrets() -> dict[str, bytes]:
    """Return everything that nobody may write."""
    return {**traces_of(PREFIX), "the secret": SECRET.encode(), "a JWT": b"eyJ"}


def shown_texts(service: Service, request_ids: list[str]) -> dict[str, bytes]:
    """Return what the service shows, to an operator and to another tenant, and of single requests to their own one."""
    operator = bearer("operator", "metrics inference")
    connection = http.client.HTTPConnection("127.0.0.1", service.proxy_port or 0, timeout=TIMEOUT_SECONDS)
    paths = [*SHOWN, *(f"/v1/requests/{request_id}" for request_id in request_ids[:NUM_VIEWS])]
    texts = {}
    for path, (tenant, headers) in itertools.product(
        paths, {"operator": operator, "tenant-0": bearer("tenant-0")}.items()
    ):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        texts[f"{path} for {tenant}"] = str(answer.headers).encode() + answer.read()
    connection.close()
    return texts


def written_texts(service: Service) -> dict[str, bytes]:
    """Return the log, and every file in the folder of the service: the run folder, the cache, debug logs, stacks."""
    folder = service.run_dir.parent
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): _without_what_is_shown(path) for path in files}


def _without_what_is_shown(path: Path) -> bytes:
    """Return a file but for what is put there for the operator: the proxy's key, and the example's JWT of the start."""
    if path.name == "internal_auth_key":
        return b""
    return re.sub(rb"(?m)^  -H 'Authorization: Bearer [^']*'", b"", path.read_bytes())


def _send_all(context: Context, service: Service, requests: Iterable[CanaryRequest]) -> tuple[Counter[int], list[str]]:
    """Send the requests over NUM_CLIENTS connections (blocking); return their statuses and ids."""
    waiting = iter(requests)
    statuses: Counter[int] = Counter()
    ids: list[str] = []
    lock = threading.Lock()

    def be_client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", service.proxy_port or 0, timeout=TIMEOUT_SECONDS)
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                break
            status, request_id = _send(connection, request)
            with lock:
                statuses[status] += 1
                ids.append(request_id)
                if status >= 500 and status not in ALLOWED_FAULTS and not request.may_fail:
                    context.count(f"{request.path.partition('?')[0]}", f"status {status}")
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for done in [clients.submit(be_client) for _ in range(NUM_CLIENTS)]:
            done.result()
    return statuses, [request_id for request_id in ids if request_id]


def _send(connection: http.client.HTTPConnection, request: CanaryRequest) -> tuple[int, str]:
    """Send one request; return its status, 0 where its client left or the answer broke off, and its id."""
    try:
        connection.request("POST", request.path, request.body, dict(request.headers))
        if request.leaves:
            connection.close()
            return 0, ""
        answer = connection.getresponse()
        request_id = answer.headers.get("Request-Id", "")
        answer.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return 0, ""
    return answer.status, request_id


def _crash(context: Context, service: Service, number: int) -> None:
    """Let the backend crash on a canary, and wait until there is another."""
    crashed = service.backend_pid
    connection = http.client.HTTPConnection("127.0.0.1", service.proxy_port or 0, timeout=TIMEOUT_SECONDS)
    _send(connection, make_crash(number, SECRET))
    connection.close()
    wait_for(lambda: crashed not in service.pids() and service.is_healthy(), READY_SECONDS, "another backend")
    has_trace = "scripted crash" in service.log.read_text()
    context.count("the crash has its traceback", None if has_trace else "the log does not tell of it")


def _judge(context: Context, name: str, statuses: Counter[int], texts: Mapping[str, bytes]) -> None:
    for place, text in texts.items():
        found = list(find_traces(text, secrets()))
        context.count(f"{name}: {place}", "; ".join(found) if found else None)
    planted = b"INFO server: request text=" + make_request(0, context.random, SECRET).body
    context.count(f"{name}: a planted line is found", None if list(find_traces(planted, secrets())) else "it is not")
    num_good, num_all = statuses[200], sum(statuses.values())
    is_mixed = 0.3 * num_all < num_good < 0.9 * num_all and statuses[400] and statuses[401]
    context.count(f"{name}: a mixture", None if is_mixed else f"statuses {dict(statuses)}")
    context.log(f"{name}: statuses {dict(sorted(statuses.items()))}")
