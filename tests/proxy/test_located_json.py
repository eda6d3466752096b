"""Check that a settings file is read strictly, and that each fault names the line and the member, and no value."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.located_json import FileFault, MemberFault, dotted, parse_located

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON_VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
def test_what_json_writes_is_read_as_it_was(value: object, indent: int | str | None, plain: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=plain)
    assert parse_located(text.encode(), "f").value == value


def test_each_member_knows_its_line() -> None:
    located = parse_located(b'\n{"a": 1,\n "b": {\n  "c": [\n   1, {"d":\n 2}]}}\n', "f")
    assert located.value == {"a": 1, "b": {"c": [1, {"d": 2}]}}
    lines = {(): 2, ("a",): 2, ("b",): 3, ("b", "c"): 4, ("b", "c", 0): 5, ("b", "c", 1): 5, ("b", "c", 1, "d"): 5}
    assert {path: located.line_of(path) for path in lines} == lines
    assert located.line_of(("b", "c", 7)) == located.line_of(("b", "c", 7, "x")) == 4, (
        "a missing member stands where it would be"
    )


def test_a_fault_of_a_member_is_told_with_file_line_and_place() -> None:
    located = parse_located(b'{"keys": {\n "a": {"alg": 1}}}', "policy.json")
    fault = located.fault("policy.json", MemberFault("must be a string", ("keys", "a", "alg")))
    assert str(fault) == "policy.json:2: keys.a.alg: must be a string"
    assert str(located.fault("policy.json", MemberFault("is wrong"))) == "policy.json:1: is wrong"


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b'{"a": 1,\n\n"a": 2}', "f:3: a: stands here a second time"),
        (b'{"a": {"b": 1,\n"\\u0062": 2}}', "f:2: a.b: stands here a second time"),
        (b'{"a":\n nope}', "f:2: a: a JSON value is expected"),
        (b'{"a": NaN}', "f:1: a: a JSON value is expected"),
        (b'{"a": [1, -Infinity]}', "f:1: a[1]: a JSON value is expected"),
        (b'{"a": 1e999}', "f:1: a: is not a finite number"),
        (b'{"a": 01}', "f:1: a: ',' is expected"),
        (b'{"a": ' + b"1" * 33 + b"}", "f:1: a: a JSON value is expected"),
        (b'{"a" 1}', "f:1: a: ':' is expected"),
        (b'{"a": 1 "b"}', "f:1: a: ',' is expected"),
        (b'{"a": [1 2]}', "f:1: a[0]: ',' is expected"),
        (b'{"a": 1,}', "f:1: a member name in double quotes is expected"),
        (b'{"a": {x: 1}}', "f:1: a: a member name in double quotes is expected"),
        (b'{"a": "x\ny"}', "f:1: a: is not a JSON string"),
        (b'{"a": "\\ud800"}', "f:1: a: is not a JSON string"),
        (b'{"a": "x', "f:1: a: is not a JSON string"),
        (b'{"a": 1}\n}', "f:2: something follows the end of the JSON text"),
        (b"", "f:1: a JSON value is expected"),
        (b'\xef\xbb\xbf{"a": 1}', "f:1: a JSON value is expected"),
        (b'{"a":\n"\xff"\n}', "f:2: is not UTF-8"),
        (b"\n\xff", "f:2: is not UTF-8"),
        (b"[" * 18 + b"]" * 18, "f:1: " + dotted((0,) * 17) + ": is nested too deep"),
        (b"[" * 100_000, "f:1: " + dotted((0,) * 17) + ": is nested too deep"),
    ],
)
def test_a_text_that_is_not_strict_json_is_refused_with_its_line(raw: bytes, fault: str) -> None:
    with pytest.raises(FileFault) as caught:
        parse_located(raw, "f")
    assert str(caught.value) == fault


def test_seventeen_levels_are_read() -> None:
    assert parse_located(b"[" * 17 + b"]" * 17, "f").value


@pytest.mark.parametrize("name", ["a b", "\x1b[31m", "é", "x" * 65, ""])
def test_a_name_that_could_disturb_a_log_is_not_repeated(name: str) -> None:
    assert dotted(("keys", name, 3)) == "keys.?[3]"


def test_a_name_is_shown_where_it_is_visible_ascii_of_64_characters_at_most() -> None:
    shown = {character for character in map(chr, range(128)) if dotted((character,)) == character} - {"?"}
    assert shown == set(map(chr, range(0x21, 0x7F))) - {"?"}
    assert dotted(("x" * 64,)) == "x" * 64
    assert dotted(("a", 0, "b", 1, 2)) == "a[0].b[1][2]"


@pytest.mark.parametrize("text", ["0", "-0", "10", "9" * 32, "-1", "0.5", "1E5", "1e+05", "2.50e-7", "true", "null"])
def test_a_number_or_a_name_is_read_as_json_says(text: str) -> None:
    value = parse_located(text.encode(), "f").value
    assert value == json.loads(text) and type(value) is type(json.loads(text))


@pytest.mark.parametrize(
    "text", ["+1", ".5", "1.", "1e", "1e+", "1.e5", "-", "00", "1_0", "0x1", "True", "nulls", "tru"]
)
def test_another_spelling_of_a_number_or_a_name_is_refused(text: str) -> None:
    with pytest.raises(FileFault, match=r"^f:1: (a JSON value is expected|something follows the end)"):
        parse_located(text.encode(), "f")


@pytest.mark.parametrize("form", ["{}", "1{}", "-{}", "1.{}", "1.5{}", "1e{}", "1e-{}", "1e5{}", "[1]{}", '"a"{}'])
def test_any_one_character_is_judged_as_json_judges_it(form: str) -> None:
    for character in map(chr, range(128)):
        text = form.format(character)
        try:
            expected = [json.loads(text)]
        except ValueError:
            expected = []
        try:
            read = [parse_located(text.encode(), "f").value]
        except FileFault:
            read = []
        assert read == expected, text


def test_blank_is_what_json_says_it_is() -> None:
    assert parse_located(b" \t\r\n[ \t\r\n1 \t\r\n, \t\r\n{ \t\r\n}, [ \t\r\n]] \t\r\n", "f").value == [1, {}, []]
    assert parse_located(b'{"a":1,"b":[2,3]}', "f").value == {"a": 1, "b": [2, 3]}
    for blank in (b"\x0b", b"\x0c", b"\xc2\xa0", b"\x00"):
        with pytest.raises(FileFault):
            parse_located(blank + b"1", "f")
