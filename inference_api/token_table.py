"""Derive the bytes of every token id from a tokenizer.json; `prepare` runs it once a model image.

Follows what the `tokenizers` package does when it decodes, one token at a time, so that the bytes of ids, put after
each other, are the UTF-8 of their decoded text. Left out is only the blank that a metaspace decoder strips from the
very start of a text: it belongs to the text, not to a token. Pure: JSON in, bytes out; knows no model and no files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from inference_api.errors import ModelError
from inference_api.model_image import byte_level_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TEXT_START_STEPS = frozenset({"Fuse", "Strip"})
"""Decoder steps that only join tokens or trim the start of a whole text."""


def token_bytes_of(tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[bytes], list[int]]:
    """Return the bytes of the ids 0 to `vocab_size` - 1, and the ids of the special tokens.

    `tokenizer` is the parsed tokenizer.json. Ids that it does not know (a padded embedding) get no bytes and count as
    special. Raises ModelError when the decoder is of a kind that does not work token by token.
    """
    to_bytes = _decoder_of(tokenizer)
    texts = dict(_vocabulary(tokenizer["model"]))
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    texts.update({token_id: token["content"] for token_id, token in added.items()})
    if texts and max(texts) >= vocab_size:
        raise ModelError(f"the tokenizer has id {max(texts)}, the model's vocabulary ends at {vocab_size - 1}")
    table = [to_bytes(texts[token_id]) if token_id in texts else b"" for token_id in range(vocab_size)]
    special = [i for i in range(vocab_size) if i not in texts or (i in added and added[i].get("special", False))]
    return table, special


def _vocabulary(model: dict[str, Any]) -> Iterator[tuple[int, str]]:
    vocab = model.get("vocab")
    if isinstance(vocab, dict):  # BPE, WordLevel, WordPiece: text to id
        yield from ((token_id, text) for text, token_id in vocab.items())
    elif isinstance(vocab, list):  # Unigram: [text, score] in id order
        yield from ((token_id, entry[0]) for token_id, entry in enumerate(vocab))
    else:
        raise ModelError(f"the tokenizer model {model.get('type')!r} has no vocabulary")


def _decoder_of(tokenizer: dict[str, Any]) -> Callable[[str], bytes]:
    """Build the function from a token's text to its bytes."""
    decoder = tokenizer.get("decoder") or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    replacements: list[tuple[str, str]] = []
    byte_fallback = False
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step["replacement"], " "))
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind not in _TEXT_START_STEPS:
            raise ModelError(f"the tokenizer's decoder {kind!r} does not work token by token; it is not supported")

    def to_bytes(text: str) -> bytes:
        for old, new in replacements:
            text = text.replace(old, new)
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text.encode()

    return to_bytes


def _byte_level_bytes(text: str) -> bytes:
    """Map characters back to bytes; a token with any other character stands for itself, as in `tokenizers`."""
    mapped = [_BYTE_OF.get(char) for char in text]
    return text.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)


_BYTE_OF = {char: byte for byte, char in enumerate(byte_level_alphabet())}
