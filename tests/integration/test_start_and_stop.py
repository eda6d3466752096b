"""Check how the service's processes start, fail to start and end: in time, with one line, and without orphans.

The supervisor is the outermost process here; a plain gunicorn with its configuration file is in test_plain_gunicorn.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.integration.raw_http import RawStream
from tests.integration.service import ROOT, SLOW_START, Service, free_port, running_command, running_service, wait_for

RATE: dict[str, Any] = {**SLOW_START, "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "40"}
STOP_SECONDS = 5.0
LONG = {"text": "x", "max_tokens": 2000}


def error_lines(service: Service) -> list[str]:
    """Return what the service told its operator as an error, and refuse any traceback beside it."""
    log = service.log.read_text()
    assert "Traceback" not in log, log
    return [line for line in log.splitlines() if line.startswith("ERROR")]


def test_a_taken_port_is_one_line_and_exit_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running_service(wait=False, INFERENCE_API_PORT=port) as service:
            assert service.process.wait(10) == 1
            (line,) = error_lines(service)
            assert "INFERENCE_API_PORT" in line and port in line


def test_a_taken_port_of_the_proxy_is_one_line_and_exit_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with running_service("--proxy-port", port, wait=False) as service:
            assert service.process.wait(10) == 1
            (line,) = error_lines(service)
            assert "PROXY_PORT" in line and port in line and line.endswith("take another port")


def test_one_port_for_the_server_and_the_proxy_is_one_line_that_names_both_settings() -> None:
    port = str(free_port())
    with running_service("--proxy-port", port, wait=False, INFERENCE_API_PORT=port) as service:
        assert service.process.wait(10) == 1
        (line,) = error_lines(service)
        assert "INFERENCE_API_PORT and PROXY_PORT" in line and port in line


def test_a_relative_cache_folder_counts_from_where_the_service_is_started(tmp_path: Path) -> None:
    with running_service(INFERENCE_API_CACHE_DIR=os.path.relpath(tmp_path / "cache", ROOT)) as service:
        assert service.ask("/inference/mock", {"text": "x", "max_tokens": 2}) == "12"
    assert (tmp_path / "cache").is_dir()


def test_a_second_service_in_the_same_run_folder_is_one_line_and_exit_status_1() -> None:
    with running_service() as first:
        run_dir = str(first.run_dir)
        with running_service(wait=False, INFERENCE_API_RUN_DIR=run_dir) as second:
            assert second.process.wait(10) == 1
            (line,) = error_lines(second)
            assert run_dir in line
        assert first.ask("/inference/mock", {"text": "x", "max_tokens": 2}) == "12"


def test_a_wrong_setting_is_one_line_and_exit_status_1() -> None:
    with running_service(wait=False, INFERENCE_API_ROWS="many") as service:
        assert service.process.wait(10) == 1
        assert error_lines(service) == ["ERROR: INFERENCE_API_ROWS='many' is not an integer."]


def test_a_backend_that_dies_three_times_before_it_is_ready_stops_the_service() -> None:
    # At this rate the engine's self-check takes 100 s, so that each backend is killed before it is ready.
    with running_service(wait=False, INFERENCE_API_MOCK_TOKENS_PER_SECOND="0.01") as service:
        killed: set[int] = set()
        for _ in range(3):
            wait_for(lambda: set(service.pids_of("inference_api.backend.main")) - killed, 10.0, "a backend")
            for pid in set(service.pids_of("inference_api.backend.main")) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert service.process.wait(10) == 1
        assert len(killed) == 3
        (line,) = error_lines(service)
        assert "died 3 times before it was ready" in line


def test_kill_of_the_supervisor_leaves_no_process_even_with_streams_open() -> None:
    with running_service(**RATE, proxy=True) as service:
        assert len(service.pids()) >= 5
        with RawStream(service.port, "/inference/mock", LONG) as stream:
            assert stream.read_chunk()
            service.leaves_run_dir = True
            os.kill(service.process.pid, signal.SIGKILL)
            service.process.wait(5)
            wait_for(lambda: not service.pids(), STOP_SECONDS, "end of every process")
            stream.read_all()
            assert not stream.whole


def test_sigterm_lets_streams_end_whole_and_refuses_new_ones() -> None:
    with running_service(**RATE) as service:
        body = {"text": "x", "max_tokens": 30}
        with contextlib.ExitStack() as stack:

            def start(body: object) -> RawStream:
                return stack.enter_context(RawStream(service.port, "/inference/mock", body))

            first, second = start(body), start(body)
            assert first.read_chunk() and second.read_chunk()
            queued = start({"text": "x", "max_tokens": 10})
            wait_for(lambda: service.rows()["num_waiting"] == 1, 2.0, "a request in the queue")
            service.process.send_signal(signal.SIGTERM)
            wait_for(lambda: service.get("/health").status_code == 503, 1.0, "health to say so")
            assert service.get("/health/live").status_code == 200
            refused = service.post("/inference/mock", body)
            assert (refused.status_code, refused.headers["X-Error-Code"]) == (503, "draining")
            for stream, length in ((first, 30), (second, 30), (queued, 10)):
                assert len(stream.read_all()) == length
                assert stream.whole
        assert service.process.wait(STOP_SECONDS) == 0


def test_sigterm_cuts_visibly_what_outlasts_the_grace() -> None:
    with (
        running_service(**RATE, INFERENCE_API_GRACE_SECONDS="0.5") as service,
        RawStream(service.port, "/inference/mock", LONG) as stream,
    ):
        assert stream.read_chunk()
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        stream.read_all()
        assert not stream.whole
        assert 0.4 < time.monotonic() - began < 2.0
        assert service.process.wait(STOP_SECONDS) == 0


@pytest.mark.parametrize("with_proxy", [False, True])
def test_sigint_ends_everything_in_time_with_streams_open(with_proxy: bool) -> None:
    with running_service(**RATE, proxy=with_proxy) as service, contextlib.ExitStack() as stack:
        raw = stack.enter_context(RawStream(service.port, "/inference/mock", LONG))
        chat = stack.enter_context(RawStream(service.port, "/chat/mock", LONG))
        assert raw.read_chunk() and chat.read_chunk()
        queued = stack.enter_context(RawStream(service.port, "/inference/mock", LONG))
        wait_for(lambda: service.rows()["num_waiting"] == 1, 5.0, "a request in the queue")
        began = time.monotonic()
        service.process.send_signal(signal.SIGINT)
        raw.read_all()
        assert not raw.whole
        assert b"event: error" in chat.read_all()
        assert queued.status == 503
        assert service.process.wait(STOP_SECONDS) == 0
        assert time.monotonic() - began < STOP_SECONDS


def test_a_connection_that_is_kept_open_has_nothing_killed_at_the_end() -> None:
    with running_service() as service, requests.Session() as browser:
        assert browser.get(f"{service.url}/health/live", timeout=10).status_code == 200
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(STOP_SECONDS) == 0
        assert "killed" not in service.log.read_text()


def test_the_mock_entry_run_as_a_file_starts_streams_and_stops() -> None:
    command = [sys.executable, "inference_api/_mock_inference_api_server.py"]
    with running_command(command, RATE) as service:
        wait_for(lambda: "Ready http" in service.log.read_text(), 20.0, "ready card")
        with RawStream(service.port, "/inference/mock", {"text": "x", "max_tokens": 12}) as stream:
            assert stream.read_all() == b"123456789012"
            assert len(stream.chunks) > 1, "a stream, not one piece"
        assert service.stop(signal.SIGTERM) == 0


def test_no_secret_prompt_or_assertion_is_in_the_log() -> None:
    with running_service(proxy=True) as service:
        service.ask("/inference/mock", {"text": "the-very-private-prompt", "max_tokens": 2})
        key = (service.run_dir / "internal_auth_key").read_text().strip()
        service.stop(signal.SIGTERM)
        log = service.log.read_text()
        assert "the-very-private-prompt" not in log
        assert key not in log and "a-secret-for-tests" not in log


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"PROXY_MAX_BODY_BYTES": "x"}, "PROXY_MAX_BODY_BYTES"),
        ({"JWT_SECRET": ""}, "Expected JWT_SECRET environment variable to be provided"),
    ],
)
def test_a_wrong_setting_of_the_proxy_stops_the_whole_start(environ: dict[str, str], text: str) -> None:
    with running_service(proxy=True, wait=False, **environ) as service:
        assert service.process.wait(15) == 1
        log = service.log.read_text()
        assert text in log and "proxy could not start (status 1)" in log
