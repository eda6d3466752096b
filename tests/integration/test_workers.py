"""Check on the running service with three gunicorn workers that there is one backend, and that any worker will do."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, new_request_id, running_service, wait_for

NUM_WORKERS = 3


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of three workers that echoes; a step of 32 rows takes 20 ms."""
    with running_service(
        INFERENCE_API_WORKERS=str(NUM_WORKERS),
        INFERENCE_API_MOCK_MODE="echo",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="1600",
    ) as running:
        wait_for(lambda: len(running.worker_pids) == NUM_WORKERS, 5.0, "three workers")
        yield running


def worker_of(service: Service, client_port: int) -> int | None:
    """Return the worker that holds the connection of a client's port; None while it waits to be accepted."""
    inode = None
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        local, remote = (int(address.partition(":")[2], 16) for address in fields[1:3])
        if (local, remote) == (service.port, client_port):
            inode = fields[9]
    for pid in service.worker_pids:
        with contextlib.suppress(OSError):
            if f"socket:[{inode}]" in [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]:
                return pid
    return None


def ask(connection: http.client.HTTPConnection, method: str, path: str) -> str:
    """Send a request over a kept connection and return the answer's text."""
    connection.request(method, path)
    return connection.getresponse().read().decode()


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Keep processes from running, and so from accepting connections."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def one_connection_a_worker(service: Service) -> Iterator[list[http.client.HTTPConnection]]:
    """Open a keep-alive connection to each worker: the others are stopped meanwhile, so that they cannot accept it."""
    with contextlib.ExitStack() as stack:
        connections = []
        for worker in service.worker_pids:
            others = [pid for pid in service.worker_pids if pid != worker]
            connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=10)
            stack.callback(connection.close)
            with stopped(others):
                ask(connection, "GET", "/health/live")
            assert worker_of(service, connection.sock.getsockname()[1]) == worker
            connections.append(connection)
        yield connections


def test_three_workers_have_one_backend_and_answer_alike(service: Service) -> None:
    assert len(service.pids_of("inference_api.backend.main")) == 1
    request_id = new_request_id()
    body = {"text": "y" * 1000, "max_tokens": 1000}
    with (
        RawStream(service.port, "/inference/mock", body, {"Request-Id": request_id}) as stream,
        one_connection_a_worker(service) as connections,
    ):
        assert stream.read_chunk()
        incarnations = set()
        for connection in connections:
            assert ask(connection, "GET", "/health") == "OK\n"
            assert json.loads(ask(connection, "GET", "/rows"))["num_rows_in_use"] == 1
            assert json.loads(ask(connection, "GET", f"/v1/requests/{request_id}"))["state"] == "decoding"
            incarnations.add(json.loads(ask(connection, "GET", "/info"))["incarnation"])
        assert len(incarnations) == 1
    wait_for(lambda: service.num_rows_in_use() == 0, 2.0, "a free row")


def test_any_worker_deletes_a_request_of_any_other(service: Service) -> None:
    body = {"text": "y" * 1000, "max_tokens": 1000}
    with one_connection_a_worker(service) as connections:
        for connection in connections:
            request_id = new_request_id()
            with RawStream(service.port, "/inference/mock", body, {"Request-Id": request_id}) as stream:
                assert stream.read_chunk()
                ask(connection, "DELETE", f"/v1/requests/{request_id}")
                stream.read_all()
                assert not stream.whole
            view = json.loads(ask(connection, "GET", f"/v1/requests/{request_id}"))
            assert view["finish_reason"] == "abort"


def test_96_streams_over_three_workers_never_cross(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        texts = [f"<{index}>" * 8 for index in range(96)]
        streams = [stack.enter_context(RawStream(service.port, "/inference/mock", {"text": text})) for text in texts]
        holders = {worker_of(service, stream.sock.getsockname()[1]) for stream in streams} - {None}
        assert [stream.read_all().decode() for stream in streams] == texts
        assert len(holders) > 1, "all connections were accepted by one worker"
        assert service.metric("inference_api_foreign_tokens_total") == 0


def test_kill_of_a_worker_frees_its_rows_and_leaves_the_others_streams(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        body = {"text": "z" * 100, "max_tokens": 100}
        streams: list[RawStream] = []
        one, *others = service.worker_pids
        for kept_out in ([one], others):  # on a busy machine one worker might take them all
            with stopped(kept_out):
                streams += [stack.enter_context(RawStream(service.port, "/inference/mock", body)) for _ in range(12)]
                assert streams[-1].read_chunk()
        assert all(stream.chunks or stream.read_chunk() for stream in streams)
        held_by = {stream: worker_of(service, stream.sock.getsockname()[1]) for stream in streams}
        victim = held_by[streams[0]]
        assert victim is not None and len(set(held_by.values())) > 1
        num_others = sum(worker != victim for worker in held_by.values())
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: service.num_rows_in_use() <= num_others, 1.0, "the killed worker's rows")
        for stream, worker in held_by.items():
            assert (stream.read_all() == b"z" * 100) == (worker != victim) == stream.whole
    wait_for(lambda: len(set(service.worker_pids) - {victim}) == NUM_WORKERS, 5.0, "a new worker")
    wait_for(lambda: service.get("/health").status_code == 200, 5.0, "health")
    assert service.metric('inference_api_finished_total{reason="abort"}') >= 24 - num_others
