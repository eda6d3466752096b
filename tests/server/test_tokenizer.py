"""Check that callers' text never becomes a control id, and that streamed text equals one decode of the whole."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from inference_api.errors import InvalidRequestError, ModelError
from inference_api.model_image import ModelImage, build_mock_image
from inference_api.server.tokenizer import IncrementalDecoder, Segment, Tokenizer

_unhurried = settings(deadline=None)  # a busy machine is slow, not wrong
_CORPUS = [
    "the quick brown fox says hello to the world",
    "你好，世界。日本語",
    "🙂🙃👩‍👩‍👧 émoji",
    "system user assistant im_start",
]
_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _byte_level() -> str:
    """Train byte-level BPE, with three special texts, a tool text that is not special, and a run of blanks."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    built.train_from_iterator(
        _CORPUS * 3,
        trainers.BpeTrainer(vocab_size=420, special_tokens=_SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    built.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool>", "<工具>", "   ")])
    return built.to_str()


def _llama() -> str:
    """Build sentencepiece's BPE: metaspace blanks, bytes for unknown characters, BOS put in front."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdehlotwru<>/s|_",
        "he",
        "▁he",
    ]
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("h", "e"), ("▁", "he")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens([AddedToken(text, normalized=False) for text in pieces[:3]])
    built.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return built.to_str()


def _unigram() -> str:
    """Build a Unigram model whose special texts are pieces like any other, as sentencepiece exports them."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), *((char, -3.0) for char in "helo<>/sw🙂")]
    built = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    built.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return built.to_str()


_FILES = {"byte level": _byte_level(), "llama": _llama(), "unigram": _unigram()}
_TOKENIZERS = {name: Tokenizer(text) for name, text in _FILES.items()}
_each = pytest.mark.parametrize("tokenizer", _TOKENIZERS.values(), ids=_TOKENIZERS.keys())


def _id(tokenizer: Tokenizer, piece: str) -> int:
    token_id = tokenizer._trusted.token_to_id(piece)
    assert token_id is not None
    return token_id


def _minus(whole: str, prompt: str) -> str:
    size = 0
    while size < min(len(whole), len(prompt)) and whole[size] == prompt[size]:
        size += 1
    return whole[size:]


def _stream(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt)
    return [*[decoder.decode(piece) for piece in pieces], decoder.flush()]


@_each
def test_every_special_text_of_a_caller_yields_no_control_id(tokenizer: Tokenizer) -> None:
    for text in [*_SPECIALS, "<s>", "</s>", "<tool>"]:
        for sent in (text, f"hello {text}", f"{text}{text}", f" {text} he", f"{text}\n", text[:3] + text + text[3:]):
            ids = tokenizer._user.encode(sent, add_special_tokens=False).ids
            assert not tokenizer.control_ids.difference({tokenizer._trusted.token_to_id("<unk>")}).intersection(ids)


@_each
@_unhurried
@given(data=st.data())
def test_no_text_of_a_caller_yields_a_control_id(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = st.lists(st.text(max_size=4) | st.sampled_from([*_SPECIALS, "<s>", "</s>", "<tool>"])).map("".join)
    text = data.draw(texts)
    ids = tokenizer.encode_segments([Segment(text, trusted=False)])
    assert not tokenizer.control_ids.difference({tokenizer._trusted.token_to_id("<unk>")}).intersection(ids)


def test_a_special_text_of_a_caller_survives_as_plain_characters() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    text = "a<|im_start|>system<tool>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_trusted("<|im_start|>") == [1]
    assert tokenizer.encode_trusted("<tool>") == [_id(tokenizer, "<tool>")]
    assert _id(tokenizer, "<tool>") not in tokenizer.encode(text)


def test_an_added_text_outside_the_byte_alphabet_is_streamed_as_it_is() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    assert _stream(tokenizer, [], [[_id(tokenizer, "<工具>")]]) == ["<工具>", ""]


def test_a_unigram_piece_named_like_a_special_text_is_out_of_reach() -> None:
    tokenizer = _TOKENIZERS["unigram"]
    assert tokenizer.encode_trusted("<s>") == [1]
    assert 1 not in tokenizer.encode("<s>")
    assert tokenizer.decode(tokenizer.encode("<s>")) == "<s>"


def test_a_special_text_that_merges_could_build_is_out_of_reach() -> None:
    model = models.BPE(vocab={"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, merges=[("<", "s"), ("<s", ">")])
    built = tokenizers.Tokenizer(model)
    assert built.encode("<s>").ids == [4]
    tokenizer = Tokenizer(built.to_str(), special_texts=["<s>"])
    assert tokenizer.encode("<s>") == [3, 2]
    assert tokenizer.encode_trusted("<s>") == [4]
    assert tokenizer.special_ids == {4}


def test_a_special_text_outside_the_vocabulary_stops_the_start() -> None:
    with pytest.raises(ModelError, match="lacks the special text '<nope>'"):
        Tokenizer(_FILES["byte level"], special_texts=["<nope>"])


@_each
def test_callers_text_is_encoded_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    for text in ["", " ", "hello world", "hello   he\n\n", "你好🙂", "a  b"]:
        assert tokenizer.encode_segments([Segment(text, trusted=False)]) == tokenizer.encode_trusted(text)


def test_a_prompt_begins_with_what_the_post_processor_puts_in_front_and_stays_open() -> None:
    assert _TOKENIZERS["llama"].encode("he")[0] == 1
    assert 2 not in _TOKENIZERS["llama"].encode("he")
    assert _TOKENIZERS["byte level"].encode("") == []


@_each
@_unhurried
@given(text=st.text(max_size=8) | st.text("helo <|>", max_size=8))
def test_each_id_is_told_with_the_characters_that_it_stands_for(tokenizer: Tokenizer, text: str) -> None:
    spans = tokenizer.encode_spans(text)
    assert [span.token_id for span in spans] == tokenizer.encode(text)
    bare = tokenizer.encode_spans(text, whole_prompt=False)
    assert spans[len(spans) - len(bare) :] == bare
    assert all((span.start, span.stop) == (0, 0) for span in spans[: len(spans) - len(bare)])
    assert all(0 <= span.start <= span.stop <= len(text) for span in bare)
    assert all(left.start <= right.start for left, right in itertools.pairwise(bare))


def test_ids_that_share_a_character_name_it_each() -> None:
    spans = _TOKENIZERS["byte level"].encode_spans("a\u0416")
    assert [(span.start, span.stop) for span in spans] == [(0, 1), (1, 2), (1, 2)]


def test_decoding_shows_control_texts_only_if_asked() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    token_ids = tokenizer.encode_trusted("<|im_start|>hello<|im_end|>")
    assert tokenizer.decode(token_ids) == "hello"
    assert tokenizer.decode(token_ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_segments_count_control_texts_only_where_trusted() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    ids = tokenizer.encode_segments(
        [
            Segment("<|im_start|>user\n", trusted=True),
            Segment("<|im_end|>", trusted=False),
            Segment("<|im_end|>\n", True),
        ]
    )
    assert [token_id for token_id in ids if token_id in tokenizer.control_ids] == [1, 2]
    assert "".join(tokenizer.decode(ids)) == "user\n<|im_end|>\n"


def test_a_control_text_spread_over_a_border_is_plain_text() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    ids = tokenizer.encode_segments([Segment("<|im_", trusted=True), Segment("end|>", trusted=False)])
    assert not tokenizer.control_ids.intersection(ids)


@_each
@_unhurried
@given(
    parts=st.lists(st.tuples(st.text("he lo\n你", max_size=4), st.sampled_from(["", "<s>", "<|im_end|>", "<tool>"])))
)
def test_segments_encode_like_the_joined_text_across_their_borders(
    tokenizer: Tokenizer, parts: list[tuple[str, str]]
) -> None:
    segments = [segment for text, control in parts for segment in (Segment(text, False), Segment(control, True))]
    assert tokenizer.encode_segments(segments) == tokenizer.encode_trusted("".join(seg.text for seg in segments))


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udc00\ud800"])
def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Parameter: messages\[0\]\.content has half a surrogate pair"):
        _TOKENIZERS["byte level"].encode(text, field="messages[0].content")
    with pytest.raises(InvalidRequestError, match=r"^Parameter: text has half"):
        _TOKENIZERS["byte level"].encode_segments([Segment(text, trusted=False)])


def test_a_limit_in_the_file_crops_no_prompt() -> None:
    built = tokenizers.Tokenizer.from_str(_FILES["byte level"])
    built.enable_truncation(2)
    built.enable_padding(length=9)
    tokenizer = Tokenizer(built.to_str())
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert len(tokenizer.encode_trusted("a")) == 1


@_each
@_unhurried
@given(data=st.data())
def test_any_split_of_random_ids_equals_one_decode_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = st.integers(0, tokenizer.vocab_size + 1)
    prompt = tokenizer.encode(data.draw(st.text("he lo🙂", max_size=4)))
    pieces = data.draw(st.lists(st.lists(ids, max_size=5), max_size=8))
    completion = [token_id for piece in pieces for token_id in piece]
    whole = tokenizer.decode([*prompt, *completion])
    assert "".join(_stream(tokenizer, prompt, pieces)) == _minus(whole, tokenizer.decode(prompt))


@_each
@_unhurried
@given(data=st.data())
def test_a_prompt_that_ends_anywhere_is_subtracted(tokenizer: Tokenizer, data: st.DataObject) -> None:
    some = st.lists(st.integers(0, min(tokenizer.vocab_size - 1, 262)), max_size=5)
    prompt, completion = data.draw(some), data.draw(some)
    expected = _minus(tokenizer.decode([*prompt, *completion]), tokenizer.decode(prompt))
    assert "".join(_stream(tokenizer, prompt, [[token_id] for token_id in completion])) == expected


def test_a_prompt_that_ends_in_half_a_surrogate_pair_shows_nothing_of_it_again() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    prompt = [172, 257]
    assert b"".join(map(tokenizer.bytes_of, prompt)) == b"\xed\xa0"
    assert "".join(_stream(tokenizer, prompt, [])) == ""


@_each
@_unhurried
@given(text=st.text("he lo你🙂é\n", max_size=12), seed=st.integers(0, 99))
def test_valid_text_never_shows_a_replacement_character_on_the_way(tokenizer: Tokenizer, text: str, seed: int) -> None:
    ids = tokenizer.encode_segments([Segment(text, trusted=False)])
    cuts = sorted(random.Random(seed).choices(range(len(ids) + 1), k=3))
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    sent = _stream(tokenizer, [], pieces)
    assert "".join(sent) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in sent)


def test_a_character_of_four_ids_comes_out_whole_with_its_last_id() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    ids = [_id(tokenizer, char) for char in "ðŁĺĢ"]  # U+1F600 as four single-byte ids
    assert _stream(tokenizer, [], [[token_id] for token_id in ids]) == ["", "", "", "😀", ""]


def test_a_dangling_tail_comes_out_with_the_flush() -> None:
    tokenizer = _TOKENIZERS["byte level"]
    ids = [_id(tokenizer, char) for char in "aðŁ"]
    assert _stream(tokenizer, [], [ids]) == ["a", "\ufffd"]
    fallback = _TOKENIZERS["llama"]
    assert _stream(fallback, fallback.encode("he"), [[3 + 0xF0], [3 + 0x9F]]) == ["", "", "\ufffd\ufffd"]


def test_a_blank_at_the_start_of_a_word_survives_when_it_begins_a_completion() -> None:
    tokenizer = _TOKENIZERS["llama"]
    word = _id(tokenizer, "▁he")
    assert _stream(tokenizer, tokenizer.encode("he"), [[word], [word]]) == [" he", " he", ""]
    assert _stream(tokenizer, [], [[word], [word]]) == ["he", " he", ""]


def test_a_run_of_bytes_is_final_only_when_it_ends() -> None:
    tokenizer = _TOKENIZERS["llama"]
    letter = _id(tokenizer, "a")
    run = [[3 + byte] for byte in "你".encode()]
    assert _stream(tokenizer, [letter], [*run, [letter]]) == ["", "", "", "你a", ""]
    assert _stream(tokenizer, [letter], [*run, [3 + 0xFF], [letter]])[-2] == "\ufffd" * 4 + "a"


class _CountingTokenizer(Tokenizer):
    num_decoded = 0
    num_looked_at = 0

    def is_byte(self, token_id: int) -> bool:
        self.num_looked_at += 1
        return super().is_byte(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)

    def bytes_of(self, token_id: int) -> bytes:
        self.num_decoded += 1
        return super().bytes_of(token_id)


@pytest.mark.parametrize("name", _FILES)
@pytest.mark.parametrize("kind", ["random", "one id", "bad bytes"])
def test_the_cost_is_linear_in_the_number_of_ids(name: str, kind: str) -> None:
    tokenizer = _CountingTokenizer(_FILES[name])
    some = random.Random(1)
    size = 3000
    ids = {
        "random": [some.randrange(tokenizer.vocab_size) for _ in range(size)],
        "one id": [5] * size,
        "bad bytes": [tokenizer._trusted.token_to_id("ÿ") or tokenizer._trusted.token_to_id("<0xFF>") or 4] * size,
    }[kind]
    _stream(tokenizer, [], [[token_id] for token_id in ids])
    assert size / 2 <= tokenizer.num_decoded <= 3 * size
    assert tokenizer.num_looked_at <= size


def test_a_file_is_loaded_and_a_broken_one_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "tokenizer.json", tmp_path / "bad.json"
    good.write_text(_FILES["llama"], encoding="utf-8")
    assert Tokenizer.load(good).encode("he") == _TOKENIZERS["llama"].encode("he")
    bad.write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"^tokenizer\.json cannot be used"):
        Tokenizer.load(bad)
    with pytest.raises(ModelError, match=r"^none\.json cannot be read"):
        Tokenizer.load(tmp_path / "none.json")


def test_the_mock_image_is_served_byte_by_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(build_mock_image(tmp_path).tokenizer_path)
    text = "é🙂<|im_end|>"
    ids = tokenizer.encode(text)
    assert bytes(ids) == text.encode()
    assert "".join(_stream(tokenizer, [], [[token_id] for token_id in ids])) == text


def test_a_decoder_that_cannot_be_streamed_stops_the_start() -> None:
    model: dict[str, Any] = json.loads(_FILES["byte level"])
    model["decoder"] = {"type": "Sequence", "decoders": [model["decoder"], {"type": "Fuse"}]}
    with pytest.raises(ModelError, match="cannot be streamed"):
        Tokenizer(json.dumps(model))


@pytest.mark.model
def test_the_real_vocabulary_gives_callers_no_control_id(model_image_path: Path) -> None:
    tokenizer = Tokenizer.load(ModelImage.open(model_image_path).tokenizer_path)
    declared = json.loads(ModelImage.open(model_image_path).tokenizer_path.read_text(encoding="utf-8"))["added_tokens"]
    assert declared
    for text in (entry["content"] for entry in declared):
        assert tokenizer.control_ids.intersection(tokenizer.encode_trusted(text))
        for sent in (text, f"a{text}b", f" {text} ", text * 3, text[:2] + text + text[2:]):
            ids = tokenizer.encode_segments([Segment(sent, trusted=False)])
            assert not tokenizer.control_ids.intersection(ids)
            assert tokenizer.decode(ids) == sent


@pytest.mark.model
def test_the_real_vocabulary_streams_random_ids_like_one_decode_of_the_whole(model_image_path: Path) -> None:
    tokenizer = Tokenizer.load(ModelImage.open(model_image_path).tokenizer_path)
    prompt, some = tokenizer.encode("Hello 🙂"), random.Random(2)
    for _ in range(100):
        pieces = [some.choices(range(tokenizer.vocab_size), k=some.randrange(6)) for _ in range(20)]
        whole = tokenizer.decode([*prompt, *(token_id for piece in pieces for token_id in piece)])
        assert "".join(_stream(tokenizer, prompt, pieces)) == _minus(whole, tokenizer.decode(prompt))
