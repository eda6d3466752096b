"""Check how the members that ask for a form become one grammar, and which are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.server.bodies import parse_body
from inference_api.server.openai.bodies import ChatBody, CompletionBody
from inference_api.server.openai.requests import make_request
from inference_api.server.validation import NativeLimits

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
LIMITS = NativeLimits(context_tokens=64, vocab_size=20, stop_ids=frozenset({18, 19}))
FORM = {"type": "json_schema", "json_schema": {"name": "a-1", "schema": SCHEMA, "strict": True, "description": "x"}}


def grammar(model: type[ChatBody] | type[CompletionBody] = ChatBody, **members: Any) -> Grammar | None:
    least = {"messages": [{"role": "user", "content": "x"}]} if model is ChatBody else {"prompt": "x"}
    body = parse_body(model, json.dumps({"model": "m", **least, **members}).encode(), "application/json")
    return make_request(body, [1], LIMITS, max_tokens=9).grammar


def refused(**members: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequestError) as caught:
        grammar(**members)
    return str(caught.value), caught.value.param


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
@pytest.mark.parametrize(
    ("members", "kind", "text", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        ({"response_format": FORM}, "json_schema", TEXT, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "json_schema", TEXT, "response_format.value"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": TEXT}}, "json_schema", TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", '["a", "\\u00fc"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"', "structured_outputs.grammar"),
        ({"guided_json": SCHEMA}, "json_schema", TEXT, "guided_json"),
        ({"guided_json": TEXT}, "json_schema", TEXT, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", '["a"]', "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "lark", 'start: "a"', "guided_grammar"),
        ({"json_schema": SCHEMA}, "json_schema", TEXT, "json_schema"),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"', "grammar"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_member_makes_its_grammar(model: Any, members: Any, kind: str, text: str, field: str) -> None:
    assert grammar(model, **members) == Grammar(GrammarKind(kind), text, field)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "grammar": None},
    ],
)
def test_without_a_form_there_is_no_grammar(members: Any) -> None:
    assert grammar(**members) is None


@pytest.mark.parametrize(
    ("members", "part", "param"),
    [
        ({"response_format": {"type": "hiccup"}}, "'text', 'json_object' or 'json_schema'", "response_format.type"),
        ({"response_format": "json_object"}, "response_format", "response_format"),
        ({"response_format": {}}, "Missing required parameter", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "Missing required", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "Missing required",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "Missing required",
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": SCHEMA}}},
            "pattern",
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}},
            "a list of 1",
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": SCHEMA}}},
            "is allowed only when response_format.type is json_schema; it is json_object",
            "response_format.json_schema",
        ),
        (
            {"response_format": {**FORM, "value": SCHEMA}},
            "is allowed only when response_format.type is json_object; it is json_schema",
            "response_format.value",
        ),
        ({"response_format": {"type": "json_object", "value": TEXT}}, "it is", "response_format.value"),
        ({"response_format": {"type": "text", "more": 1}}, "Unknown parameter", "response_format.more"),
        ({"structured_outputs": {}}, "asks for no form", "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "asks for no form", "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "Unknown parameter", "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "at least 1", "guided_choice"),
        ({"guided_choice": ["a", ""]}, "at least 1", "guided_choice[1]"),
        ({"guided_choice": ["a"] * 1025}, "at most 1024", "guided_choice"),
        ({"guided_regex": ""}, "at least 1", "guided_regex"),
        ({"guided_regex": 7}, "string", "guided_regex"),
        ({"json_schema": "{}"}, "json_schema", "json_schema"),
        ({"grammar": 'root ::= "a"'}, "is GBNF", "grammar"),
        ({"guided_grammar": 'root ::= "a"'}, "is GBNF", "guided_grammar"),
        ({"guided_decoding_backend": "x"}, "Unknown parameter", "guided_decoding_backend"),
    ],
)
def test_what_is_wrong_is_named(members: Any, part: str, param: str) -> None:
    message, named = refused(**members)
    assert part in message and message.removeprefix("Missing required parameter: ").startswith(
        (param, "Unknown parameter: ")
    )
    assert named == param


def test_an_answer_has_one_form() -> None:
    assert refused(response_format={"type": "json_object"}, guided_regex="a") == (
        "guided_regex: cannot be combined with response_format: an answer has one form.",
        "guided_regex",
    )
    assert refused(structured_outputs={"regex": "a", "json": SCHEMA})[1] == "structured_outputs.regex"


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_tokens", 1), ("ignore_eos", True), ("allowed_token_ids", [1])],
    ids=lambda value: str(value),
)
def test_members_that_could_keep_a_form_from_its_end_are_refused_beside_one(name: str, value: Any) -> None:
    assert refused(guided_regex="a", **{name: value}) == (
        f"{name}: cannot be combined with guided_regex: an answer in a form ends when it is whole.",
        name,
    )


def test_members_that_say_nothing_are_let_through_beside_a_form() -> None:
    assert grammar(guided_regex="a", min_tokens=0, ignore_eos=False, allowed_token_ids=None) is not None
    assert grammar(guided_regex="a", stop=["x"], stop_token_ids=[3], logit_bias={"3": -100}) is not None
