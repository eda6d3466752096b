"""Check on the running service what happens when there is no place, or no time: counts, statuses, texts, speed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, new_request_id, running_service, wait_for

NUM_ROWS, NUM_PLACES = 2, 3
QUEUE_TOKENS = 200
QUEUE_SECONDS, FIRST_TOKEN_SECONDS, TOTAL_SECONDS = 1.0, 2.0, 3.0
LATENESS_SECONDS = 0.5
"""Deadlines are met at the end of a step, and a step takes 50 ms a row here."""

REFUSAL_SECONDS = 0.25
LONG = {"text": "x", "max_tokens": 2000}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A small service with short deadlines: a step makes 20 tokens a second, a prompt takes a step a token."""
    with running_service(
        INFERENCE_API_ROWS=str(NUM_ROWS),
        INFERENCE_API_QUEUE_REQUESTS=str(NUM_PLACES),
        INFERENCE_API_QUEUE_TOKENS=str(QUEUE_TOKENS),
        INFERENCE_API_QUEUE_SECONDS=str(QUEUE_SECONDS),
        INFERENCE_API_FIRST_TOKEN_SECONDS=str(FIRST_TOKEN_SECONDS),
        INFERENCE_API_TOTAL_SECONDS=str(TOTAL_SECONDS),
        INFERENCE_API_PREFILL_CHUNK_TOKENS="1",
        INFERENCE_API_MOCK_TOKENS_PER_SECOND="20",
    ) as running:
        yield running


def fill_rows(service: Service, streams: contextlib.ExitStack, num_rows: int = NUM_ROWS) -> list[RawStream]:
    """Let long streams decode in so many rows."""
    running = [streams.enter_context(RawStream(service.port, "/inference/mock", LONG)) for _ in range(num_rows)]
    assert all(stream.read_chunk() for stream in running)
    return running


def test_what_exceeds_rows_and_queue_is_refused_at_once_and_counted(
    service: Service, streams: contextlib.ExitStack
) -> None:
    num_sent = 20
    accepted, refused = service.metric("inference_api_requests_total"), service.metric("inference_api_refused_total")
    sent = [
        streams.enter_context(RawStream(service.port, "/inference/mock", {"text": "x", "max_tokens": 4}))
        for _ in range(num_sent)
    ]
    answered = [stream for stream in sent if stream.status == 200]
    turned_away = [stream for stream in sent if stream.status == 503]
    # On a machine that stands still for a moment, who waited in the queue may run out of time: that is no refusal.
    out_of_time = [stream for stream in sent if stream.status == 504]
    num_accepted = len(answered) + len(out_of_time)
    assert (num_accepted, len(turned_away)) == (NUM_ROWS + NUM_PLACES, num_sent - NUM_ROWS - NUM_PLACES)
    assert len(answered) >= NUM_ROWS
    assert {stream.read_all() for stream in answered} == {b"1234"}
    for stream in turned_away:
        message = "Service overloaded, try again later."
        assert json.loads(stream.read_all()) == {"status_code": 503, "message": message}
        assert int(stream.headers["retry-after"]) >= 1
    assert service.metric("inference_api_requests_total") - accepted == num_accepted
    assert service.metric("inference_api_refused_total") - refused == len(turned_away)


def test_a_refusal_takes_no_time_while_rows_and_queue_are_full(service: Service, streams: contextlib.ExitStack) -> None:
    fill_rows(service, streams)
    for _ in range(NUM_PLACES):
        streams.enter_context(RawStream(service.port, "/inference/mock", LONG))
    wait_for(lambda: service.rows()["num_waiting"] == NUM_PLACES, 2.0, "a full queue")
    for _ in range(5):
        with RawStream(service.port, "/inference/mock", LONG) as late:
            assert late.status == 503
            late.read_all()
            assert late.chunks[0].at - late.sent_at < REFUSAL_SECONDS


def test_the_queue_is_bounded_by_prompt_tokens_too(service: Service, streams: contextlib.ExitStack) -> None:
    fill_rows(service, streams)
    streams.enter_context(RawStream(service.port, "/inference/mock", {"text": "x" * 150}))
    wait_for(lambda: service.rows()["num_waiting"] == 1, 2.0, "a long prompt in the queue")
    with RawStream(service.port, "/inference/mock", {"text": "x" * 51}) as too_long:
        assert too_long.status == 503
    streams.enter_context(RawStream(service.port, "/inference/mock", {"text": "x" * 50}))
    wait_for(lambda: service.rows()["num_waiting"] == 2, 2.0, "a short prompt in the queue")


def test_a_request_that_gets_no_row_in_time_is_a_504(service: Service, streams: contextlib.ExitStack) -> None:
    fill_rows(service, streams)
    with RawStream(service.port, "/inference/mock", LONG) as queued:
        assert queued.status == 504
        assert json.loads(queued.read_all())["message"] == "No row became free within 1 seconds."
        assert QUEUE_SECONDS <= queued.chunks[0].at - queued.sent_at < QUEUE_SECONDS + LATENESS_SECONDS


def test_a_request_whose_first_token_takes_too_long_keeps_its_status(
    service: Service, streams: contextlib.ExitStack
) -> None:
    fill_rows(service, streams, 1)
    with RawStream(service.port, "/inference/mock", {"text": "x" * 500}) as slow:
        assert slow.status == 504
        assert json.loads(slow.read_all())["message"] == "The first token took longer than 2 seconds."
        assert FIRST_TOKEN_SECONDS <= slow.chunks[0].at - slow.sent_at < FIRST_TOKEN_SECONDS + LATENESS_SECONDS


def test_a_stream_over_its_total_time_is_cut_visibly(service: Service, streams: contextlib.ExitStack) -> None:
    request_id = new_request_id()
    raw = streams.enter_context(RawStream(service.port, "/inference/mock", LONG, {"Request-Id": request_id}))
    chat = streams.enter_context(RawStream(service.port, "/chat/mock", LONG))
    assert raw.status == chat.status == 200
    raw.read_all()
    assert not raw.whole
    assert TOTAL_SECONDS - LATENESS_SECONDS < raw.chunks[-1].at - raw.sent_at < TOTAL_SECONDS + LATENESS_SECONDS
    *answers, error = chat.read_all().decode().strip().split("\n\n")
    assert chat.whole
    data = json.loads(error.removeprefix("event: error\ndata: "))
    assert (data["status_code"], data["code"]) == (504, "deadline_exceeded")
    assert data["num_delivered_tokens"] == len(answers)
    view = service.view(request_id)
    assert (view["finish_reason"], view["num_completion_tokens"]) == ("error", len(raw.body))
