"""Check what a body of the Responses API asks for: its form, its functions, and what cannot go together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.server.bodies import parse_body
from inference_api.server.openai_responses.bodies import LOGPROBS, ResponsesBody
from inference_api.server.openai_responses.requests import functions_of, make_request, must_call
from inference_api.server.validation import NativeLimits

LIMITS = NativeLimits(context_tokens=64, vocab_size=20, stop_ids=frozenset({18, 19}))
SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}
TOOLS = [{"type": "function", "name": "f"}, {"type": "function", "name": "g", "strict": True}]


def parse(**members: Any) -> ResponsesBody:
    body = {"model": "mock", "input": "hi", **members}
    return parse_body(ResponsesBody, json.dumps(body).encode(), "application/json")


def test_the_priority_and_the_deadline_cross() -> None:
    request = make_request(parse(priority=4, deadline=0.5), [1], LIMITS)
    assert (request.priority, request.deadline_seconds) == (4, 0.5)
    request = make_request(parse(), [1], LIMITS)
    assert (request.priority, request.deadline_seconds) == (0, None)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar(GrammarKind.JSON_OBJECT, "", "text.format")),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False, "description": "d"},
            Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA), "text.format.schema"),
        ),
    ],
)
def test_the_format_is_the_form_of_the_answer(form: dict[str, Any] | None, expected: Grammar | None) -> None:
    assert make_request(parse(text={"format": form}), [1], LIMITS).grammar == expected
    assert make_request(parse(), [1], LIMITS).grammar is None


@pytest.mark.parametrize(
    ("form", "param", "text"),
    [
        ({"type": "json_schema", "name": "n"}, "text.format.schema", "Missing required parameter"),
        ({"type": "json_schema", "schema": {}}, "text.format.name", "Missing required parameter"),
        ({"type": "json_object", "schema": {}}, "text.format.schema", "only when text.format.type is json_schema"),
        ({"type": "text", "description": "d"}, "text.format.description", "only when text.format.type is json_schema"),
        ({"type": "text", "name": "n"}, "text.format.name", "only when text.format.type is json_schema; it is text."),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(form: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_request(parse(text={"format": form}), [1], LIMITS)
    assert caught.value.param == param
    assert param in str(caught.value) and text in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "names", "forced"),
    [
        (None, ["f", "g"], False),
        ("auto", ["f", "g"], False),
        ("required", ["f", "g"], True),
        ("none", [], False),
        ({"type": "function", "name": "g"}, ["g"], True),
    ],
)
def test_the_choice_says_which_functions_may_or_must_be_called(choice: Any, names: list[str], forced: bool) -> None:
    body = parse(tools=TOOLS, tool_choice=choice)
    assert ([function.name for function in functions_of(body)], must_call(body)) == (names, forced)


@pytest.mark.parametrize(
    ("members", "param", "text"),
    [
        ({"tools": [TOOLS[0]] * 2}, "tools", "tools[1].name: 'f' is given twice."),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "h"}}, "tool_choice", "none of the tools: f, g."),
        ({"tools": TOOLS, "include": [LOGPROBS]}, "include", "cannot go with tools"),
    ],
)
def test_tools_and_a_choice_that_do_not_fit_are_refused_by_name(members: Any, param: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        functions_of(parse(**members))
    assert caught.value.param == param and text in str(caught.value)
