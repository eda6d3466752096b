"""Check on the running service that waiting costs nothing: slow streams, a queue, clients that never read."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.integration.raw_http import RawStream
from tests.integration.service import (
    SLOW_START,
    Service,
    cpu_seconds,
    in_parallel,
    new_request_id,
    resident_bytes,
    running_command,
    running_service,
    wait_for,
)

NUM_WAITING = 32
MEASURED_SECONDS = 3.0
MAX_CPU_SHARE = 0.01
UNTIMED_SECONDS = 0.2
"""What had arrived before the test read on is read at once."""

NUM_STALLED = 8
RECEIVE_BYTES = 4096
MIN_UNSENT_BYTES = 256 << 10
MAX_GROWTH_BYTES = 16 << 20
"""Far below what the stalled clients have not read: 6 MB each, and as much again as text in the process."""

SMALLEST_BYTES = 1
"""Asked for as a buffer's size, this gives the smallest that the kernel grants (socket(7)); accept(2) inherits it."""

GUNICORN_WITH_SMALL_BUFFERS = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(sys.argv[1]))
listener.set_inheritable(True)
print("listening on", listener.getsockname()[1], flush=True)
command = [sys.executable, "-m", "gunicorn", "--config", "gunicorn.conf.py", "--bind", f"fd://{listener.fileno()}"]
os.execv(sys.executable, [*command, "_mock_inference_api_server:create_test_server()"])
"""
PORT_LINE = re.compile(r"^listening on (\d+)$", re.MULTILINE)


def test_two_slow_streams_run_to_their_end_while_32_requests_wait_for_nothing() -> None:
    num_tokens, num_streams, tokens_per_second = 9, 2, 4.0
    with (
        running_service(**SLOW_START, INFERENCE_API_MOCK_TOKENS_PER_SECOND=str(tokens_per_second)) as service,
        contextlib.ExitStack() as stack,
    ):
        body = {"text": "x", "max_tokens": num_tokens}
        slow = [stack.enter_context(RawStream(service.port, "/inference/mock", body)) for _ in range(num_streams)]
        assert all(stream.read_chunk() for stream in slow)
        for _ in range(NUM_WAITING):
            stack.enter_context(RawStream(service.port, "/inference/mock", body))
        wait_for(lambda: service.rows()["num_waiting"] == NUM_WAITING, 5.0, "requests in the queue")
        (worker,) = service.worker_pids
        reading_from = time.monotonic() + UNTIMED_SECONDS
        functions: list[Callable[[], object]] = [lambda: cpu_share(worker), *(stream.read_all for stream in slow)]
        share, *texts = in_parallel(functions)
        assert isinstance(share, float) and share < MAX_CPU_SHARE
        assert texts == [b"1234567890"[:num_tokens]] * num_streams
        for stream in slow:
            timed = [chunk.at for chunk in stream.chunks if chunk.at > reading_from]
            gaps = [after - before for before, after in itertools.pairwise(timed)]
            assert stream.whole
            assert statistics.median(gaps) > 0.6 * num_streams / tokens_per_second, "a token leaves when it is made"


def test_clients_that_never_read_slow_nobody_down_and_hold_bounded_memory() -> None:
    # return_prompt makes every event of the chat route 6 KB long (a control character takes six in JSON), so that an
    # answer is more than the kernel buffers. What cannot be sent is sent later in fewer events.
    stalled_body = {"text": "\x01" * 1000, "max_tokens": 1000, "return_prompt": True}
    with (
        running_service(INFERENCE_API_MOCK_TOKENS_PER_SECOND="6400") as service,
        contextlib.ExitStack() as stack,
    ):
        (worker,) = service.worker_pids
        undisturbed = timed_answers(service.port)
        before = resident_bytes(worker)
        ids = [new_request_id() for _ in range(NUM_STALLED)]
        stalled: list[RawStream] = []
        for request_id in ids:
            headers = {"Request-Id": request_id}
            stalled.append(
                stack.enter_context(
                    RawStream(service.port, "/chat/mock", stalled_body, headers, receive_bytes=RECEIVE_BYTES)
                )
            )
        for request_id in ids:
            wait_for(lambda rid=request_id: service.view(rid).get("state") == "finished", 20.0, "an end of its row")  # type: ignore[misc]
            assert service.view(request_id)["num_completion_tokens"] == 1000
        assert service.num_rows_in_use() == 0
        assert unsent_bytes(service.port) > NUM_STALLED * MIN_UNSENT_BYTES
        beside = timed_answers(service.port)
        assert beside < 3 * undisturbed + 0.25
        assert service.worker_pids == [worker]
        assert resident_bytes(worker) - before < MAX_GROWTH_BYTES
        assert service.get("/health").status_code == 200
        answer = stalled[0].read_all()
        assert stalled[0].whole
        assert answer.endswith(b'event: close\ndata: {"message": "Connection closed"}\n\n')


def test_a_client_that_reads_late_gets_every_byte_of_a_raw_stream_and_slows_nobody_down() -> None:
    num_tokens = 2000
    with running_with_small_buffers() as service, contextlib.ExitStack() as stack:
        undisturbed = timed_answers(service.port)
        ids = [new_request_id() for _ in range(NUM_STALLED)]
        body = {"text": "x", "max_tokens": num_tokens}
        stalled = [
            stack.enter_context(
                RawStream(service.port, "/inference/mock", body, {"Request-Id": rid}, receive_bytes=SMALLEST_BYTES)
            )
            for rid in ids
        ]
        for request_id in ids:
            wait_for(lambda rid=request_id: service.view(rid).get("state") == "finished", 20.0, "an end of its row")  # type: ignore[misc]
        assert unsent_bytes(service.port) > NUM_STALLED * 100
        assert timed_answers(service.port) < 3 * undisturbed + 0.25
        for stream in stalled:
            assert stream.read_all() == (b"1234567890" * (num_tokens // 10))
            assert stream.whole
            # Single ids for as long as the socket took them, then in one piece what had come meanwhile.
            sizes = [len(chunk.data) for chunk in stream.chunks]
            assert sizes[0] == 1 and statistics.median(sizes) < 10
            assert max(sizes) == sizes[-1] > 100, sizes


def test_a_client_that_never_reads_its_logprobs_is_cut_with_the_reason_while_others_get_all_of_theirs() -> None:
    body = {"model": "mock", "prompt": "x", "max_tokens": 1800, "logprobs": 20, "stream": True}
    with running_with_small_buffers() as service, contextlib.ExitStack() as stack:
        (worker,) = service.worker_pids
        ids = [new_request_id() for _ in range(3)]
        before = resident_bytes(worker)
        stalled = [
            stack.enter_context(
                RawStream(service.port, "/v1/completions", body, {"Request-Id": rid}, receive_bytes=SMALLEST_BYTES)
            )
            for rid in ids
        ]
        with RawStream(service.port, "/v1/completions", body) as reading:
            *events, end = reading.read_all().decode().removesuffix("\n\n").split("\n\n")
        assert end == "data: [DONE]"
        (choices,) = zip(*(json.loads(event.removeprefix("data: "))["choices"] for event in events), strict=True)
        assert sum(len(choice["logprobs"]["top_logprobs"]) for choice in choices if choice["logprobs"]) == 1800
        for request_id in ids:
            wait_for(lambda rid=request_id: service.view(rid).get("state") == "finished", 20.0, "an end of its row")  # type: ignore[misc]
            view = service.view(request_id)
            assert view["finish_reason"] == "abort" and view["num_completion_tokens"] < 1800
        assert resident_bytes(worker) - before < MAX_GROWTH_BYTES
        for stream in stalled:
            answer = stream.read_all()
            assert b'"code": "reader_behind"' in answer and b"[DONE]" not in answer
        assert service.num_rows_in_use() == 0


@contextlib.contextmanager
def running_with_small_buffers() -> Iterator[Service]:
    """Run the server, without a proxy, on a socket that holds next to nothing that a client does not read."""
    command = [sys.executable, "-c", GUNICORN_WITH_SMALL_BUFFERS, str(SMALLEST_BYTES)]
    with running_command(command, {"INFERENCE_API_MOCK_TOKENS_PER_SECOND": "6400"}) as service:
        wait_for(lambda: PORT_LINE.search(service.log.read_text()), 60.0, "a port")
        service.port = int(PORT_LINE.findall(service.log.read_text())[0])
        wait_for(lambda: is_healthy(service), 60.0, "health")
        yield service


def cpu_share(pid: int) -> float:
    """Return the share of one processor that a process uses, measured over MEASURED_SECONDS."""
    used = cpu_seconds(pid)
    time.sleep(MEASURED_SECONDS)
    return (cpu_seconds(pid) - used) / MEASURED_SECONDS


def unsent_bytes(port: int) -> int:
    """Return how many bytes wait in the kernel for the readers of a port's connections (proc_net_tcp, tx_queue)."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(fields[4].partition(":")[0], 16) for fields in lines if fields[1].endswith(f":{port:04X}"))


def is_healthy(service: Service) -> bool:
    """Tell whether /health says 200; False while nobody serves."""
    with contextlib.suppress(OSError):
        return service.get("/health").status_code == 200
    return False


def timed_answers(port: int) -> float:
    """Return the seconds that ten answers of 200 tokens take, one after another."""
    began = time.monotonic()
    for _ in range(10):
        with RawStream(port, "/inference/mock", {"text": "x", "max_tokens": 200}) as stream:
            assert len(stream.read_all()) == 200
    return time.monotonic() - began
