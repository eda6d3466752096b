"""Check the service under a plain `gunicorn --config gunicorn.conf.py`: the arbiter outermost, a backend beside it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, running_command, wait_for

MOCK_APP = "_mock_inference_api_server:create_test_server()"
STOP_SECONDS = 5.0
LONG = {"text": "x", "max_tokens": 2000}


@contextlib.contextmanager
def running_gunicorn(**environ: str) -> Iterator[Service]:
    """Run gunicorn in the project's root, as its documentation says, until it serves and then until the block ends."""
    command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py", MOCK_APP]
    settings = {**SLOW_START, "INFERENCE_API_MOCK_TOKENS_PER_SECOND": "40", **environ}
    with running_command(command, settings) as service:
        wait_for(lambda: service.is_healthy() or service.process.poll() is not None, 20.0, "health")
        assert service.process.poll() is None, service.log.read_text()
        yield service


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_streams_and_stops_without_an_orphan(number: signal.Signals) -> None:
    with running_gunicorn() as service:
        with RawStream(service.port, "/inference/mock", {"text": "x", "max_tokens": 12}) as stream:
            assert stream.read_all() == b"123456789012"
            assert len(stream.chunks) > 1, "a stream, not one piece"
        assert len(service.pids_of("inference_api.backend.main")) == 1
        assert service.stop(number) == 0
        wait_for(lambda: not service.pids(), STOP_SECONDS, "end of every process")


def test_kill_of_the_arbiter_leaves_no_process_after_the_grace() -> None:
    with (
        running_gunicorn(INFERENCE_API_GRACE_SECONDS="0.5") as service,
        RawStream(service.port, "/inference/mock", LONG) as stream,
    ):
        assert stream.read_chunk()
        service.process.kill()
        service.process.wait(5)
        wait_for(lambda: not service.pids(), STOP_SECONDS, "end of every process")
        stream.read_all()
        assert not stream.whole


def test_a_killed_worker_and_a_killed_backend_are_replaced() -> None:
    with running_gunicorn() as service:
        (worker,), backend = service.worker_pids, service.backend_pid
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: service.worker_pids not in ([], [worker]) and service.is_healthy(), 10.0, "a new worker")
        assert service.backend_pid == backend
        os.kill(backend, signal.SIGKILL)
        wait_for(lambda: backend not in service.pids() and service.is_healthy(), STOP_SECONDS, "a new backend")
        assert service.ask("/inference/mock", {"text": "x", "max_tokens": 2}) == "12"


def test_the_end_of_the_supervisor_stops_gunicorn_with_a_status() -> None:
    with running_gunicorn() as service:
        supervisors = service.pids_of("inference_api.supervisor")
        assert len(supervisors) == 1
        service.leaves_run_dir = True
        os.kill(supervisors[0], signal.SIGKILL)
        assert service.process.wait(STOP_SECONDS) == 1


def test_a_taken_port_is_one_line_and_nothing_is_started() -> None:
    command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py", MOCK_APP]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running_command(command, {"INFERENCE_API_PORT": str(port)}) as service:
            assert service.process.wait(15) == 1
            (line,) = service.log.read_text().splitlines()
            assert line.startswith("ERROR: ") and f"cannot listen on 127.0.0.1:{port}" in line
            assert line.endswith("take another port")


def test_a_wrong_setting_stops_the_start_with_its_name_and_a_status() -> None:
    command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py", MOCK_APP]
    with running_command(command, {"INFERENCE_API_MOCK_FAULTS": "nonsense"}) as service:
        assert service.process.wait(15) != 0
        assert "INFERENCE_API_MOCK_FAULTS" in service.log.read_text()
