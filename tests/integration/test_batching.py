"""Check on the running service that rows are filled and freed step by step, 32 at a time, and that figures say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import Service, in_parallel, new_request_id, running_service, wait_for

NUM_ROWS = 32


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """A service of 32 rows whose steps take 20 ms when all rows decode."""
    with running_service(INFERENCE_API_MOCK_TOKENS_PER_SECOND="1600") as running:
        yield running


@contextlib.contextmanager
def open_streams(service: Service, num_streams: int, max_tokens: int) -> Iterator[list[RawStream]]:
    """Send requests one after another, each on its own connection, without reading; close them in the end."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(RawStream(service.port, "/inference/mock", {"text": "x", "max_tokens": max_tokens}))
            for _ in range(num_streams)
        ]


def test_32_requests_of_32_tokens_share_their_forward_passes(service: Service) -> None:
    steps = service.metric("inference_api_steps_total")
    with open_streams(service, NUM_ROWS, 32) as streams:
        assert {stream.read_all() for stream in streams} == {b"1234567890" * 3 + b"12"}
    assert service.metric("inference_api_steps_total") - steps <= 70


def test_a_request_sent_while_31_rows_decode_gets_its_first_token_before_any_of_them_ends(service: Service) -> None:
    with open_streams(service, NUM_ROWS - 1, 60) as streams:
        assert all(stream.read_chunk() for stream in streams)
        with RawStream(service.port, "/inference/mock", {"text": "late", "max_tokens": 1}) as late:
            # A thread a stream: a chunk's time is the time at which it is read.
            *texts, late_text = in_parallel([stream.read_all for stream in (*streams, late)])
            assert [len(text) for text in texts] == [60] * (NUM_ROWS - 1)
            assert late_text == b"4"
            assert late.chunks[0].at < min(stream.chunks[-1].at for stream in streams)


def test_a_33rd_request_takes_the_row_of_the_first_that_ends(service: Service) -> None:
    short_id, late_id = new_request_id(), new_request_id()
    short_body, late_body = {"text": "short", "max_tokens": 30}, {"text": "late", "max_tokens": 1}
    with (
        open_streams(service, NUM_ROWS - 1, 70) as streams,
        RawStream(service.port, "/inference/mock", short_body, {"Request-Id": short_id}) as short,
    ):
        assert short.read_chunk() and all(stream.read_chunk() for stream in streams)
        with RawStream(service.port, "/inference/mock", late_body, {"Request-Id": late_id}) as late:
            wait_for(lambda: service.view(late_id).get("place") == 1, 2.0, "a place in the queue")
            in_parallel([stream.read_all for stream in (*streams, short, late)])
            assert short.whole and late.body == b"4"
            assert short.chunks[-1].at - 0.05 < late.chunks[0].at < short.chunks[-1].at + 0.25
            assert late.chunks[0].at < min(stream.chunks[-1].at for stream in streams)
    assert service.view(late_id)["row"] == service.view(short_id)["row"]


def test_the_rows_answer_shows_every_row_and_who_waits(service: Service) -> None:
    idle = service.rows()
    assert (idle["num_rows"], idle["num_rows_in_use"], idle["num_waiting"]) == (NUM_ROWS, 0, 0)
    assert {row["state"] for row in idle["rows"]} == {"free"}
    with open_streams(service, NUM_ROWS + 2, 50) as streams:
        assert streams[0].read_chunk()
        wait_for(lambda: service.rows()["num_waiting"] == 2, 2.0, "two requests in the queue")
        assert {row["state"] for row in service.rows()["rows"]} <= {"prefilling", "decoding"}
        assert service.metric('inference_api_user_rows{state="in_use"}') == NUM_ROWS
        for stream in streams:
            stream.read_all()
    assert service.num_rows_in_use() == 0
