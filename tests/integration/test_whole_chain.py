"""Check on the whole chain, proxy, server and backend, what no part can show alone: ends, refusals and tenants."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, bearer, in_parallel, running_service, wait_for

STEP_SECONDS = 0.1
NOTICE_SECONDS = 0.25
LONG = {"text": "x", "max_tokens": 2000}
LEAVE_WAYS = pytest.mark.parametrize(
    "leave", [RawStream.close, RawStream.reset, RawStream.half_close], ids=lambda way: way.__name__
)
Leave = Callable[[RawStream], None]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows and a queue of two that makes 20 tokens a second, closed to callers without the proxy."""
    with running_service(
        proxy=True,
        INFERENCE_API_INSECURE_DEV="0",
        INFERENCE_API_ROWS="2",
        INFERENCE_API_QUEUE_REQUESTS="2",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="1",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20",
    ) as running:
        yield running


@pytest.fixture
def streams(service: Service) -> Iterator[contextlib.ExitStack]:
    """A stack that closes a test's streams, and waits until their rows are free."""
    with contextlib.ExitStack() as stack:
        yield stack
    wait_for(lambda: rows(service)["num_rows_in_use"] == 0, 3.0, "free rows")


def rows(service: Service, tenant: str = "alpha") -> dict[str, Any]:
    """Return what /rows says to a tenant, through the proxy."""
    answer: dict[str, Any] = requests.get(service.proxy_url + "/rows", headers=bearer(tenant), timeout=10).json()
    return answer


def start(service: Service, streams: contextlib.ExitStack, body: object, tenant: str = "alpha") -> RawStream:
    """Send a request through the proxy."""
    return streams.enter_context(RawStream(service.proxy_port or 0, "/inference/mock", body, bearer(tenant)))


def in_use(service: Service) -> tuple[int, int]:
    """Return rows in use and requests waiting."""
    answer = rows(service)
    return answer["num_rows_in_use"], answer["num_waiting"]


@LEAVE_WAYS
def test_a_client_that_leaves_the_proxy_while_its_row_decodes_frees_it(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    stream = start(service, streams, LONG)
    assert stream.read_chunk()
    leave(stream)
    wait_for(lambda: in_use(service) == (0, 0), NOTICE_SECONDS + 3 * STEP_SECONDS, "a free row")


@LEAVE_WAYS
def test_a_client_that_leaves_the_proxy_during_prefill_frees_its_row(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    decoding = start(service, streams, LONG)
    assert decoding.read_chunk()
    prefilling = start(service, streams, {"text": "x" * 1500, "max_tokens": 1})
    wait_for(lambda: in_use(service) == (2, 0), 2.0, "prefill")
    leave(prefilling)
    wait_for(lambda: in_use(service) == (1, 0), NOTICE_SECONDS + 3 * STEP_SECONDS, "a free row")


@LEAVE_WAYS
def test_a_client_that_leaves_the_proxy_while_it_waits_leaves_the_queue(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    running = [start(service, streams, LONG) for _ in range(2)]
    assert all(stream.read_chunk() for stream in running)
    waiting = start(service, streams, LONG)
    wait_for(lambda: in_use(service) == (2, 1), 2.0, "a request in the queue")
    leave(waiting)
    wait_for(lambda: in_use(service) == (2, 0), NOTICE_SECONDS + 3 * STEP_SECONDS, "an empty queue")


def test_a_full_queue_is_a_503_with_retry_after_through_the_proxy(
    service: Service, streams: contextlib.ExitStack
) -> None:
    for _ in range(4):
        start(service, streams, LONG)
    wait_for(lambda: in_use(service) == (2, 2), 3.0, "full rows and a full queue")
    refused = requests.post(service.proxy_url + "/inference/mock", json=LONG, headers=bearer(), timeout=10)
    assert refused.status_code == 503
    assert refused.json() == {"status_code": 503, "message": "Service overloaded, try again later."}
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_tenant_sees_its_own_row_and_that_another_is_taken(service: Service, streams: contextlib.ExitStack) -> None:
    stream = start(service, streams, LONG, "alpha")
    assert stream.read_chunk()
    own = [row for row in rows(service, "alpha")["rows"] if row["state"] == "decoding"]
    assert [row["request_id"] for row in own] == [stream.headers["request-id"]]
    foreign = [row for row in rows(service, "beta")["rows"] if row["state"] != "free"]
    assert [(row["state"], row["tenant"], row["request_id"]) for row in foreign] == [("other", "", "")]
    path = f"{service.proxy_url}/v1/requests/{stream.headers['request-id']}"
    assert requests.get(path, headers=bearer("alpha"), timeout=10).json()["state"] == "decoding"
    foreign_answer = requests.get(path, headers=bearer("beta"), timeout=10)
    unknown = requests.get(service.proxy_url + "/v1/requests/req_0", headers=bearer("beta"), timeout=10)
    assert (foreign_answer.status_code, unknown.status_code) == (404, 404)
    assert requests.delete(path, headers=bearer("beta"), timeout=10).status_code == 404
    assert stream.read_chunk(), "nobody else's DELETE ends a stream"


def test_delete_through_the_proxy_cuts_the_stream_visibly(service: Service, streams: contextlib.ExitStack) -> None:
    stream = start(service, streams, LONG)
    assert stream.read_chunk()
    path = f"{service.proxy_url}/v1/requests/{stream.headers['request-id']}"
    assert requests.delete(path, headers=bearer(), timeout=10).status_code == 202
    while stream.read_chunk() is not None:
        continue
    assert not stream.whole


def test_the_callers_own_id_comes_back_beside_the_public_one(service: Service) -> None:
    answer = requests.post(
        service.proxy_url + "/inference/mock",
        json={"text": "x", "max_tokens": 1, "session_id": "my chat"},
        headers={**bearer(), "X-Request-Id": "mine-7"},
        timeout=10,
    )
    assert answer.headers["X-Request-Id"] == "mine-7"
    assert answer.headers["Request-Id"].startswith("req_")
    assert answer.headers["X-Client-Session-Id"] == "my chat"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{", 400, "Malformed JSON request body."),
        (b'{"text": "x", "top_k": 0}', 400, "Parameter: top_k=0 is outside bounds, 1 <= top_k <= 1000."),
        (b'{"text": "' + b"x" * 3000 + b'"}', 400, "3000 tokens long and the context is 2048"),
        (b'{"text": "' + b"x" * 300_000 + b'"}', 413, "262144"),
    ],
)
def test_bad_input_gets_its_text_through_the_proxy(service: Service, body: bytes, status: int, text: str) -> None:
    headers = {**bearer(), "Content-Type": "application/json"}
    answer = requests.post(service.proxy_url + "/inference/mock", data=body, headers=headers, timeout=10)
    assert answer.status_code == status
    assert text in answer.json()["message"]
    assert answer.json()["status_code"] == status


def test_metrics_need_their_scope_through_the_proxy(service: Service) -> None:
    assert requests.get(service.proxy_url + "/metrics", headers=bearer(), timeout=10).status_code == 403
    answer = requests.get(service.proxy_url + "/metrics", headers=bearer(scope="metrics"), timeout=10)
    assert "inference_api_foreign_tokens_total 0.0" in answer.text


def test_a_killed_backend_breaks_the_stream_through_the_proxy_and_the_next_request_is_served() -> None:
    with running_service(proxy=True, INFERENCE_API_MOCK_TOKENS_PER_SECOND="20") as service:
        with RawStream(service.proxy_port or 0, "/inference/mock", LONG, bearer()) as stream:
            assert stream.read_chunk()
            os.kill(service.backend_pid, signal.SIGKILL)
            while stream.read_chunk() is not None:
                continue
            assert not stream.whole
        health = service.proxy_url + "/health"
        wait_for(lambda: requests.get(health, timeout=5).status_code == 200, 5.0, "a new backend")
        answer = requests.post(
            service.proxy_url + "/inference/mock", json={"text": "x", "max_tokens": 3}, headers=bearer(), timeout=10
        )
        assert answer.text == "123"


def test_a_killed_proxy_frees_its_rows_and_is_started_again() -> None:
    with running_service(proxy=True, INFERENCE_API_MOCK_TOKENS_PER_SECOND="20") as service:
        with RawStream(service.proxy_port or 0, "/inference/mock", LONG, bearer()) as stream:
            assert stream.read_chunk()
            for pid in service.pids_of("proxy.proxy"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_for(lambda: service.num_rows_in_use() == 0, 1.0, "a free row")

        def answers() -> bool:
            try:
                return requests.get(service.proxy_url + "/health", timeout=5).status_code == 200
            except requests.ConnectionError:
                return False

        wait_for(answers, 5.0, "a new proxy")


def test_sigterm_lets_streams_end_whole_through_the_proxy() -> None:
    settings: dict[str, Any] = {**SLOW_START, "INFERENCE_API_ROWS": "8"}
    with running_service(proxy=True, INFERENCE_API_MOCK_TOKENS_PER_SECOND="80", **settings) as service:
        num_streams = 8
        all_running = threading.Barrier(num_streams, lambda: service.process.send_signal(signal.SIGTERM))

        def run() -> bytes:
            body = {"text": "x", "max_tokens": 20}
            with RawStream(service.proxy_port or 0, "/inference/mock", body, bearer()) as stream:
                assert stream.read_chunk()
                all_running.wait(30)
                text = stream.read_all()
                assert stream.whole
                return text

        assert in_parallel([run] * num_streams) == [b"1234567890" * 2] * num_streams
        assert service.process.wait(15) == 0
