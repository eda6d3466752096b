"""Check on the running service that a client that leaves is noticed in every phase, and that its row is free at once.

FIN and RST are both seen by the watcher, never by a write that fails: an abandoned request that waits writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, new_request_id, running_service, wait_for

STEP_SECONDS = 0.1
"""What a step of two decoding rows takes here."""

NOTICE_SECONDS = 0.25
LONG = {"text": "x", "max_tokens": 2000}
LONG_PROMPT = {"text": "x" * 1500, "max_tokens": 1}
WAYS = pytest.mark.parametrize(
    "leave", [RawStream.close, RawStream.reset, RawStream.half_close], ids=lambda w: w.__name__
)
Leave = Callable[[RawStream], None]


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of two rows that makes 20 tokens a second and takes in a prompt of one token a step, each one anew."""
    with running_service(
        INFERENCE_API_PREFIX_REUSE="0",
        INFERENCE_API_ROWS="2",
        INFERENCE_API_PREFILL_CHUNK_TOKENS="1",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20",
    ) as running:
        yield running


def start(service: Service, streams: contextlib.ExitStack, body: object) -> tuple[RawStream, str]:
    """Send a request; return its stream and its public id."""
    request_id = new_request_id()
    stream = streams.enter_context(RawStream(service.port, "/inference/mock", body, {"Request-Id": request_id}))
    return stream, request_id


def assert_aborted_in_time(service: Service, request_id: str) -> None:
    """Wait for the request's end, no longer than it takes to notice a FIN and to end the step that runs."""
    wait_for(lambda: service.view(request_id)["state"] == "finished", NOTICE_SECONDS + 2 * STEP_SECONDS, "the abort")
    assert service.view(request_id)["finish_reason"] == "abort"


@WAYS
def test_a_client_that_leaves_while_it_waits_is_aborted_and_nothing_is_written_to_it(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    aborts = service.metric('inference_api_finished_total{reason="abort"}')
    running = [start(service, streams, LONG)[0] for _ in range(2)]
    assert all(stream.read_chunk() for stream in running)
    waiting, request_id = start(service, streams, LONG)
    wait_for(lambda: service.rows()["num_waiting"] == 1, 2.0, "a request in the queue")
    leave(waiting)
    assert_aborted_in_time(service, request_id)
    assert service.view(request_id)["row"] is None
    assert service.rows()["num_waiting"] == 0
    assert service.metric('inference_api_finished_total{reason="abort"}') - aborts == 1
    if leave is RawStream.half_close:
        assert waiting.read_to_end_of_file() == b""


@WAYS
def test_a_client_that_leaves_during_prefill_frees_its_row(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    decoding, _ = start(service, streams, LONG)
    assert decoding.read_chunk()
    prefilling, request_id = start(service, streams, LONG_PROMPT)
    wait_for(lambda: service.view(request_id).get("state") == "prefilling", 2.0, "prefill")
    leave(prefilling)
    assert_aborted_in_time(service, request_id)
    assert service.num_rows_in_use() == 1
    view = service.view(request_id)
    assert (view["num_completion_tokens"], view["row"]) == (0, 1)


@WAYS
def test_a_client_that_leaves_while_its_row_decodes_frees_it(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    stream, request_id = start(service, streams, LONG)
    assert stream.read_chunk()
    leave(stream)
    assert_aborted_in_time(service, request_id)
    assert service.num_rows_in_use() == 0
    assert service.view(request_id)["num_completion_tokens"] <= 1 + (NOTICE_SECONDS + 2 * STEP_SECONDS) / STEP_SECONDS


@WAYS
def test_a_client_that_has_left_before_its_request_is_read_gets_no_row_for_long(
    service: Service, streams: contextlib.ExitStack, leave: Leave
) -> None:
    for _ in range(20):
        stream, _ = start(service, streams, LONG)
        leave(stream)
    wait_for(
        lambda: service.num_rows_in_use() == 0 and service.rows()["num_waiting"] == 0,
        4 * NOTICE_SECONDS,
        "free rows and an empty queue",
    )


def test_a_freed_row_goes_to_the_next_in_the_queue(service: Service, streams: contextlib.ExitStack) -> None:
    running = [start(service, streams, LONG)[0] for _ in range(2)]
    assert all(stream.read_chunk() for stream in running)
    waiting, _ = start(service, streams, {"text": "x", "max_tokens": 1})
    wait_for(lambda: service.rows()["num_waiting"] == 1, 2.0, "a request in the queue")
    running[0].close()
    waiting.sock.settimeout(NOTICE_SECONDS + 4 * STEP_SECONDS)
    assert waiting.read_all() == b"1"


def test_a_client_that_leaves_between_two_requests_aborts_nothing(
    service: Service, streams: contextlib.ExitStack
) -> None:
    aborts = service.metric('inference_api_finished_total{reason="abort"}')
    body = {"text": "x", "max_tokens": 2}
    stream, _ = start(service, streams, body)
    assert stream.read_all() == b"12"
    stream.send("/inference/mock", body, version="HTTP/1.1")
    assert stream.read_all() == b"12"
    assert stream.whole
    stream.close()
    other, _ = start(service, streams, body)
    assert other.read_all() == b"12"
    assert service.metric('inference_api_finished_total{reason="abort"}') == aborts
