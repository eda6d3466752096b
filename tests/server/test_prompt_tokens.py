"""Check which text each id of a prompt stands for, with characters that several ids share."""

from __future__ import annotations

import pytest

from inference_api.sampling_params import TokenLogprobs
from inference_api.server.prompt_tokens import prompt_tokens, with_top
from inference_api.server.tokenizer import Tokenizer

LIKELY = TokenLogprobs(-1.0, [(1, -0.5), (2, -2.0)])


@pytest.fixture(scope="module")
def tokenizer(mock_image) -> Tokenizer:
    return Tokenizer.load(mock_image.tokenizer_path)


def texts(tokenizer: Tokenizer, ids: bytes | list[int]) -> list[str]:
    return [token.text for token in prompt_tokens(ids, [LIKELY] * (len(ids) - 1), tokenizer)]


def test_a_characters_text_comes_with_its_last_id(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, "a\u00e9\U0001f642".encode()) == ["a", "", "\u00e9", "", "", "", "\U0001f642"]


def test_a_character_that_the_prompt_cuts_is_told_by_its_last_id(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, b"a\xf0\x9f") == ["a", "", "\ufffd"]
    assert texts(tokenizer, b"\xc3") == ["\ufffd"]


def test_a_control_id_has_no_text(tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, [257, 104, 258]) == ["", "h", ""]


def test_the_first_id_has_no_logprob_and_every_other_one_has_its_own(tokenizer: Tokenizer) -> None:
    found = prompt_tokens(b"abc", [LIKELY, TokenLogprobs(-7.0, [])], tokenizer)
    assert [token.logprobs and token.logprobs.logprob for token in found] == [None, -1.0, -7.0]
    assert [token.token_id for token in found] == list(b"abc")


def test_logprobs_that_are_not_the_prompts_are_an_error_and_never_shifted(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="zip"):
        prompt_tokens(b"abc", [LIKELY], tokenizer)


def test_of_the_likeliest_as_many_are_kept_as_were_asked_for(tokenizer: Tokenizer) -> None:
    first, second = prompt_tokens(b"ab", [LIKELY], tokenizer)
    assert with_top(first, 0) is first and with_top(second, 2) is second
    kept = with_top(second, 1).logprobs
    assert kept == TokenLogprobs(-1.0, [(1, -0.5)])
