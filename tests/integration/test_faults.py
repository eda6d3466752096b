"""Check on the running service that a dead, hung or failing backend ends streams visibly and comes back by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, in_parallel, new_request_id, running_service, wait_for

END_SECONDS = 2.0
RECOVERY_SECONDS = 5.0
WATCHDOG_SECONDS = 2.0
LONG = {"text": "x", "max_tokens": 2000}
FAULTS = "nan:Q1234,error:BROKEN,crash:CRASH,hang:HANG"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service whose backend may be killed: it makes 50 tokens a second and has scripted faults."""
    with running_service(
        **SLOW_START,
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="50",
        INFERENCE_API_MOCK_FAULTS=FAULTS,
        INFERENCE_API_WATCHDOG_SECONDS=str(WATCHDOG_SECONDS),
    ) as running:
        yield running


@pytest.fixture
def streams(service: Service) -> Iterator[tuple[RawStream, RawStream]]:
    """A raw and a chat stream that decode on a healthy backend."""
    wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "health")
    with (
        RawStream(service.port, "/inference/mock", LONG) as raw,
        RawStream(service.port, "/chat/mock", LONG) as chat,
    ):
        assert raw.read_chunk() and chat.read_chunk()
        yield raw, chat


def assert_cut(raw: RawStream, chat: RawStream, within_seconds: float) -> None:
    """Read both streams to their ends, and check that each says that it is not whole, in time."""
    began = time.monotonic()
    raw.read_all()
    last_event = chat.read_all().decode().strip().split("\n\n")[-1]
    assert time.monotonic() - began < within_seconds
    assert not raw.whole
    error = json.loads(last_event.removeprefix("event: error\ndata: "))
    assert (error["status_code"], error["code"], error["retryable"]) == (503, "backend_lost", True)


def test_kill_of_the_backend_ends_streams_visibly_and_a_new_one_serves(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    incarnation, killed = service.get("/info").json()["incarnation"], service.backend_pid
    os.kill(killed, signal.SIGKILL)
    killed_at = time.monotonic()
    assert_cut(*streams, END_SECONDS)
    statuses: list[int] = []
    while not statuses or statuses[-1] != 200:
        statuses.append(service.get("/health").status_code)
        assert time.monotonic() - killed_at < RECOVERY_SECONDS
    assert set(statuses) == {503, 200}
    assert service.get("/health/live").status_code == 200
    assert service.ask("/inference/mock", {"text": "x", "max_tokens": 3}) == "123"
    assert service.get("/info").json()["incarnation"] != incarnation
    assert service.backend_pid != killed
    assert service.metric("inference_api_foreign_tokens_total") == 0


def test_a_client_that_keeps_a_cut_connection_open_stops_nobody_else(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    os.kill(service.backend_pid, signal.SIGKILL)
    raw, _ = streams
    raw.read_all()
    assert not raw.whole
    for _ in range(10):
        began = time.monotonic()
        assert service.get("/health/live").status_code == 200
        assert time.monotonic() - began < 0.5


def test_requests_while_there_is_no_backend_are_refused_and_not_parked(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    os.kill(service.backend_pid, signal.SIGKILL)
    streams[0].read_all()
    began = time.monotonic()
    refused = service.post("/inference/mock", LONG)
    assert time.monotonic() - began < 0.25
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1


def test_a_stopped_backend_is_soon_not_ready_and_is_replaced(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    stopped = service.backend_pid
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    ready = service.get("/health/ready")
    assert ready.status_code == 503
    assert time.monotonic() - began < 2.0
    assert_cut(*streams, WATCHDOG_SECONDS + END_SECONDS)
    wait_for(lambda: service.get("/health/ready").status_code == 200, RECOVERY_SECONDS, "a new backend")
    assert service.backend_pid != stopped


def test_a_pause_of_all_processes_costs_no_backend_and_no_stream(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    backend, others = service.backend_pid, set(service.pids()) - {service.process.pid}
    for pid in (service.process.pid, *others):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(WATCHDOG_SECONDS + 2.0)
    os.kill(service.process.pid, signal.SIGCONT)
    time.sleep(0.3)
    for pid in others:
        os.kill(pid, signal.SIGCONT)
    for stream in streams:
        for _ in range(60):
            assert stream.read_chunk()
    assert service.backend_pid == backend


@pytest.mark.parametrize("fault", ["CRASH", "HANG"])
def test_a_prompt_that_crashes_or_hangs_the_engine_takes_the_backend_down_and_no_more(
    service: Service, streams: tuple[RawStream, RawStream], fault: str
) -> None:
    streams[1].close()
    with RawStream(service.port, "/inference/mock", {"text": fault, "max_tokens": 5}) as culprit:
        # A whole step crashes or hangs, so that no first token left and the status is still free.
        assert culprit.status == 503
        culprit.read_all()
        assert culprit.chunks[0].at - culprit.sent_at < WATCHDOG_SECONDS + END_SECONDS
    streams[0].read_all()
    assert not streams[0].whole
    wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "a new backend")
    assert service.ask("/inference/mock", {"text": "x", "max_tokens": 3}) == "123"


def test_a_row_that_fails_in_mid_stream_is_cut_and_its_neighbour_goes_on(
    service: Service, streams: tuple[RawStream, RawStream]
) -> None:
    incarnation = service.get("/info").json()["incarnation"]
    neighbour, chat = streams
    chat.close()
    request_id = new_request_id()
    with RawStream(service.port, "/inference/mock", {"text": "Q", "max_tokens": 9}, {"Request-Id": request_id}) as bad:
        assert bad.read_all() == b"1234"
        assert not bad.whole
    assert service.view(request_id)["error"]["code"] == "generation_failed"
    assert all(neighbour.read_chunk() for _ in range(5))
    assert service.get("/info").json()["incarnation"] == incarnation


def test_a_row_that_fails_in_mid_stream_is_a_status_where_the_answer_is_whole_or_nothing(service: Service) -> None:
    wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "health")
    with RawStream(service.port, "/inference/mock", {"text": "Q", "max_tokens": 9}, version="HTTP/1.0") as bad:
        assert bad.status == 500
        assert json.loads(bad.read_all())["message"] == "The model's logits are not finite."


def test_a_row_that_fails_on_its_first_token_is_a_500_with_a_text(service: Service) -> None:
    wait_for(lambda: service.get("/health").status_code == 200, RECOVERY_SECONDS, "health")
    failed = service.post("/inference/mock", {"text": "BROKEN", "max_tokens": 9})
    assert (failed.status_code, failed.json()["message"]) == (500, "Sampling failed.")


def test_a_failed_row_leaves_31_neighbours_byte_identical_to_an_undisturbed_run() -> None:
    settings: dict[str, Any] = {
        "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "6400",
        "INFERENCE_API_MOCK_FAULTS": "nan:BROKEN",
    }
    with running_service(INFERENCE_API_MOCK_MODE="noise", **settings) as service, contextlib.ExitStack() as stack:

        def run_neighbours() -> list[RawStream]:
            bodies = [{"text": "n" * (1 + seed), "max_tokens": 60, "seed": seed} for seed in range(31)]
            return [stack.enter_context(RawStream(service.port, "/inference/mock", body)) for body in bodies]

        undisturbed = [stream.read_all() for stream in run_neighbours()]
        neighbours = run_neighbours()
        assert all(stream.read_chunk() for stream in neighbours)
        for _ in range(3):
            assert service.post("/inference/mock", {"text": "BROKEN"}).status_code == 500
        disturbed = in_parallel([stream.read_all for stream in neighbours])
        assert all(stream.whole for stream in neighbours)
        assert disturbed == undisturbed
        assert len(set(undisturbed)) == 31
        assert service.metric('inference_api_finished_total{reason="error"}') == 3


def test_health_tells_the_operator_when_the_backend_cannot_be_restarted() -> None:
    with running_service(**SLOW_START) as service:
        served = service.backend_pid
        os.kill(served, signal.SIGKILL)
        killed = {served}

        def kill_next() -> bool:
            for pid in set(service.pids_of("inference_api.backend.main")) - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            return service.get("/health").status_code == 500

        wait_for(kill_next, 15.0, "health 500")
        assert service.get("/health").text == "Keep alive prompts failed five times. Service unhealthy."
        assert service.get("/health/live").status_code == 200
        wait_for(lambda: service.get("/health").status_code == 200, 15.0, "recovery")
        assert service.ask("/inference/mock", {"text": "x", "max_tokens": 3}) == "123"
