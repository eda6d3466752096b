"""Check the shapes of whole answers and of chunks, member by member, without a backend."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from inference_api.errors import BackendLostError
from inference_api.messages import FinishReason
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.generation import Piece
from inference_api.server.openai.answers import (
    FINISH_REASONS,
    ChatWords,
    ChunkWriter,
    Head,
    Words,
    usage_object,
    whole_answer,
)
from inference_api.server.openai.bodies import StreamOptions
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer
from tests.server.fakes import finished

HEAD = Head("chatcmpl-1", 1_700_000_000, "mock", "fp_1")
HEAD_MEMBERS = {"id": "chatcmpl-1", "created": 1_700_000_000, "model": "mock", "system_fingerprint": "fp_1"}
STOPPED = finished(FinishReason.STOP, num_tokens=2)


@pytest.fixture(scope="module")
def tokenizer(mock_image) -> Tokenizer:
    return Tokenizer.load(mock_image.tokenizer_path)


def token(text: str, *top: tuple[int, float], logprob: float = -0.5) -> TokenText:
    return TokenText(ord(text[0]) if text else 0xC3, text, TokenLogprobs(logprob, list(top)))


def events(chunks: Iterable[bytes]) -> list[Any]:
    """Return the data of events, JSON parsed, `[DONE]` as it is."""
    found = []
    for event in b"".join(chunks).decode().split("\n\n")[:-1]:
        assert event.startswith("data: ") and "\n" not in event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def writer(words: Words, num_choices: int = 1, **options: bool) -> ChunkWriter:
    return ChunkWriter(HEAD, words, StreamOptions(**options), num_choices=num_choices, num_prompt_tokens=5)


def written(chunks: ChunkWriter, *pieces: ChoicePiece) -> list[Any]:
    """Return the events of a whole stream."""
    found = events(chunks.begin())
    for piece in pieces:
        found += events(chunks.piece(piece))
    return [*found, *events(chunks.end())]


def test_a_whole_chat_answer_has_every_member(tokenizer: Tokenizer) -> None:
    answers = [Answer("hi", STOPPED, ()), Answer("", finished(num_tokens=1), ())]
    body = whole_answer(HEAD, ChatWords(tokenizer, logprobs=False), answers, usage_object(5, 3))
    message = {"role": "assistant", "content": "hi", "refusal": None}
    assert body == {
        **HEAD_MEMBERS,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "message": {**message, "content": ""}, "logprobs": None, "finish_reason": "length"},
        ],
        "usage": usage_object(5, 3),
    }
    assert usage_object(5, 3).items() >= {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}.items()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.QUOTA])
def test_every_honest_end_has_a_word_that_openais_types_know(reason: FinishReason) -> None:
    assert FINISH_REASONS[reason] in ("stop", "length")


def test_chat_logprobs_tell_text_bytes_and_the_likeliest(tokenizer: Tokenizer) -> None:
    tokens = (token("h", (ord("h"), -0.5), (0xC3, -2.0)), token("", logprob=-1.5), token("\u00e9", (ord("x"), -3.0)))
    choice: Any = ChatWords(tokenizer, logprobs=True).whole(0, Answer("h\u00e9", STOPPED, tokens))
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert content[0] == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xC3]},
        ],
    }
    assert (content[1]["token"], content[1]["bytes"]) == ("", [0xC3])
    assert choice["logprobs"]["refusal"] is None


def test_a_streamed_chat_opens_with_the_role_and_ends_without_content(tokenizer: Tokenizer) -> None:
    found = written(
        writer(ChatWords(tokenizer, logprobs=False)),
        ChoicePiece(0, Piece("", None), 1),
        ChoicePiece(0, Piece("he", None), 2),
        ChoicePiece(0, Piece("y", STOPPED), 3),
    )
    assert found.pop() == "[DONE]"
    assert all(chunk.items() >= {**HEAD_MEMBERS, "object": "chat.completion.chunk"}.items() for chunk in found)
    assert all("usage" not in chunk for chunk in found)
    assert [chunk["choices"] for chunk in found] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": None}, None),
            ({"content": "he"}, None),
            ({"content": "y"}, None),
            ({}, "stop"),
        ]
    ]


def test_each_of_several_choices_opens_and_ends_once(tokenizer: Tokenizer) -> None:
    found = written(
        writer(ChatWords(tokenizer, logprobs=False), 2),
        ChoicePiece(1, Piece("a", None), 1),
        ChoicePiece(0, Piece("", STOPPED), 1),
        ChoicePiece(1, Piece("", STOPPED), 1),
    )
    choices = [choice for chunk in found[:-1] for choice in chunk["choices"]]
    assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1]
    assert [choice["index"] for choice in choices if choice["finish_reason"]] == [0, 1]


def test_usage_comes_once_with_no_choices_and_is_null_before(tokenizer: Tokenizer) -> None:
    found = written(
        writer(ChatWords(tokenizer, logprobs=False), 2, include_usage=True),
        ChoicePiece(0, Piece("he", STOPPED), 1),
        ChoicePiece(1, Piece("y", finished(num_tokens=3)), 3),
    )
    *chunks, usage, done = found
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"] == usage_object(5, 5)
    assert all(chunk["usage"] is None for chunk in chunks)


def test_continuous_usage_stands_on_every_chunk_and_grows(tokenizer: Tokenizer) -> None:
    found = written(
        writer(ChatWords(tokenizer, logprobs=False), continuous_usage_stats=True),
        ChoicePiece(0, Piece("h", None), 1),
        ChoicePiece(0, Piece("i", finished(num_tokens=2)), 2),
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in found[:-1]] == [0, 1, 2, 2]
    assert all(chunk["choices"] for chunk in found[:-1])


def test_tokens_without_text_are_told_though_there_is_nothing_to_show(tokenizer: Tokenizer) -> None:
    chunks = writer(ChatWords(tokenizer, logprobs=True))
    (found,) = events(chunks.piece(ChoicePiece(0, Piece("", None, (token(""),)), 1)))
    assert len(found["choices"][0]["logprobs"]["content"]) == 1


def test_an_error_is_the_last_event_and_a_ping_is_a_comment(tokenizer: Tokenizer) -> None:
    chunks = writer(ChatWords(tokenizer, logprobs=False))
    assert chunks.ping().startswith(b":") and chunks.ping().endswith(b"\n\n")
    (found,) = events(chunks.error(BackendLostError("it broke")))
    assert found == {"error": {"message": "it broke", "type": "server_error", "param": None, "code": "backend_lost"}}
