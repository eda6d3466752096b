"""Check how one prompt and several, as texts and as ids, become ids."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.openai.prompts import ids_of_each
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(vocab_size=259)


@pytest.fixture(scope="module")
def tokenizer(mock_image) -> Tokenizer:
    return Tokenizer.load(mock_image.tokenizer_path)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("hi", [list(b"hi")]),
        (["hi", "<|im_end|>"], [list(b"hi"), list(b"<|im_end|>")]),
        ([257, 104], [[257, 104]]),
        ([[257], [104, 105]], [[257], [104, 105]]),
    ],
)
def test_texts_are_a_callers_and_ids_are_taken_as_they_are(tokenizer, given: Any, ids: list[list[int]]) -> None:
    assert ids_of_each("input", given, tokenizer, LIMITS) == ids


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "input: is empty"),
        (["x", ""], r"input\[1\]: is empty"),
        ([1, 259], r"input\[1\]: 259 is outside the vocabulary, whose last id is 258"),
        ([[1], [259]], r"input\[1\]\[0\]: 259 is outside"),
        ("\ud800", "input has half a surrogate pair"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_place(tokenizer: Tokenizer, given: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        ids_of_each("input", given, tokenizer, LIMITS)
