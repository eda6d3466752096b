"""Turn text into ids and ids into text, in a gunicorn worker, from a model image's tokenizer.json alone.

Two instances of `tokenizers` share one vocabulary. The trusted one knows control texts such as `<|im_start|>` under
their names. In the user one each control text has a secret alias instead, drawn at load: whatever a caller sends, no
text of theirs becomes a control id. Knows no torch, no transformers, no chat template and no stop sequence.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers

from inference_api.errors import ModelError
from inference_api.model_image import byte_level_alphabet
from inference_api.server.validation import refuse_lone_surrogates

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>", re.ASCII)
_BLANK_OF_PIECES = "\u2581"
"""SentencePiece's mark of a blank."""
_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(byte_level_alphabet())}


class Segment(NamedTuple):
    """A stretch of a prompt: control texts in it count only if it is trusted, that is, not a caller's."""

    text: str
    trusted: bool


class Span(NamedTuple):
    """An id and the characters of the text that it stands for: `start` to `stop`, both 0 for one in front of it."""

    token_id: int
    start: int
    stop: int


class Tokenizer:
    """Encode and decode; nothing seen from outside changes, so that all threads of a worker may share it."""

    def __init__(self, tokenizer_json: str, *, special_texts: Iterable[str] = ()) -> None:
        """Build both instances from the file's text; raises ModelError if it cannot be used.

        `special_texts` are control texts that the vocabulary holds but the file does not declare as added tokens.
        """
        try:
            trusted = json.loads(tokenizer_json)
            _declare(trusted, special_texts)
            self._trusted = _build(trusted)
            nonce = secrets.token_hex(16)
            self._aliases = {
                entry["content"]: f"[{nonce}:{entry['id']}]" for entry in trusted["added_tokens"] if _is_control(entry)
            }
            self._user = _build(_alias(trusted, self._aliases))
        except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot use
            raise ModelError(f"tokenizer.json cannot be used: {error}") from error
        self.control_ids = frozenset(entry["id"] for entry in trusted["added_tokens"] if _is_control(entry))
        self.special_ids = frozenset(entry["id"] for entry in trusted["added_tokens"] if entry["special"])
        self.vocab_size = self._trusted.get_vocab_size()
        self._control_texts = _any_of(self._aliases)
        self._bytes_of: dict[int, bytes] = {}  # of ids asked for before: two dozen steps an id otherwise
        self._prefix_ids = _leading_special_ids(self._trusted)
        self._decoder_kinds = _decoder_kinds(trusted.get("decoder"))
        if "ByteLevel" in self._decoder_kinds and not self.is_byte_level:
            raise ModelError(f"tokenizer.json has a decoder that cannot be streamed: {self._decoder_kinds}")

    @classmethod
    def load(cls, tokenizer_json: Path, *, special_texts: Iterable[str] = ()) -> Tokenizer:
        """Read the file (blocking) and build the tokenizer; raises ModelError if it cannot be read or used."""
        try:
            text = tokenizer_json.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{tokenizer_json.name} cannot be read: {error}") from error
        return cls(text, special_texts=special_texts)

    def encode(self, text: str, *, field: str = "text") -> list[int]:
        """Encode a caller's text as a whole prompt; control texts in it are plain characters.

        Begins with the ids that the model's own post-processor puts in front (BOS, for models that want one); what it
        would append, such as EOS, is left out, for a prompt must stay open. Raises InvalidRequestError, naming
        `field`, for text with half a surrogate pair.
        """
        refuse_lone_surrogates(field, text)
        return self._prefix_ids + self._user.encode(text, add_special_tokens=False).ids

    def encode_spans(self, text: str, *, field: str = "text", whole_prompt: bool = True) -> list[Span]:
        """Encode as `encode` does, and tell which characters each id stands for; several ids may share one character.

        Without `whole_prompt` nothing is put in front.
        """
        refuse_lone_surrogates(field, text)
        encoding = self._user.encode(text, add_special_tokens=False)
        spans = [Span(token_id, *offsets) for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)]
        return [Span(token_id, 0, 0) for token_id in self._prefix_ids if whole_prompt] + spans

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text that no caller wrote: control texts become control ids. Adds nothing in front or behind."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def encode_segments(self, segments: Iterable[Segment], *, field: str = "text") -> list[int]:
        """Encode a prompt that mixes trusted and callers' stretches; adds nothing in front or behind.

        One pass over the joined text, so that ids may span a border of segments as they do in the plain text: without
        control texts in callers' stretches, the result is that of `encode_trusted` on the joined text.
        """
        segments = list(segments)
        for segment in segments:
            refuse_lone_surrogates(field, segment.text)
        joined = "".join(self._hide_controls(segment.text) if segment.trusted else segment.text for segment in segments)
        return self._user.encode(joined, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode ids in one go, special ids skipped or under their names, invalid UTF-8 as U+FFFD."""
        return self._trusted.decode(ids, skip_special_tokens=skip_special)

    def is_silent(self, token_id: int) -> bool:
        """Tell whether `decode` skips this id: a special one, or one that the vocabulary lacks."""
        return token_id in self.special_ids or self._trusted.id_to_token(token_id) is None

    def is_byte(self, token_id: int) -> bool:
        """Tell whether this id is one byte (`<0x0A>`) that the decoder joins with its neighbours into characters."""
        if "ByteFallback" not in self._decoder_kinds:
            return False
        return _BYTE_PIECE.fullmatch(self._trusted.id_to_token(token_id) or "") is not None

    @property
    def is_byte_level(self) -> bool:
        """Tell whether ids are runs of bytes (GPT-2's scheme), for which `bytes_of` is defined."""
        return self._decoder_kinds == ["ByteLevel"]

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that this id stands for in a byte-level vocabulary; nothing for a silent one."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = b"" if self.is_silent(token_id) else self._piece_bytes(token_id)
        return known

    def piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes that this id stands for by itself, whatever the vocabulary's scheme; control texts too."""
        if self.is_byte_level:
            return self._piece_bytes(token_id)
        if self.is_byte(token_id):
            return bytes([int((self._trusted.id_to_token(token_id) or "")[1:-1], 16)])
        return (self._trusted.id_to_token(token_id) or "").replace(_BLANK_OF_PIECES, " ").encode()

    def piece_text(self, token_id: int) -> str:
        """Return `piece_bytes` as text, what is no UTF-8 as U+FFFD."""
        return self.piece_bytes(token_id).decode(errors="replace")

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self._trusted.id_to_token(token_id) or ""
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in piece])
        except KeyError:
            return piece.encode()  # an added text outside the alphabet: the decoder takes it as it is

    def _hide_controls(self, text: str) -> str:
        return self._control_texts.sub(lambda found: self._aliases[found.group()], text)


class IncrementalDecoder:
    """Turn one completion's ids into text as they come.

    Invariant: what `decode` and `flush` return, joined, is decode(prompt + completion) minus decode(prompt), however
    the ids were split; no half character is ever returned, and no U+FFFD that a later id could still repair.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        strategy: type[_ByteStream] | type[_Window] = _ByteStream if tokenizer.is_byte_level else _Window
        self._stream: _Stream = strategy(tokenizer, prompt_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Take the next ids and return the text that has become final; costs time linear in their number."""
        return self._stream.decode(ids)

    def flush(self) -> str:
        """Return the text of a dangling tail once the last id is in; call it last."""
        return self._stream.flush()


class _Stream(Protocol):
    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class _ByteStream:
    """Decode a byte-level vocabulary: bytes in, characters out as soon as they are whole.

    Python and Rust both replace a maximal subpart by one U+FFFD (Unicode 16, section 3.9), so both agree on bad bytes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._utf8.decode(b"".join(map(tokenizer.bytes_of, prompt_ids)))
        # A prompt that ends inside a character shows U+FFFD already, two for half a surrogate pair's bytes ED A0; the
        # completion must not show them again.
        self._dangling_text = self._utf8.getstate()[0].decode(errors="replace")

    def decode(self, ids: Sequence[int]) -> str:
        return self._subtract_prompt(self._utf8.decode(b"".join(map(self._tokenizer.bytes_of, ids))))

    def flush(self) -> str:
        return self._subtract_prompt(self._utf8.decode(b"", final=True))

    def _subtract_prompt(self, text: str) -> str:
        if text and self._dangling_text:
            shown, self._dangling_text = self._dangling_text, ""
            for character in shown:
                text = text.removeprefix(character)
        return text


class _Window:
    """Decode any other vocabulary: one settled id as context, then only the ids that are new.

    The context makes the decoder treat the new ids as a continuation (it would trim a blank off the first). Byte ids
    are held until their run ends: `tokenizers` turns every byte of a run with one bad byte into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        audible = [token_id for token_id in prompt_ids if not tokenizer.is_silent(token_id)]
        start = len(audible) - 1
        while start > 0 and tokenizer.is_byte(audible[start]):
            start -= 1
        self._context = audible[max(start, 0) :]
        self._pending: list[int] = []

    def decode(self, ids: Sequence[int]) -> str:
        known = len(self._pending)  # all of them bytes: no need to look at them again
        self._pending.extend(token_id for token_id in ids if not self._tokenizer.is_silent(token_id))
        size = len(self._pending)
        while size > known and self._tokenizer.is_byte(self._pending[size - 1]):
            size -= 1
        return self._settle(size) if size > known else ""

    def flush(self) -> str:
        return self._settle(len(self._pending))

    def _settle(self, size: int) -> str:
        if not size:
            return ""
        settled, self._pending = self._pending[:size], self._pending[size:]
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + settled)
        self._context = settled[-1:]
        return text[_shared_length(before, text) :]


def _shared_length(left: str, right: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _is_control(entry: dict[str, Any]) -> bool:
    """Tell whether an added text could steer the model; runs of blanks, which some vocabularies add, cannot."""
    return bool(entry["special"]) or not entry["content"].isspace()


def _declare(model: dict[str, Any], special_texts: Iterable[str]) -> None:
    """Add control texts that the file does not declare as added tokens; they must be in its vocabulary."""
    declared = {entry["content"] for entry in model["added_tokens"]}
    pieces = _pieces(model)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text in sorted(set(special_texts) - declared):
        if text not in pieces:
            raise ValueError(f"the vocabulary lacks the special text {text!r}")
        model["added_tokens"].append({"id": pieces[text], "content": text, **flags, "special": True})
    model["added_tokens"].sort(key=lambda entry: entry["id"])


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match as `tokenizers` does: leftmost, then longest. Never blanks: a caller's may lie in trusted stretches."""
    by_length = sorted((text for text in texts if not text.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, by_length)) or "(?!)")


def _pieces(model: dict[str, Any]) -> dict[str, int]:
    vocab = model["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {piece: index for index, (piece, _) in enumerate(vocab)}


def _alias(trusted: dict[str, Any], aliases: dict[str, str]) -> dict[str, Any]:
    """Copy the file with every control text renamed, in the added tokens and in the model's own vocabulary.

    The vocabulary matters too: a Unigram model matches `<s>` as an ordinary piece, and so can BPE by its merges.
    """
    user: dict[str, Any] = json.loads(json.dumps(trusted))
    for entry in user["added_tokens"]:
        if entry["content"] in aliases:
            entry.update(content=aliases[entry["content"]], single_word=False)
    model = user["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {aliases.get(piece, piece): token_id for piece, token_id in vocab.items()}
    else:
        model["vocab"] = [[aliases.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes_control(merge, aliases)]
    user["post_processor"] = None
    return user


def _makes_control(merge: str | list[str], aliases: dict[str, str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left in aliases or right in aliases or left + right in aliases


def _build(model: dict[str, Any]) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer.from_str(json.dumps(model))
    built.no_truncation()  # a file may carry a limit at which prompts would be cropped in silence
    built.no_padding()
    if isinstance(built.model, tokenizers.models.BPE | tokenizers.models.Unigram):
        # Else each thread would keep ten thousand words of prompts for later ones, whosever they are.
        built.model._resize_cache(0)
    return built


def _leading_special_ids(trusted: tokenizers.Tokenizer) -> list[int]:
    encoding = trusted.encode("a", add_special_tokens=True)
    marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    return [token_id for token_id, _ in itertools.takewhile(lambda pair: pair[1] == 1, marked)]


def _decoder_kinds(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [kind for inner in decoder["decoders"] for kind in _decoder_kinds(inner)]
    return [str(decoder["type"])]
