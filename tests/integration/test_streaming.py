"""Check on the running service what a caller of the native routes sees: bytes, chunks, arrival times and headers.

The mock engine's ids are bytes, so that an echoed character of four bytes crosses every boundary there is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.integration.raw_http import RawStream
from tests.integration.service import SLOW_START, Service, running_service

TOKEN_SECONDS = 0.2
MIXED_TEXT = "日本語 😀 é text 한국어 🧪👩‍🚀 مرحبا ∑"


@pytest.fixture(scope="module")
def echo() -> Iterator[Service]:
    """A service that answers with the prompt, unthrottled."""
    with running_service(INFERENCE_API_MOCK_MODE="echo", INFERENCE_API_MOCK_TOKENS_PER_SECOND="0") as service:
        yield service


@pytest.fixture(scope="module")
def noise() -> Iterator[Service]:
    """A service whose answer depends on the seed and the prompt, slow enough to tell tokens apart."""
    rate = str(1 / TOKEN_SECONDS)
    with running_service(
        INFERENCE_API_MOCK_MODE="noise", INFERENCE_API_MOCK_TOKENS_PER_SECOND=rate, **SLOW_START
    ) as service:
        yield service


def test_each_token_is_a_chunk_of_its_own_and_arrives_before_the_next_is_made(noise: Service) -> None:
    with RawStream(noise.port, "/inference/mock", {"text": "x", "max_tokens": 7, "seed": 1}) as stream:
        stream.read_all()
        assert stream.whole
        assert stream.headers["transfer-encoding"] == "chunked"
        assert [len(chunk.data) for chunk in stream.chunks] == [1] * 7
        first = stream.chunks[0].at
        assert first - stream.sent_at < 2 * TOKEN_SECONDS
        for index, chunk in enumerate(stream.chunks):
            assert abs(chunk.at - first - index * TOKEN_SECONDS) < 0.5 * TOKEN_SECONDS, f"token {index}"


def test_the_first_token_leaves_alone_however_fast_the_next_ones_come(echo: Service) -> None:
    for _ in range(20):
        with RawStream(echo.port, "/inference/mock", {"text": "0123456789" * 20, "max_tokens": 200}) as stream:
            assert stream.read_all() == b"0123456789" * 20
            assert stream.chunks[0].data == b"0"


def test_the_three_routes_give_the_same_text_for_the_same_seed(noise: Service) -> None:
    options = {"max_tokens": 3, "seed": 7}
    raw = noise.ask("/inference/mock", {"text": "User: hi\nAI: ", **options})
    predictions = noise.ask("/predictions/mock", {"text": "hi", **options})
    events = noise.ask("/chat/mock", {"text": "hi", **options}).split("\n\n")
    assert events.pop() == ""
    assert events.pop() == 'event: close\ndata: {"message": "Connection closed"}'
    messages = [json.loads(event.removeprefix("event: answer\ndata: "))["message"] for event in events]
    assert len(raw) == 3
    assert predictions == raw
    assert messages == [raw[: end + 1] for end in range(3)]
    assert noise.ask("/inference/mock", {"text": "User: hi\nAI: ", "max_tokens": 3, "seed": 8}) != raw


def test_an_http_1_0_caller_gets_the_same_text_whole_with_its_length(noise: Service) -> None:
    body = {"text": "x", "max_tokens": 3, "seed": 1}
    with (
        RawStream(noise.port, "/inference/mock", body) as streamed,
        RawStream(noise.port, "/inference/mock", body, version="HTTP/1.0") as buffered,
    ):
        assert "transfer-encoding" not in buffered.headers
        assert buffered.headers["content-length"] == "3"
        assert buffered.read_all() == streamed.read_all()
        assert buffered.read_to_end_of_file() == b""


@pytest.mark.parametrize("text", [MIXED_TEXT, *MIXED_TEXT.split()])
def test_characters_of_several_tokens_are_echoed_whole_in_every_chunk(echo: Service, text: str) -> None:
    num_bytes = len(text.encode())
    with RawStream(echo.port, "/inference/mock", {"text": text, "max_tokens": num_bytes}) as stream:
        assert stream.read_all() == text.encode()
        assert "".join(chunk.data.decode() for chunk in stream.chunks) == text


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_an_answer_cut_inside_a_character_shows_a_replacement_and_nothing_else_changes(
    echo: Service, num_tokens: int
) -> None:
    answer = echo.post("/inference/mock", {"text": "a😀語é!", "max_tokens": num_tokens})
    assert answer.content.decode() == "a😀語é!".encode()[:num_tokens].decode(errors="replace")


def test_the_old_model_name_is_an_alias_and_an_unknown_one_is_a_404_with_the_list(echo: Service) -> None:
    assert echo.ask("/inference/falcon40b", {"text": "hello"}) == "hello"
    unknown = echo.post("/inference/other", {"text": "hello"})
    assert unknown.status_code == 404
    assert unknown.json() == {"status_code": 404, "message": "Unknown model 'other'. Known: mock, falcon40b."}


def test_the_prompt_comes_first_when_it_is_asked_for(echo: Service) -> None:
    assert echo.ask("/inference/mock", {"text": "été ", "return_prompt": True}) == "été été "
    answer = echo.ask("/predictions/mock", {"text": "hi", "return_prompt": True})
    assert answer == "User: hi\nAI: User: hi\nAI: "


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("END", "one ENtwo "),
        ("D", "one ENtwo EN"),
        ("two", "one EN"),
        ("o", ""),
        ("ENDthree語", "one ENtwo "),
        ("語", "one ENtwo ENDthree"),
        ("absent", "one ENtwo ENDthree語."),
        ("<|endoftext|>", "one ENtwo ENDthree語."),
        ("", "one ENtwo ENDthree語."),
    ],
)
def test_an_answer_ends_before_its_stop_sequence(echo: Service, stop: str, expected: str) -> None:
    answer = echo.post("/inference/mock", {"text": "one ENtwo ENDthree語.", "stop_sequence": stop})
    assert answer.content.decode() == expected


def test_nothing_of_a_stop_sequence_leaves_before_it_is_whole(noise: Service) -> None:
    body = {"text": "x", "max_tokens": 5, "seed": 3}
    text = noise.ask("/inference/mock", body)
    with RawStream(noise.port, "/inference/mock", {**body, "stop_sequence": text[2:5]}) as stream:
        stream.read_all()
        assert stream.whole
        assert [chunk.data.decode() for chunk in stream.chunks] == list(text[:2])


def test_control_words_in_a_prompt_are_ordinary_text(echo: Service) -> None:
    text = "<|stop|><|endoftext|><|im_end|> <|im_start|>"
    assert echo.ask("/inference/mock", {"text": "<|stop|>"}) == "<|stop|>"
    assert echo.ask("/inference/mock", {"text": text}) == text


def test_the_callers_label_and_the_seed_come_back_in_headers(echo: Service) -> None:
    answer = echo.post("/inference/mock", {"text": "hi", "session_id": "my label", "seed": 11})
    assert answer.headers["X-Client-Session-Id"] == "my label"
    assert answer.headers["X-Inference-Seed"] == "11"
    drawn = [echo.post("/inference/mock", {"text": "hi"}).headers for _ in range(2)]
    assert "X-Client-Session-Id" not in drawn[0]
    assert drawn[0]["X-Inference-Seed"] != drawn[1]["X-Inference-Seed"]
    assert drawn[0]["X-Accel-Buffering"] == "no"
