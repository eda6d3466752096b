"""Check that the prompt validator refuses tools, forms and token ids that could carry a text past its rule."""

from __future__ import annotations

import json

import pytest

from inference_api.server.openai.structured import StructuredBody
from tests.server.fakes import FakeClient
from tests.server.validated_calls import Make, chat, message, post, told

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "#", "parameters": {}}}


@pytest.mark.parametrize("mode", ["reject", "strip"])
@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"model": "mock", "prompt": [1, 2]}, "prompt[0]"),
        ("/v1/completions", {"model": "mock", "prompt": [["a"], [1]]}, "prompt[1][0]"),
        ("/v1/embeddings", {"model": "mock", "input": [[1]]}, "input[0][0]"),
        ("/v1/chat/completions", chat("fine", tools=[TOOL]), "tools"),
        ("/v1/responses", {"model": "mock", "input": "fine", "tools": [TOOL["function"]]}, "tools"),
        ("/v1/messages", chat("fine", tools=[{"name": "f", "input_schema": {}}]), "tools"),
        ("/v1/chat/completions", chat("fine", messages=[message(None, tool_calls=[CALL])]), "messages[0].tool_calls"),
        (
            "/v1/messages",
            chat([{"type": "tool_result", "tool_use_id": "c", "content": "fine"}]),
            "messages[0].content[0].tool_use_id",
        ),
        (
            "/v1/responses",
            {"model": "mock", "input": [{"type": "function_call_output", "call_id": "c", "output": "#"}]},
            "input[0].call_id",
        ),
        (
            "/v1/chat/completions",
            chat([{"type": "image_url", "image_url": {"url": "#"}}]),
            "messages[0].content[0].image_url",
        ),
    ],
)
def test_what_could_carry_a_text_past_the_rule_is_refused_by_its_name(
    make_app: Make, fake_client: FakeClient, path: str, body: dict[str, object], field: str, mode: str
) -> None:
    response = post(make_app(prompt_validator=mode), path, body)
    assert response.status_code == 400
    assert told(path, body, response).startswith(f"Invalid prompt: {field} is not taken here")
    assert fake_client.submits == []


def formed(**members: object) -> dict[str, object]:
    return chat("fine", **members)


def completed(**members: object) -> dict[str, object]:
    return {"model": "mock", "prompt": "fine", **members}


def responded(**format_members: object) -> dict[str, object]:
    return {"model": "mock", "input": "fine", "text": {"format": format_members}}


def generated(value: object, kind: str = "regex") -> dict[str, object]:
    return {"inputs": "fine", "parameters": {"grammar": {"type": kind, "value": value}}}


SCHEMA = {"enum": ["a#b"]}
JSON_SCHEMA = {"name": "n", "schema": SCHEMA}
FORMS: list[tuple[str, dict[str, object], str]] = [
    *(
        (path, body(**{name: value}), name)
        for path, body in (("/v1/chat/completions", formed), ("/v1/completions", completed))
        for name, value in (
            ("guided_choice", ["a#b"]),
            ("guided_regex", "a#b"),
            ("guided_json", SCHEMA),
            ("guided_json", json.dumps(SCHEMA)),
            ("guided_grammar", 'start: "a#b"'),
            ("structured_outputs", {"choice": ["a#b"]}),
            ("structured_outputs", {"json_object": True}),
            ("json_schema", SCHEMA),
            ("grammar", 'start: "a#b"'),
            ("response_format", {"type": "json_schema", "json_schema": JSON_SCHEMA}),
            ("response_format", {"type": "json_object", "value": SCHEMA}),
            ("response_format", {"type": "later"}),
            ("response_format", "json_schema"),
        )
    ),
    ("/v1/responses", responded(type="json_schema", **JSON_SCHEMA), "text.format"),
    ("/v1/responses", responded(type="text", schema=SCHEMA), "text.format"),
    *((path, generated("a#b"), "parameters.grammar") for path in ("/generate", "/generate_stream", "/")),
    ("/generate", generated(SCHEMA, "json"), "parameters.grammar"),
]


@pytest.mark.parametrize("mode", ["reject", "strip"])
@pytest.mark.parametrize(("path", "body", "field"), FORMS, ids=[f"{path} {field}" for path, _body, field in FORMS])
def test_a_form_that_could_put_a_text_into_the_answer_is_refused_by_its_name(
    make_app: Make, fake_client: FakeClient, path: str, body: dict[str, object], field: str, mode: str
) -> None:
    response = post(make_app(prompt_validator=mode), path, body)
    assert response.status_code in (400, 422)
    assert told(path, body, response).startswith(f"Invalid prompt: {field} is not taken here")
    assert fake_client.submits == []


@pytest.mark.parametrize("mode", ["reject", "strip"])
@pytest.mark.parametrize(("field", "value"), [("allowed_token_ids", [1]), ("logit_bias", {"1": 100})])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", formed()), ("/v1/completions", completed()), ("/inference/mock", {"text": "hello"})],
    ids=["chat", "completions", "native"],
)
def test_token_ids_that_could_spell_the_answer_are_refused_by_their_name(
    make_app: Make, fake_client: FakeClient, path: str, body: dict[str, object], field: str, value: object, mode: str
) -> None:
    response = post(make_app(prompt_validator=mode), path, {**body, field: value})
    assert response.status_code == 400
    assert told(path, body, response).startswith(f"Invalid prompt: {field} is not taken here")
    assert fake_client.submits == []


def test_every_member_that_asks_for_a_form_is_refused() -> None:
    assert StructuredBody.model_fields.keys() == {
        field for path, _body, field in FORMS if path == "/v1/chat/completions"
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", formed(response_format={"type": "text"})),
        ("/v1/chat/completions", formed(response_format={"type": "json_object", "json_schema": None})),
        ("/v1/chat/completions", formed(response_format=None, guided_choice=None, tools=[])),
        ("/v1/completions", completed(response_format={"type": "json_object"})),
        ("/v1/responses", responded(type="text")),
        ("/v1/responses", responded(type="json_object")),
        ("/v1/responses", {"model": "mock", "input": "fine", "text": {"verbosity": "medium"}}),
        ("/generate", {"inputs": "fine", "parameters": {"grammar": None, "max_new_tokens": 5}}),
    ],
)
def test_a_form_without_a_text_of_the_caller_is_taken(
    make_app: Make, fake_client: FakeClient, path: str, body: dict[str, object]
) -> None:
    assert post(make_app(prompt_validator="reject"), path, body).status_code == 200
    assert len(fake_client.submits) == 1
