"""Prove that the joined bytes of ids are the UTF-8 of their decoded text, for each kind of tokenizer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inference_api.errors import ModelError
from inference_api.model_image import byte_level_alphabet
from inference_api.token_table import token_bytes_of


def byte_level() -> Tokenizer:
    alphabet = byte_level_alphabet()
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("c", "at"), ("Ġ", "the"), ("Ã", "©")]
    texts = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["    ", "✓ done"])
    return tokenizer


def byte_fallback(decoder) -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecasr", "▁t", "▁th", "▁the", "at", "cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "t"), ("c", "at")]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return tokenizer


# The decoder of Llama's tokenizer.json.
LLAMA_DECODER = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
METASPACE_DECODER = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])


def table_of(tokenizer: Tokenizer, vocab_size: int | None = None):
    return token_bytes_of(
        json.loads(tokenizer.to_str()), vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)
    )


@settings(deadline=None)
@given(st.text())
def test_a_byte_level_tokenizers_bytes_are_the_text(text):
    tokenizer = byte_level()
    table, _ = table_of(tokenizer)
    ids = tokenizer.encode(text).ids
    assert b"".join(table[i] for i in ids).decode() == tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 264), max_size=30))
def test_random_ids_of_a_byte_level_tokenizer_decode_to_the_bytes_even_when_invalid(ids):
    tokenizer = byte_level()
    table, _ = table_of(tokenizer)
    joined = b"".join(table[i] for i in ids).decode("utf-8", "replace")
    assert joined == tokenizer.decode(ids, skip_special_tokens=False)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_a_byte_fallback_tokenizers_bytes_are_the_text_after_the_blank_that_it_puts_first(text):
    tokenizer = byte_fallback(LLAMA_DECODER)
    table, _ = table_of(tokenizer)
    ids = tokenizer.encode(text).ids
    joined = b"".join(table[i] for i in ids).decode()
    assert joined == (f" {text}" if text else "")
    if text:
        assert joined[1:] == tokenizer.decode(ids)


@pytest.mark.parametrize("decoder", [LLAMA_DECODER, METASPACE_DECODER], ids=["replace", "metaspace"])
def test_a_metaspace_piece_in_the_middle_of_a_text_starts_with_a_blank(decoder):
    tokenizer = byte_fallback(decoder)
    table, _ = table_of(tokenizer)
    ids = tokenizer.encode("the the catcat é").ids
    assert b"".join(table[i] for i in ids) == " the the catcat é".encode()
    for cut in range(1, len(ids)):
        tail = tokenizer.decode(ids).encode()[len(b"".join(table[i] for i in ids[:cut])) - 1 :]
        assert b"".join(table[i] for i in ids[cut:]) == tail


def test_specials_carry_their_text_and_are_flagged_and_other_added_tokens_are_not():
    tokenizer = byte_level()
    table, special = table_of(tokenizer)
    assert [table[i] for i in special] == [b"<|end|>"]
    assert table[tokenizer.token_to_id("✓ done")] == "✓ done".encode()
    assert table[tokenizer.token_to_id("    ")] == b"    "


def test_ids_of_a_padded_embedding_have_no_bytes_and_are_flagged():
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    table, special = table_of(tokenizer, size + 3)
    assert table[size:] == [b""] * 3
    assert set(special) >= {size, size + 1, size + 2}


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused():
    with pytest.raises(ModelError, match=r"the tokenizer has id \d+, the model's vocabulary ends at 99"):
        table_of(byte_level(), 100)


def test_a_decoder_that_does_not_work_token_by_token_is_refused_by_name():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="'WordPiece'"):
        table_of(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.CTC()])
    with pytest.raises(ModelError, match="'CTC'"):
        table_of(tokenizer)
