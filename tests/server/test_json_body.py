"""Check which bytes are JSON for every surface, and that no object may have a name twice."""

from __future__ import annotations

import math

import pytest

from inference_api.server.json_body import DuplicateMemberError, parse_json


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b' {"a": [1, 2.5, "x", null, true]} ', {"a": [1, 2.5, "x", None, True]}),
        (b'{"a": {"a": 1}, "b": {"a": 1}}', {"a": {"a": 1}, "b": {"a": 1}}),
        ('"\u00e9\U0001f642"'.encode(), "\u00e9\U0001f642"),
        (b"[1e999]", [math.inf]),
    ],
)
def test_json_is_read(body: bytes, value: object) -> None:
    assert parse_json(body) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} {}",
        b"{\"a\": 'x'}",
        b'{"a": 1,}',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b"[" * 200_000,
        b"[" * 50_000 + b"]" * 50_000,
        b"9" * 5000,
    ],
    ids=[
        "none",
        "open",
        "two",
        "quotes",
        "comma",
        "utf8",
        "surrogate",
        "bom",
        "utf16",
        "deep",
        "deep closed",
        "digits",
    ],
)
def test_what_is_no_json_is_refused_as_one_kind_of_fault(body: bytes) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - json's own texts are nobody's business
        parse_json(body)
    assert not isinstance(caught.value, DuplicateMemberError)


@pytest.mark.parametrize(
    "body", [b'{"n": 1, "n": 1}', b'{"a": [{"b": {"n": 1, "m": 2, "n": 3}}]}', b'{"n": 1, "\\u006e": 2}']
)
def test_a_name_that_an_object_has_twice_is_told(body: bytes) -> None:
    with pytest.raises(DuplicateMemberError) as caught:
        parse_json(body)
    assert caught.value.name == "n"


def test_numbers_that_json_lacks_are_left_to_the_bounds() -> None:
    assert parse_json(b"[Infinity, -Infinity]") == [math.inf, -math.inf]
    value = parse_json(b"NaN")
    assert isinstance(value, float) and math.isnan(value)
