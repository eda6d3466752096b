"""Check that nothing of a prompt stays in memory for later ones, which may be another tenant's."""

from __future__ import annotations

import os
import random

import pytest
import tokenizers
from tokenizers import models

from inference_api.server.tokenizer import Tokenizer
from tests.integration.service import resident_bytes

_LETTERS = "abcdefghijklmnop"
_MODELS = {
    "bpe": models.BPE(vocab={letter: index for index, letter in enumerate(_LETTERS)}, merges=[]),
    "unigram": models.Unigram([(letter, -1.0) for letter in _LETTERS], unk_id=0),
}
_WORD_CHARS = 100
_NUM_WORDS = 11_000
"""More than `tokenizers` would keep, at some KiB each."""


@pytest.mark.parametrize("kind", _MODELS)
def test_no_word_of_a_prompt_is_kept_for_later_ones(kind: str) -> None:
    tokenizer, rng = Tokenizer(tokenizers.Tokenizer(_MODELS[kind]).to_str()), random.Random(9)
    tokenizer.encode(_LETTERS * 100)
    before = resident_bytes(os.getpid())
    for _ in range(_NUM_WORDS):
        tokenizer.encode("".join(rng.choices(_LETTERS, k=_WORD_CHARS)))
    grown_mib = (resident_bytes(os.getpid()) - before) / (1 << 20)
    assert grown_mib < 6
