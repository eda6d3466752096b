"""Check the shapes of text completions, whole and in chunks, with their prompts and their tokens' logprobs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.messages import FinishReason
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.generation import Piece
from inference_api.server.openai.answers import usage_object, whole_answer
from inference_api.server.openai.completion_words import CompletionWords, Told
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer
from tests.server.fakes import finished, logprobs_of
from tests.server.openai.test_answers import HEAD, token, writer, written

STOPPED = finished(FinishReason.STOP, num_tokens=2)
FULL = Told(echo=True, logprobs=1)


@pytest.fixture(scope="module")
def tokenizer(mock_image) -> Tokenizer:
    return Tokenizer.load(mock_image.tokenizer_path)


def scores(prompt: bytes, num_top: int = 1) -> tuple[TokenLogprobs, ...]:
    """Return what a backend tells of a prompt: of all its ids but the first."""
    return tuple(logprobs_of(prompt[1:], num_top))


def test_a_whole_completion_has_every_member_and_the_prompt_if_it_is_echoed(tokenizer: Tokenizer) -> None:
    words = CompletionWords(tokenizer, [list(b"say "), []], Told(echo=True))
    body = whole_answer(HEAD, words, [Answer("hi", STOPPED, ())] * 2, usage_object(5, 2))
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "say hi", "logprobs": None, "finish_reason": "stop"},
        {"index": 1, "text": "hi", "logprobs": None, "finish_reason": "stop"},
    ]


def test_completion_logprobs_tell_offsets_that_go_on_from_chunk_to_chunk(tokenizer: Tokenizer) -> None:
    words = CompletionWords(tokenizer, [[]], Told(logprobs=2))
    first: Any = words.text(0, "h\u00e9", [token("h", (ord("i"), -0.25), (ord("h"), -0.5)), token("\u00e9")])[0]
    assert first["logprobs"] == {
        "text_offset": [0, 1],
        "tokens": ["h", "\u00e9"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"h": -0.5, "i": -0.25}, {"\u00e9": -0.5}],
    }
    (last,) = words.ending(0, Piece("yo", STOPPED, (token("yo"),)), "stop")
    assert (last["text"], last["finish_reason"]) == ("yo", "stop")
    assert last["logprobs"]["text_offset"] == [2]


def test_of_two_ids_with_one_text_the_chosen_ones_logprob_is_told(tokenizer: Tokenizer) -> None:
    words = CompletionWords(tokenizer, [[]], Told(logprobs=2))
    chosen = TokenText(0xC3, "\ufffd", TokenLogprobs(-2.0, [(0xC4, -0.5), (0xC3, -2.0)]))
    choice: Any = words.text(0, "\ufffd", [chosen])[0]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -2.0}]


def test_a_chosen_token_inside_a_character_is_told_once_by_the_text_it_brought(tokenizer: Tokenizer) -> None:
    words = CompletionWords(tokenizer, [[]], Told(logprobs=2))
    half = TokenText(0xC3, "", TokenLogprobs(-0.5, [(0xC3, -0.5), (ord("x"), -1.0)]))
    choice: Any = words.text(0, "", [half])[0]
    assert choice["logprobs"]["top_logprobs"] == [{"": -0.5, "x": -1.0}]


def test_a_streamed_completion_ends_with_its_last_text(tokenizer: Tokenizer) -> None:
    found = written(
        writer(CompletionWords(tokenizer, [list(b"say ")], Told(echo=True))),
        ChoicePiece(0, Piece("he", None), 2),
        ChoicePiece(0, Piece("y", STOPPED), 3),
    )
    choices = [chunk["choices"][0] for chunk in found[:-1]]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("say ", None),
        ("he", None),
        ("y", "stop"),
    ]


def test_an_echo_with_logprobs_tells_prompt_and_answer_as_one_text_whose_first_token_has_none(tokenizer) -> None:
    answer = Answer("!", STOPPED, (token("!", (ord("!"), -0.5)),), prompt_logprobs=scores(b"hi"))
    assert CompletionWords(tokenizer, [b"hi"], FULL).whole(0, answer) == {
        "index": 0,
        "text": "hi!",
        "logprobs": {
            "text_offset": [0, 1, 2],
            "tokens": ["h", "i", "!"],
            "token_logprobs": [None, -1.05, -0.5],
            "top_logprobs": [None, {"i": -1.05}, {"!": -0.5}],
        },
        "finish_reason": "stop",
    }


def test_an_echo_alone_has_the_prompts_tokens_and_nothing_else(tokenizer: Tokenizer) -> None:
    answer = Answer("", finished(), (), prompt_logprobs=scores(b"hi"))
    choice: Any = CompletionWords(tokenizer, [b"hi"], FULL).whole(0, answer)
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("hi", ["h", "i"], "length")


def test_a_stream_tells_the_prompt_once_before_the_first_text_and_its_offsets_go_on(tokenizer: Tokenizer) -> None:
    found = written(
        writer(CompletionWords(tokenizer, [b"hi", b"y"], FULL), 2),
        ChoicePiece(1, Piece("", None), 1),
        ChoicePiece(0, Piece("", None, (), (), scores(b"hi")), 1),
        ChoicePiece(0, Piece("yo", None, (token("y"), token("o"))), 2),
        ChoicePiece(1, Piece("", STOPPED), 1),
        ChoicePiece(0, Piece("!", STOPPED, (token("!"),)), 3),
    )
    choices = [choice for chunk in found[:-1] for choice in chunk["choices"]]
    told = [(choice["index"], choice["text"], choice["logprobs"]["text_offset"]) for choice in choices]
    assert told == [(1, "y", [0]), (0, "hi", [0, 1]), (0, "yo", [2, 3]), (1, "", []), (0, "!", [4])]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop", "stop"]


def test_a_stream_of_nothing_but_a_prompt_tells_it_and_ends(tokenizer: Tokenizer) -> None:
    words = CompletionWords(tokenizer, [b"hi"], FULL)
    found = written(writer(words), ChoicePiece(0, Piece("", finished(), (), (), scores(b"hi")), 0))
    assert [chunk["choices"][0]["text"] for chunk in found[:-1]] == ["hi", ""]
    assert found[-2]["choices"][0]["finish_reason"] == "length"


def test_prompt_logprobs_are_vllms_by_id_with_the_token_itself_first(tokenizer: Tokenizer) -> None:
    answer = Answer("!", STOPPED, (), prompt_logprobs=(TokenLogprobs(-3.0, [(120, -0.5), (121, -1.0)]),))
    choice = CompletionWords(tokenizer, [b"hi"], Told(prompt_logprobs=2)).whole(0, answer)
    assert (choice["text"], choice["logprobs"]) == ("!", None)
    assert choice["prompt_logprobs"] == [
        None,
        {
            "105": {"logprob": -3.0, "rank": None, "decoded_token": "i"},
            "120": {"logprob": -0.5, "rank": 1, "decoded_token": "x"},
            "121": {"logprob": -1.0, "rank": 2, "decoded_token": "y"},
        },
    ]


def test_two_members_that_ask_for_different_numbers_each_get_their_own(tokenizer: Tokenizer) -> None:
    told = Told(echo=True, logprobs=1, prompt_logprobs=3)
    assert told.num_prompt_top == 3
    answer = Answer("", finished(), (), prompt_logprobs=scores(b"hi", 3))
    choice: Any = CompletionWords(tokenizer, [b"hi"], told).whole(0, answer)
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [1]
    assert [len(top) for top in choice["prompt_logprobs"][1:]] == [3]


@pytest.mark.parametrize(
    ("told", "num_top"),
    [
        (Told(), None),
        (Told(echo=True), None),
        (Told(logprobs=4), None),
        (Told(echo=True, logprobs=0), 0),
        (Told(prompt_logprobs=0), 0),
        (Told(echo=True, logprobs=4, prompt_logprobs=2), 4),
    ],
)
def test_a_prompt_is_scored_only_where_that_is_told(told: Told, num_top: int | None) -> None:
    assert told.num_prompt_top == num_top


@given(st.lists(st.integers(0, 258), min_size=1, max_size=24))
def test_the_tokens_texts_joined_are_the_text_at_their_offsets_whatever_the_ids(tokenizer, ids: list[int]) -> None:
    words = CompletionWords(tokenizer, [ids], FULL)
    told = tuple(TokenLogprobs(-1.0, []) for _ in ids[1:])
    choice: Any = words.whole(0, Answer("\u00e9!", STOPPED, (token("\u00e9"), token("!")), prompt_logprobs=told))
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"] == tokenizer.decode(ids) + "\u00e9!"
    assert [choice["text"][offset:].startswith(text) for offset, text in zip(offsets, tokens, strict=True)]
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert len(tokens) == len(ids) + 2
