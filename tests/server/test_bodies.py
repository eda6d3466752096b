"""Check how a body of any modern surface is parsed: strictly, with the place, the value and the bound of a fault."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import StopText, StrictModel, TokenId, TokenIds, parse_body

JSON = "application/json"


class Part(StrictModel):
    type: Literal["text"]
    text: str


class Turn(StrictModel):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]


class Sample(StrictModel):
    name: str = "x"
    count: int | None = Field(None, ge=1, le=3)
    share: float | None = Field(None, gt=0, le=1)
    flag: bool | None = None
    biases: dict[str, Annotated[float, Field(le=100)]] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=2)] | None = None
    prompt: str | list[str] | list[TokenId] | list[Annotated[list[TokenId], Field(min_length=1)]] | None = None
    input: str | list[Turn] | None = None


def parse(body: bytes | str, content_type: str | None = JSON) -> Sample:
    return parse_body(Sample, body.encode() if isinstance(body, str) else body, content_type)


def fault(body: bytes | str, content_type: str | None = JSON) -> tuple[str, str | None]:
    """Return the text and the member of the 400 for a body."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(body, content_type)
    return str(caught.value), caught.value.param


@pytest.mark.parametrize("content_type", [JSON, "Application/JSON; charset=utf-8", "application/json;x=y"])
def test_json_is_taken_in_any_case_with_any_parameter(content_type: str) -> None:
    assert parse("{}", content_type).name == "x"


def test_no_string_of_a_body_is_kept_for_the_next_one() -> None:
    assert (
        parse('{"prompt": "what is my diagnosis?"}').prompt is not parse('{"prompt": "what is my diagnosis?"}').prompt
    )


@pytest.mark.parametrize("content_type", [None, "", "text/plain", "application/jsonx", "multipart/form-data"])
def test_a_body_that_is_not_declared_json_is_refused(content_type: str | None) -> None:
    assert fault("{}", content_type) == ("The body must be JSON: send Content-Type: application/json.", None)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"name": "\xff"}', b'\xef\xbb\xbf{"name": "x"}', '{"name": "x"}'.encode("utf-16"), b"[" * 100_000],
    ids=["none", "open", "utf8", "bom", "utf16", "deep"],
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    assert fault(body) == ("The body is not valid JSON.", None)


@pytest.mark.parametrize(("body", "shown"), [("[]", "a list of 0"), ("1", "1"), ("null", "null"), ('"x"', '"x"')])
def test_a_body_that_is_no_object_is_refused(body: str, shown: str) -> None:
    assert fault(body) == (f"The body: Input should be an object; it is {shown}.", None)


@pytest.mark.parametrize(
    ("member", "text", "param"),
    [
        ('"nope": 1', "Unknown parameter: nope.", "nope"),
        ('"a b.c[0]": 1', "Unknown parameter: a b.c[0].", "a b.c[0]"),
        ('"": 1', "Unknown parameter: .", ""),
        ('"input": [{"role": "user", "content": "x", "n": 1}]', "Unknown parameter: input[0].n.", "input[0].n"),
        (
            '"input": [{"role": "user", "content": [{"type": "text", "text": "x", "n": 1}]}]',
            "Unknown parameter: input[0].content[0].n.",
            "input[0].content[0].n",
        ),
    ],
)
def test_an_unknown_member_is_refused_by_its_name(member: str, text: str, param: str) -> None:
    assert fault(f"{{{member}}}") == (text, param)


def test_a_long_name_of_a_caller_is_cut() -> None:
    text, param = fault(json.dumps({"n" * 1000: 1}))
    assert text == f"Unknown parameter: {'n' * 64}…." and param == "n" * 64 + "…"


def test_a_missing_member_is_named_with_its_place() -> None:
    assert fault('{"input": [{"role": "user", "content": "x"}, {"role": "user"}]}') == (
        "Missing required parameter: input[1].content.",
        "input[1].content",
    )


@pytest.mark.parametrize(
    ("member", "param", "told", "shown"),
    [
        ('"name": 1', "name", "a valid string", "1"),
        ('"name": null', "name", "a valid string", "null"),
        ('"name": ["x"]', "name", "a valid string", "a list of 1"),
        ('"name": {}', "name", "a valid string", "an object of 0"),
        ('"count": "1"', "count", "a valid integer", '"1"'),
        ('"count": 1.0', "count", "a valid integer", "1.0"),
        ('"count": true', "count", "a valid integer", "true"),
        ('"count": 0', "count", "greater than or equal to 1", "0"),
        ('"count": 4', "count", "less than or equal to 3", "4"),
        ('"share": "0.5"', "share", "a valid number", '"0.5"'),
        ('"share": 0', "share", "greater than 0", "0"),
        ('"share": NaN', "share", "a finite number", "NaN"),
        ('"share": Infinity', "share", "a finite number", "Infinity"),
        ('"share": 1e999', "share", "a finite number", "Infinity"),
        ('"flag": 1', "flag", "a valid boolean", "1"),
        ('"flag": "true"', "flag", "a valid boolean", '"true"'),
        ('"biases": [1]', "biases", "an object", "a list of 1"),
        ('"biases": {"7": "x"}', "biases[7]", "a valid number", '"x"'),
        ('"biases": {"7": 101}', "biases[7]", "less than or equal to 100", "101"),
        ('"biases": {"a b": "x"}', "biases.a b", "a valid number", '"x"'),
    ],
)
def test_a_fault_tells_place_bound_and_value(member: str, param: str, told: str, shown: str) -> None:
    assert fault(f"{{{member}}}") == (f"{param}: Input should be {told}; it is {shown}.", param)


@pytest.mark.parametrize("member", ['"count": 1', '"count": 3', '"share": 1', '"count": null', '"flag": false'])
def test_bounds_are_within_and_null_is_absent(member: str) -> None:
    assert parse(f"{{{member}}}")


@pytest.mark.parametrize(
    ("value", "param", "told"),
    [
        ('"stop": ""', "stop", "String should have at least 1 character"),
        ('"stop": "' + "x" * 65 + '"', "stop", "String should have at most 64 characters"),
        ('"stop": 1', "stop", "Input should be a valid string"),
        ('"stop": ["a", ""]', "stop[1]", "String should have at least 1 character"),
        ('"stop": ["a", 1]', "stop[1]", "Input should be a valid string"),
        ('"stop": ["a", "b", "c"]', "stop", "List should have at most 2 items, not 3"),
        ('"prompt": 1', "prompt", "Input should be a valid string"),
        ('"prompt": [1, "x"]', "prompt[1]", "Input should be a valid integer"),
        ('"prompt": ["x", 1]', "prompt[1]", "Input should be a valid string"),
        ('"prompt": [[1], "x"]', "prompt[1]", "Input should be a valid array"),
        ('"prompt": [[1, -1]]', "prompt[0][1]", "Input should be greater than or equal to 0"),
        ('"prompt": [[1], []]', "prompt[1]", "List should have at least 1 item, not 0"),
        ('"prompt": [true]', "prompt[0]", "Input should be a valid string"),
        ('"input": 1', "input", "Input should be a valid string"),
        ('"input": [1]', "input[0]", "Input should be an object"),
        ('"input": [{"role": "tool", "content": "x"}]', "input[0].role", "Input should be 'user' or 'assistant'"),
        ('"input": [{"role": "user", "content": 1}]', "input[0].content", "Input should be a valid string"),
        (
            '"input": [{"role": "user", "content": []}]',
            "input[0].content",
            "List should have at least 1 item, not 0",
        ),
        (
            '"input": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]',
            "input[0].content[0].type",
            "Input should be 'text'",
        ),
        (
            '"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": 1}]}]',
            "input[1].content[0].text",
            "Input should be a valid string",
        ),
    ],
)
def test_of_several_types_the_one_that_was_meant_tells_the_fault(value: str, param: str, told: str) -> None:
    text, found = fault(f"{{{value}}}")
    assert (found, text.split(": ", 1)[1].rsplit("; it is", 1)[0]) == (param, told)


def test_the_first_fault_is_told() -> None:
    turns = '[{"role": "x", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": 1}]}]'
    assert fault(f'{{"input": {turns}, "count": 9, "nope": 1}}')[1] == "count"
    assert fault(f'{{"input": {turns}}}')[1] == "input[0].role"


@pytest.mark.parametrize(
    ("body", "name"),
    [('{"name": "a", "name": "a"}', "name"), ('{"input": [{"role": "user", "role": "user"}]}', "role")],
)
def test_a_member_that_comes_twice_is_refused(body: str, name: str) -> None:
    assert fault(body) == (f"{name}: is given more than once; send it once.", name)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ('{"name": "ok\\ud800"}', "name"),
        ('{"input": [{"role": "user", "content": "\\udc00"}]}', "input[0].content"),
        ('{"stop": ["a", "\\ud83d"]}', "stop[1]"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_place(body: str, place: str) -> None:
    assert fault(body)[0].startswith(f"Parameter: {place} has half a surrogate pair")


class IdsBody(StrictModel):
    """A body of one long list."""

    ids: TokenIds


def test_a_long_list_of_wrong_ids_is_refused_by_the_first_without_a_fault_for_each() -> None:
    body = f'{{"ids": [{"-1," * 20_000}-1]}}'.encode()
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError, match=r"^ids\[0\]: "):
            parse_body(IdsBody, body, JSON)
        _now, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 20 * len(body)


def test_long_names_around_a_value_are_not_copied_for_each_depth() -> None:
    depth, name = 400, "n" * 500
    body = f'{{"{name}":' * depth + "1" + "}" * depth
    tracemalloc.start()
    try:
        fault(body)
        _now, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 20 * len(body)


def test_a_pair_is_a_character() -> None:
    assert parse('{"name": "\\ud83d\\ude42"}').name == "\U0001f642"


def test_a_name_with_half_a_surrogate_pair_is_no_json_and_breaks_nothing() -> None:
    text, _ = fault('{"\\ud800": 1}')
    json.dumps(text).encode()


@given(st.text(max_size=200))
def test_a_value_of_a_caller_is_shown_in_few_characters(value: str) -> None:
    text, _ = fault(json.dumps({"count": value}))
    assert len(text) < 150


_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(Sample.model_fields)) | st.text(max_size=4), _VALUES, max_size=4))
def test_any_object_is_parsed_or_refused_with_a_text_that_can_be_sent(members: dict[str, Any]) -> None:
    try:
        parse(json.dumps(members))
    except InvalidRequestError as error:
        told = str(error), error.param
    else:
        return
    json.dumps(told).encode()


@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    with contextlib.suppress(InvalidRequestError):
        parse(body)
