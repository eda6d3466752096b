"""Check how results and errors become responses, and that a broken stream never looks whole."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator

import pytest

from inference_api.errors import BackendLostError, ClientLeftError, NotFoundError, OverloadedError
from inference_api.server.responses import (
    error_response,
    event,
    json_response,
    large_json_response,
    stream_response,
    unwritten_response,
)


def _breaking() -> Iterator[bytes]:
    yield b"part"
    raise BackendLostError("gone")


def test_an_error_has_the_native_body_and_its_stable_code() -> None:
    response = error_response(NotFoundError("nothing here"))
    assert (response.status_code, response.get_json()) == (404, {"status_code": 404, "message": "nothing here"})
    assert response.headers["X-Error-Code"] == "not_found"
    assert "Retry-After" not in response.headers


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (30.0, "30")])
def test_a_time_to_retry_is_rounded_up_to_whole_seconds(seconds: float, header: str) -> None:
    assert error_response(OverloadedError("full", seconds)).headers["Retry-After"] == header


def test_an_event_is_one_json_line_even_for_text_with_newlines() -> None:
    frame = event("answer", {"message": "a\nb\u2028\u00e9"})
    head, data, *rest = frame.split(b"\n")
    assert (head, rest) == (b"event: answer", [b"", b""])
    assert json.loads(data.removeprefix(b"data: ")) == {"message": "a\nb\u2028\u00e9"}


def test_a_large_body_says_the_same_in_a_fraction_of_the_time() -> None:
    body = {"tops": [{"token": '\u00e9\u2028"', "logprob": -0.1 * index, "rank": None} for index in range(50_000)]}
    began = time.perf_counter()
    plain = json_response(200, body)
    halfway = time.perf_counter()
    large = large_json_response(200, body)
    seconds = time.perf_counter() - halfway
    assert large.get_json() == plain.get_json() == body
    assert (large.status_code, large.content_type) == (200, "application/json")
    assert seconds < (halfway - began) / 2


def test_a_stream_is_closed_once_however_it_ends() -> None:
    closed: list[int] = []
    response = stream_response(iter([b"a", b"b"]), lambda: closed.append(1), buffered=False)
    assert b"".join(response.iter_encoded()) == b"ab"
    assert closed == []
    response.close()
    assert closed == [1]


def test_a_broken_stream_breaks_the_pipe_instead_of_ending() -> None:
    response = stream_response(_breaking(), lambda: None, buffered=False)
    chunks = response.iter_encoded()
    assert next(chunks) == b"part"
    with pytest.raises(BrokenPipeError, match="backend_lost") as caught:
        next(chunks)
    assert caught.value.errno == errno.EPIPE
    assert "Content-Length" not in response.headers
    response.close()


def test_a_buffered_stream_has_its_length_or_raises_its_error_and_is_closed_either_way() -> None:
    closed: list[int] = []
    response = stream_response(iter([b"a", b"b"]), lambda: closed.append(1), buffered=True)
    assert response.get_data() == b"ab"
    with pytest.raises(BackendLostError):
        stream_response(_breaking(), lambda: closed.append(2), buffered=True)
    assert closed == [1, 2]


def test_nothing_at_all_is_sent_to_a_client_that_has_left() -> None:
    response = unwritten_response(ClientLeftError("left"))
    with pytest.raises(BrokenPipeError):
        next(response.iter_encoded())
    response.close()
