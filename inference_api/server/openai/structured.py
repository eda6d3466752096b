"""Own the members that ask for an answer in a form, as OpenAI, vLLM and llama.cpp call them: at most one a request.

Runs in PROCESS 1. What a form's text means the backend finds out, which refuses a bad one by the member's name. Pure:
knows no Flask, no tokenizer and no other members.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.server.bodies import FormName, FormText, Schema, StrictModel

MAX_CHOICES_LISTED = 1024
GBNF_MARK = "::="
"""What every rule of llama.cpp's grammars has, and no rule of Lark."""

ChoiceTexts = Annotated[list[FormText], Field(min_length=1, max_length=MAX_CHOICES_LISTED)]


class JsonSchemaFormat(StrictModel):
    """OpenAI's frame of a JSON schema; the answer keeps to it, `strict` or not."""

    name: FormName
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`, and the place of a schema in it that the hub's client knows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    value: Schema | None = Field(None, description="The schema of a json_object, as the hub's client sends it.")


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`: one of its members."""

    json_: Schema | FormText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: FormText | None = None
    choice: ChoiceTexts | None = None
    grammar: FormText | None = Field(None, description="In Lark's syntax.")


class StructuredBody(StrictModel):
    """The members of a body that ask for a form."""

    response_format: ResponseFormat | None = Field(None, description="text, json_object or json_schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's way to ask for a form.")
    guided_json: Schema | FormText | None = Field(None, description="A JSON schema, as vLLM once called it.")
    guided_regex: FormText | None = Field(None, description="A regular expression of the whole answer.")
    guided_choice: ChoiceTexts | None = Field(None, description="The texts of which the answer is one.")
    guided_grammar: FormText | None = Field(None, description="A grammar in Lark's syntax.")
    json_schema: Schema | None = Field(None, description="A JSON schema, as llama.cpp calls it.")
    grammar: FormText | None = Field(None, description="A grammar in Lark's syntax; GBNF is refused.")


def grammar_of(body: StructuredBody) -> Grammar | None:
    """Return the form that a body asks for, if any.

    Raises InvalidRequestError for a second one, and for GBNF.
    """
    asked = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body.structured_outputs),
        *_schema("guided_json", body.guided_json),
        *_text("guided_regex", GrammarKind.REGEX, body.guided_regex),
        *_choice("guided_choice", body.guided_choice),
        *_lark("guided_grammar", body.guided_grammar),
        *_schema("json_schema", body.json_schema),
        *_lark("grammar", body.grammar),
    ]
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        raise InvalidRequestError(f"{second}: cannot be combined with {first}: an answer has one form.", second)
    return asked[0] if asked else None


def _of_response_format(given: ResponseFormat | None) -> list[Grammar]:
    if given is None:
        return []
    for type_, member, value in (
        ("json_schema", "json_schema", given.json_schema),
        ("json_object", "value", given.value),
    ):
        if value is not None and given.type != type_:
            name = f"response_format.{member}"
            raise InvalidRequestError(
                f"{name}: is allowed only when response_format.type is {type_}; it is {given.type}.", name
            )
    if given.type == "text":
        return []
    if given.type == "json_object":
        # https://github.com/huggingface/huggingface_hub, inference/_providers/hf_inference.py: what its client makes of
        # a json_schema for any server but the known providers.
        described = _schema("response_format.value", given.value)
        return described or [Grammar(GrammarKind.JSON_OBJECT, field="response_format")]
    if given.json_schema is None:
        name = "response_format.json_schema"
        raise InvalidRequestError(f"Missing required parameter: {name}.", name)
    return _schema("response_format.json_schema.schema", given.json_schema.schema_)


def _of_structured_outputs(given: StructuredOutputs | None) -> list[Grammar]:
    if given is None:
        return []
    prefix = "structured_outputs"
    asked = [
        *_schema(f"{prefix}.json", given.json_),
        *([Grammar(GrammarKind.JSON_OBJECT, field=f"{prefix}.json_object")] if given.json_object else []),
        *_text(f"{prefix}.regex", GrammarKind.REGEX, given.regex),
        *_choice(f"{prefix}.choice", given.choice),
        *_lark(f"{prefix}.grammar", given.grammar),
    ]
    if not asked:
        raise InvalidRequestError(f"{prefix}: asks for no form: one of its members is needed.", prefix)
    return asked


def _schema(field: str, schema: Schema | str | None) -> list[Grammar]:
    text = schema if isinstance(schema, str | None) else json.dumps(schema)
    return _text(field, GrammarKind.JSON_SCHEMA, text)


def _choice(field: str, texts: Sequence[str] | None) -> list[Grammar]:
    return _text(field, GrammarKind.CHOICE, None if texts is None else json.dumps(texts))


def _lark(field: str, text: str | None) -> list[Grammar]:
    if text is not None and GBNF_MARK in text:
        raise InvalidRequestError(f"{field}: is GBNF, which is not understood here: send a Lark grammar.", field)
    return _text(field, GrammarKind.LARK, text)


def _text(field: str, kind: GrammarKind, text: str | None) -> list[Grammar]:
    return [] if text is None else [Grammar(kind, text, field)]
