"""Check how a message looks, whole and event by event, byte for byte where clients lean on it."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import BackendLostError
from inference_api.messages import NO_TIMING, Finished, FinishReason
from inference_api.server.anthropic.answers import AnswerReader, MessageEventWriter, MessageHead, whole_message
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.generation import Piece
from tests.server.anthropic.named_events import read_event
from tests.server.fakes import finished

HEAD = MessageHead("req_0123", "mock", 21)
USAGE = {"input_tokens": 21, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


@pytest.mark.parametrize(
    ("end", "reason", "stop"),
    [
        (finished(FinishReason.STOP), "end_turn", None),
        (finished(FinishReason.STOP, stop="\u00e9nd".encode()), "stop_sequence", "\u00e9nd"),
        (finished(FinishReason.LENGTH), "max_tokens", None),
        (finished(FinishReason.QUOTA), "max_tokens", None),
    ],
)
def test_each_end_has_anthropics_word(end: Finished, reason: str, stop: str | None) -> None:
    assert AnswerReader().ending(end) == {"stop_reason": reason, "stop_sequence": stop}


@pytest.mark.parametrize("text", ["yes", ""])
def test_a_whole_message_has_one_block_and_every_required_member(text: str) -> None:
    assert whole_message(HEAD, AnswerReader(), Answer(text, finished(FinishReason.STOP, 3), ())) == {
        "id": "msg_0123",
        "type": "message",
        "role": "assistant",
        "model": "mock",
        "content": [{"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {**USAGE, "output_tokens": 3},
    }


def test_the_part_of_a_prompt_that_was_reused_is_no_input_twice() -> None:
    end = Finished(FinishReason.STOP, 3, NO_TIMING, num_cached_tokens=16)
    expected = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 3,
    }
    assert whole_message(HEAD, AnswerReader(), Answer("yes", end, ()))["usage"] == expected
    (start, *_), (*_, (_, ending), _) = written(), written(Piece("yes", end))
    assert start[1]["message"]["usage"] == {**USAGE, "output_tokens": 0}
    assert ending["usage"] == expected


def written(*pieces: Piece) -> list[tuple[str, Any]]:
    """Return the names and the data of a whole stream's events."""
    writer = MessageEventWriter(HEAD, AnswerReader())
    events = [*writer.begin()]
    for piece in pieces:
        events += writer.piece(ChoicePiece(0, piece, 1))
    return [read_event(event) for event in [*events, *writer.end()]]


def test_a_stream_is_the_events_of_one_message_in_their_order() -> None:
    end = finished(FinishReason.STOP, 3, b"###")
    assert written(Piece("a", None), Piece("", None), Piece("b", end)) == [
        (
            "message_start",
            {
                "type": "message_start",
                "message": {
                    "id": "msg_0123",
                    "type": "message",
                    "role": "assistant",
                    "model": "mock",
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": {**USAGE, "output_tokens": 0},
                },
            },
        ),
        (
            "content_block_start",
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ),
        (
            "content_block_delta",
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        ),
        (
            "content_block_delta",
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
        ),
        ("content_block_stop", {"type": "content_block_stop", "index": 0}),
        (
            "message_delta",
            {
                "type": "message_delta",
                "delta": {"stop_reason": "stop_sequence", "stop_sequence": "###"},
                "usage": {**USAGE, "output_tokens": 3},
            },
        ),
        ("message_stop", {"type": "message_stop"}),
    ]


def test_an_answer_without_text_opens_and_closes_its_block() -> None:
    names = [name for name, _ in written(Piece("", finished(FinishReason.STOP)))]
    assert names == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]


def test_pings_and_errors_are_events_with_names() -> None:
    writer = MessageEventWriter(HEAD, AnswerReader())
    assert writer.ping() == b'event: ping\ndata: {"type": "ping"}\n\n'
    (event,) = writer.error(BackendLostError("gone"))
    body = {"type": "error", "error": {"type": "api_error", "message": "gone"}, "request_id": "req_0123"}
    assert read_event(event) == ("error", body)
