"""Check the one spelling of a compact JWS, its sizes to the byte, and strict JSON, each with its fixed text."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.jws import ShapeError, decode_base64url, parse_compact, parse_object
from tests.proxy.signing import encode_part

NOT_PARTS = "JWT is not three base64url parts."
NOT_JSON = "JWT is not valid JSON."


def fault(text: str, **sizes: int) -> str:
    with pytest.raises(ShapeError) as caught:
        parse_compact(text, **sizes)
    return str(caught.value)


def json_fault(raw: bytes) -> str:
    with pytest.raises(ShapeError) as caught:
        parse_object(raw)
    return str(caught.value)


def compact(head: bytes = b'{"a":1}', payload: bytes = b"p", signature: bytes = b"s") -> str:
    return ".".join(map(encode_part, (head, payload, signature)))


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-9, 9)), st.binary(min_size=1))
def test_the_parts_come_back_decoded(head: dict[str, int], payload: bytes) -> None:
    raw_head = json.dumps(head).encode()
    if len(raw_head) > 500 or len(payload) > 2000:
        return
    text = compact(raw_head, payload, b"sig")
    jws = parse_compact(text)
    assert (jws.header, jws.payload, jws.signature) == (head, payload, b"sig")
    assert jws.signing_input == text.rpartition(".")[0].encode()


def test_a_text_is_bounded_before_it_is_decoded() -> None:
    text = compact(payload=b"p" * 6000)
    assert parse_compact(text, max_bytes=len(text)).signature == b"s"
    assert fault(text, max_bytes=len(text) - 1) == "JWT is too long."
    longest = compact(payload=b"p" * 6000, signature=b"s" * 135)
    assert len(longest) == 8192 and parse_compact(longest)
    assert fault(longest + "A") == "JWT is too long."


def test_a_header_is_bounded_before_it_is_decoded() -> None:
    head = b'{"a":"' + b"b" * 504 + b'"}'
    assert len(head) == 512 and parse_compact(compact(head))
    assert fault(compact(head[:-2] + b'b"}')) == "JWT header is too long."
    assert parse_compact(compact(b'{"a":1}'), max_header_bytes=7)
    assert fault(compact(b'{"a":1}'), max_header_bytes=6) == "JWT header is too long."
    assert fault("!" * 9000) == "JWT is too long.", "the size is looked at first"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.b",
        "..",
        "e30..e30",
        "e30.e30.",
        ".e30.e30",
        "e30.e30.e30.e30",
        "e30.e30.e30.",
        "e30.e30.e30.e30.e30",
        "e30=.e30.e30",
        "e30.e30.e30==",
        " e30.e30.e30",
        "e30.e30.e30\n",
        "e30.e30.e30\0",
        "e30.e+/0.e30",
        "e30.e30.é",
        "e30.e30.\ud800",
        '{"payload":"e30","protected":"e30","signature":"e30"}',
        "e31.e30.e30",
        "e30.e31.e30",
        "e30.e30.e31",
        "e30.e30.A",
        "e30.AAAAA.e30",
    ],
)
def test_another_spelling_is_refused(text: str) -> None:
    assert fault(text) == NOT_PARTS


@settings(deadline=None)
@given(st.binary())
def test_bytes_have_one_spelling(raw: bytes) -> None:
    encoded = encode_part(raw)
    assert decode_base64url(encoded) == raw
    for other in (encoded + "=", encoded + "\n", base64.b64encode(raw).decode() + "="):
        with pytest.raises(ShapeError, match=NOT_PARTS):
            decode_base64url(other)


def test_every_character_of_the_alphabet_may_be_the_last() -> None:
    for last in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_":
        assert encode_part(decode_base64url("AAA" + last)) == "AAA" + last


def test_strict_json_objects_are_read() -> None:
    assert parse_object(b'{"a":[1,-2.5e3,true,null,"\\ud83d\\ude00"]}') == {"a": [1, -2500.0, True, None, "😀"]}
    assert parse_object(b'{"a":' + b"9" * 20 + b"}") == {"a": 10**20 - 1}
    assert parse_object(b'{"a":{"b":1},"b":{"b":2}}') == {"a": {"b": 1}, "b": {"b": 2}}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":1,"a":1}',
        b'{"a":1,"\\u0061":2}',
        b'{"x":{"a":1,"a":1}}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":-1e999}',
        b'{"a":' + b"9" * 21 + b"}",
        b'{"a":-' + b"9" * 20 + b"}",
        b'{"a":"\\ud800"}',
        b'{"\\udc00":1}',
        b'{"a":01}',
        b'{"a":1,}',
        b'{"a":1} x',
        b'{"a":1}{"a":1}',
        b"{'a':1}",
        b'{"a":"\n"}',
        b"\xef\xbb\xbf{}",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32-be"),
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xc0\x80"}',
        b"[" * 5000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"",
    ],
)
def test_what_two_readers_could_take_for_two_things_is_refused(raw: bytes) -> None:
    assert json_fault(raw) == NOT_JSON


@pytest.mark.parametrize("raw", [b"[]", b'"a"', b"1", b"null", b"true"])
def test_another_json_value_is_refused(raw: bytes) -> None:
    assert json_fault(raw) == "JWT header and payload must be JSON objects."
