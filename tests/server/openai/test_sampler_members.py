"""Check the members that come from llama.cpp and vLLM: types, bounds, what they become, and what they rule out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.sampling_params import SamplingParams
from inference_api.server.bodies import MAX_STOP_CHARS, parse_body
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.openai.bodies import ChatBody, CompletionBody, SamplingBody
from inference_api.server.openai.requests import make_request
from inference_api.server.openai.sampler_members import MAX_BAD_WORDS, SamplerBody, without_bad_words
from inference_api.server.openai.structured import StructuredBody
from inference_api.server.sampler_rules import MAX_BREAKERS
from inference_api.server.tokenizer import Span
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(context_tokens=10, vocab_size=20, stop_ids=frozenset({18, 19}))
LEAST: dict[type[SamplingBody], dict[str, Any]] = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "hello"}]},
    CompletionBody: {"model": "m", "prompt": "hello"},
}
BEAMS = {"use_beam_search": True, "temperature": 0}

# Member, good values (both bounds), bad ones.
VALUES: list[tuple[str, list[Any], list[Any]]] = [
    ("dry_multiplier", [0, 0.8, 100], [-0.1, 100.1, "1"]),
    ("dry_base", [1, 100], [0.99, 100.1, True]),
    ("dry_allowed_length", [1, 2**31 - 1], [0, 2**31, 1.5]),
    ("dry_penalty_last_n", [-1, 0, 2**31 - 1], [-2, 2**31, "0"]),
    (
        "dry_sequence_breakers",
        [[], ["x" * 40] * MAX_BREAKERS],
        ["x", [""], ["x" * 41], ["x"] * (MAX_BREAKERS + 1), [1]],
    ),
    ("top_n_sigma", [-1, 0, 100], [-1.1, 100.1, []]),
    ("xtc_probability", [0, 1], [-0.1, 1.1, "1"]),
    ("xtc_threshold", [0, 1], [-0.1, 1.1, "1"]),
    ("mirostat", [0, 1, 2], [3, -1, "2", 1.5]),
    ("mirostat_tau", [0, 100], [-0.1, 100.1, "5"]),
    ("mirostat_eta", [0, 1], [-0.1, 1.1, "1"]),
    ("bad_words", [[], ["x" * MAX_STOP_CHARS] * MAX_BAD_WORDS], ["x", [""], ["x" * 65], ["x"] * (MAX_BAD_WORDS + 1)]),
    ("include_stop_str_in_output", [True, False], [1, "true"]),
    ("use_beam_search", [True, False], [1, "true"]),
    ("length_penalty", [-10, 10], [-10.1, 10.1, "1"]),
    ("early_stopping", [True, False, "never"], ["always", 1]),
]


def parse(model: type[SamplingBody], /, **members: Any) -> SamplingBody:
    return parse_body(model, json.dumps({**LEAST[model], **members}).encode(), "application/json")


def make(**members: Any) -> GenerationRequest:
    return make_request(parse(CompletionBody, seed=7, **members), [1, 2, 3], LIMITS, max_tokens=5)


def refused(**members: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequestError) as caught:
        make(**members)
    return caught.value.param, str(caught.value)


def test_every_member_has_its_values_here() -> None:
    names = SamplerBody.model_fields.keys() - StructuredBody.model_fields.keys()
    assert [name for name, _, _ in VALUES] == [name for name in SamplerBody.model_fields if name in names]


@pytest.mark.parametrize("model", LEAST)
@pytest.mark.parametrize(("name", "good", "bad"), VALUES, ids=[name for name, _, _ in VALUES])
def test_values_within_the_bounds_are_taken_and_others_refused_by_name(
    model: type[SamplingBody], name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in (*good, None):
        assert getattr(parse(model, **{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidRequestError) as caught:
            parse(model, **{name: value})
        assert (caught.value.param or "").startswith(name), value


def test_what_was_sent_crosses_and_breakers_cross_as_bytes() -> None:
    assert make(
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_sequence_breakers=["\n", "é", "\n"],
        top_n_sigma=1.5,
        xtc_probability=0.5,
        xtc_threshold=0.2,
    ).sampling == SamplingParams(
        1.0,
        0,
        1.0,
        7,
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=3,
        dry_penalty_last_n=64,
        dry_sequence_breakers=(b"\n", b"\xc3\xa9"),
        top_n_sigma=1.5,
        xtc_probability=0.5,
        xtc_threshold=0.2,
    )
    mirostat = make(mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2).sampling
    assert mirostat == SamplingParams(1.0, 0, 1.0, 7, mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2)


def test_breakers_are_llama_cpps_unless_others_are_sent_and_cross_only_where_they_are_read() -> None:
    assert make(dry_multiplier=1).sampling.dry_sequence_breakers == (b"\n", b":", b'"', b"*")
    assert make(dry_multiplier=1, dry_sequence_breakers=[]).sampling.dry_sequence_breakers == ()
    off = make(dry_multiplier=0, dry_sequence_breakers=["x"], top_n_sigma=-1, xtc_probability=0, mirostat=0)
    assert off.sampling == SamplingParams(1.0, 0, 1.0, 7)


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"mirostat": 2, "top_k": 5}, "top_k"),
        ({"mirostat": 1, "top_p": 0.9}, "top_p"),
        ({"mirostat": 2, "min_p": 0.1}, "min_p"),
        ({"mirostat": 2, "typical_p": 0.9}, "typical_p"),
        ({"mirostat": 2, "top_n_sigma": 1}, "top_n_sigma"),
        ({"mirostat": 2, "xtc_probability": 0.1}, "xtc_probability"),
        ({"mirostat": 2, "temperature": 0}, "mirostat"),
        ({"xtc_probability": 0.1, "temperature": 0}, "xtc_probability"),
        ({"length_penalty": 1}, "length_penalty"),
        ({"early_stopping": False}, "early_stopping"),
        ({"bad_words": ["x"], "guided_regex": "a+"}, "bad_words"),
    ],
)
def test_what_makes_no_sense_together_is_refused_by_name(members: dict[str, Any], name: str) -> None:
    found, text = refused(**members)
    assert found == name and text.startswith(f"{name}: ")


def test_mirostat_goes_with_what_comes_before_the_temperature() -> None:
    sampling = make(
        mirostat=2, top_k=-1, top_p=1, repetition_penalty=1.1, dry_multiplier=1, logit_bias={"3": 1}
    ).sampling
    assert sampling.mirostat == 2 and sampling.repetition_penalty == 1.1 and sampling.dry_multiplier == 1


class Words:
    """Write a letter as its place in the alphabet, and one behind a blank as 10 more."""

    def encode_spans(self, text: str, *, field: str = "text", whole_prompt: bool = True) -> list[Span]:
        assert not whole_prompt
        ids, blank = [], 0
        for char in text:
            if char == " ":
                blank = 10
                continue
            ids.append(Span(ord(char) - ord("a") + blank, 0, 0))
            blank = 0
        return ids


def without(words: list[str], **members: Any) -> SamplingParams:
    generation = make(bad_words=words, **members)
    return without_bad_words([generation], words, Words(), LIMITS)[0].sampling  # type: ignore[arg-type]


def test_bad_words_are_encoded_once_whatever_the_number_of_prompts() -> None:
    class CountedWords(Words):
        num_encoded = 0

        def encode_spans(self, text: str, *, field: str = "text", whole_prompt: bool = True) -> list[Span]:
            self.num_encoded += 1
            return super().encode_spans(text, field=field, whole_prompt=whole_prompt)

    tokenizer, prompts = CountedWords(), [make(bad_words=["ab"]) for _ in range(32)]
    changed = without_bad_words(prompts, ["ab"], tokenizer, LIMITS)  # type: ignore[arg-type]
    assert [one.sampling.bad_sequences for one in changed] == [((0, 1), (10, 1))] * 32
    assert tokenizer.num_encoded == 2


def test_a_bad_word_is_ruled_out_with_and_without_a_blank_before_it() -> None:
    assert without(["a"]).banned_ids == (0, 10)
    sampling = without(["ab", "c", " ab"])
    assert sampling.banned_ids == (2, 12)
    assert sampling.bad_sequences == ((0, 1), (10, 1))
    assert without([]) == make().sampling


def test_bad_words_that_leave_nothing_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="bad_words: they leave no token"):
        without(["a", "b"], allowed_token_ids=[0, 1])
    assert without(["a"], allowed_token_ids=[0, 1]).banned_ids == (0, 10)
    with pytest.raises(InvalidRequestError, match="bad_words: they leave no token"):
        without(["a"], allowed_token_ids=[0, 18], min_tokens=1)
