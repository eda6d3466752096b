"""Check the native bodies: golden pairs, every bound from both sides, and that nothing but a 400 can come out."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.errors import InvalidRequestError, PromptTooLongError
from inference_api.sampling_params import SamplingParams
from inference_api.server.body_fields import Field
from inference_api.server.validation import NATIVE_FIELDS, NativeLimits, NativeRequest, parse_native

_unhurried = settings(deadline=None)  # a busy machine is slow, not wrong
_DATA = Path(__file__).parents[1] / "data"
_LIMITS = NativeLimits(context_tokens=2048, eos_text="<|im_end|>", vocab_size=2048, stop_ids=frozenset({2}))
_BOUNDED = [field for field in NATIVE_FIELDS if field.bounds and not field.max_entries]
_JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["1", "1.5", "true", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _golden(name: str) -> list[Any]:
    pairs: list[Any] = json.loads((_DATA / name).read_text(encoding="utf-8"))
    return [pytest.param(pair, id=pair["name"]) for pair in pairs]


def _parse(body: bytes | str, **members: object) -> NativeRequest:
    data = body if isinstance(body, bytes) else body.encode()
    return parse_native(data, "application/json", _LIMITS, **members)  # type: ignore[arg-type]


def _parse_members(**members: object) -> NativeRequest:
    return _parse(json.dumps({"text": "hi", **members}))


@pytest.mark.parametrize("pair", _golden("validation_valid.json"))
def test_a_valid_body_makes_the_golden_request(pair: dict[str, Any]) -> None:
    request = _parse(pair["body"], allow_rag_context=pair["allow_rag_context"])
    assert dataclasses.asdict(request) == pair["expected"]
    assert [type(value) for value in dataclasses.asdict(request).values()] == [
        type(value) for value in pair["expected"].values()
    ]


@pytest.mark.parametrize("pair", _golden("validation_invalid.json"))
def test_an_invalid_body_gives_the_golden_text(pair: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_native(pair["body"].encode(), pair["content_type"], _LIMITS, allow_rag_context=pair["allow_rag_context"])
    assert str(caught.value) == pair["message"]


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("field", _BOUNDED, ids=lambda field: field.name)
def test_every_bound_is_inclusive_and_what_lies_just_outside_is_refused(field: Field, as_text: bool) -> None:
    assert field.bounds is not None
    low, high = field.bounds
    below, above = (low - 1, high + 1) if field.kind is int else (math.nextafter(low, -1e9), math.nextafter(high, 1e9))
    send = repr if as_text else lambda value: value
    for value in (low, high):
        assert getattr(_parse_members(**{"max_tokens": 2048, field.name: send(value)}), field.name) == value
    for value in (below, above):
        with pytest.raises(InvalidRequestError) as caught:
            _parse_members(**{field.name: send(value)})
        assert str(caught.value) == (
            f"Parameter: {field.name}={value} is outside bounds, {low} <= {field.name} <= {high}."
        )


def test_listed_ids_cross_once_each_and_options_that_are_off_do_not_cross() -> None:
    off = _parse_members(min_p=0, banned_token_ids=[], logit_bias={}).sampling(9)
    assert off == SamplingParams(1.0, 40, 0.9, 9)
    assert len(msgspec.msgpack.encode(off)) == len(msgspec.msgpack.encode(SamplingParams(1.0, 40, 0.9, 9)))
    request = _parse_members(allowed_token_ids=[3, "4", 3], logit_bias={"7": "-1.5"}, min_p=0.5, banned_token_ids=[4])
    assert request.sampling(9) == SamplingParams(
        1.0, 40, 0.9, 9, min_p=0.5, logit_bias={7: -1.5}, allowed_ids=(3, 4), banned_ids=(4,)
    )


def test_a_whole_vocabulary_that_is_banned_or_ends_is_refused() -> None:
    limits = NativeLimits(vocab_size=3, stop_ids=frozenset({2}))

    def parse(**members: object) -> NativeRequest:
        return parse_native(json.dumps({"text": "hi", **members}).encode(), "application/json", limits)

    assert parse(banned_token_ids=[0, 1]).banned_token_ids == [0, 1]
    assert parse(banned_token_ids=[0, 1], min_tokens=1, ignore_eos=True).min_tokens == 1
    with pytest.raises(InvalidRequestError, match="holds all 3 ids that may be drawn, at most 2 are allowed"):
        parse(banned_token_ids=[0, 1, 2, 2])
    with pytest.raises(InvalidRequestError, match=r"min_tokens <= 0: all 1 ids that may be drawn end the answer"):
        parse(banned_token_ids=[0, 1], min_tokens=1)


def test_one_entry_too_many_is_refused_and_one_fewer_is_not() -> None:
    for field in NATIVE_FIELDS:
        if field.max_entries:
            entries: Any = [1 if field.entry is int else "a"] * (field.max_entries + 1)
            if field.kind is dict:
                entries = {str(token_id): 1.0 for token_id in range(field.max_entries + 1)}
            with pytest.raises(InvalidRequestError, match=f"{field.name} has {field.max_entries + 1} entries, at most"):
                _parse_members(**{field.name: entries})
            entries.pop() if isinstance(entries, list) else entries.popitem()
            assert len(getattr(_parse_members(**{field.name: entries}), field.name)) == field.max_entries


@pytest.mark.parametrize(
    "content_type",
    ["application/json", "Application/JSON; charset=utf-8", "application/json;charset=x", "application/vnd.a+json"],
)
def test_json_content_types_are_accepted_in_any_case_with_any_parameter(content_type: str) -> None:
    assert parse_native(b'{"text": "hi"}', content_type, _LIMITS).text == "hi"


@pytest.mark.parametrize("content_type", ["", "json", "text/json", "application/jsonx", "application/+json", "+json"])
def test_other_content_types_are_refused(content_type: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Request was not JSON$"):
        parse_native(b'{"text": "hi"}', content_type, _LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "\xff"}',
        b'{"text": "\xed\xa0\x80"}',
        b'\xef\xbb\xbf{"text": "hi"}',
        '{"text": "hi"}'.encode("utf-16"),
        '{"text": "hi"}'.encode("utf-16-le"),
        '{"text": "hi"}'.encode("utf-32"),
        b'{"text": ' + b"[" * 100_000,
        b'{"text": "hi", "top_k": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"text": "hi", "top_k": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
    ],
    ids=["utf8", "surrogate", "bom", "utf16", "utf16le", "utf32", "deep", "deep and closed", "digits", "arrays"],
)
def test_bodies_that_break_parsers_are_malformed(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"^Malformed JSON request body\.$"):
        _parse(body)


def test_a_number_text_of_many_digits_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="expected <class 'int'>"):
        _parse_members(top_k="9" * 5000)
    with pytest.raises(InvalidRequestError, match="expected <class 'float'>"):
        _parse_members(temperature="9" * 5000)


def test_a_label_of_128_characters_is_accepted() -> None:
    assert _parse_members(session_id="x" * 128).session_id == "x" * 128


def test_the_table_and_the_request_name_the_same_members() -> None:
    names = {field.name for field in dataclasses.fields(NativeRequest)}
    assert names == {field.name for field in NATIVE_FIELDS}


def test_an_answer_gets_the_room_that_the_prompt_leaves() -> None:
    limits = NativeLimits(context_tokens=10)
    assert limits.fit_max_tokens(5, 4) == 5
    assert limits.fit_max_tokens(7, 4) == 6
    assert limits.fit_max_tokens(7, 9) == 1
    assert limits.fit_max_tokens(7, 10) == 1
    assert limits.fit_max_tokens(7, 4, 6) == 6


def test_a_prompt_over_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLongError, match="is 11 tokens long and the context is 10"):
        NativeLimits(context_tokens=10).fit_max_tokens(1, 11)


@_unhurried
@given(
    st.dictionaries(st.sampled_from([field.name for field in NATIVE_FIELDS]) | st.text(), _JSON_VALUES), st.booleans()
)
def test_any_json_object_makes_a_request_within_the_bounds_or_a_400(members: dict[str, Any], allow: bool) -> None:
    try:
        request = _parse(json.dumps({"text": "hi", **members}), allow_rag_context=allow)
    except InvalidRequestError as error:
        str(error).encode("ascii")
        return
    for field in NATIVE_FIELDS:
        value = getattr(request, field.name)
        assert value is None or type(value) is field.kind
        bounded: list[Any] = list(value.values()) if isinstance(value, dict) else [value]
        if field.entry is str:
            bounded = [len(entry) for entry in getattr(request, field.name) or []]
        assert not field.bounds or value is None or all(field.bounds[0] <= n <= field.bounds[1] for n in bounded)
        ids = value if isinstance(value, list | dict) and field.entry is not str else []
        assert all(0 <= token_id < _LIMITS.vocab_size for token_id in ids)
        str(value).encode("utf-8")


@_unhurried
@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")) | _JSON_VALUES.map(json.dumps))
def test_any_bytes_as_body_make_a_request_or_a_400(body: bytes | str) -> None:
    try:
        assert isinstance(_parse(body), NativeRequest)
    except InvalidRequestError:
        return


def test_a_prompt_that_leaves_no_room_for_min_tokens_is_refused_with_both_numbers() -> None:
    text = (
        r"^Parameter: min_tokens=7 is outside bounds, 0 <= min_tokens <= 6: "
        r"the prompt is 4 tokens long and the context is 10\.$"
    )
    with pytest.raises(InvalidRequestError, match=text):
        NativeLimits(context_tokens=10).fit_max_tokens(7, 4, 7)
