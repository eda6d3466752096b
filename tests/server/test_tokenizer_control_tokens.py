"""Check that no text of a caller, in any field of any surface, ever becomes a control token.

Every control text of the vocabulary is sent in each field in turn; the ids that go to the backend must hold as many
control tokens as with a harmless text there: those of the template. On the mock's vocabulary, and on the real model's.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flask import Flask

from inference_api.model_image import ModelImage
from inference_api.server.chat_template import ChatTemplate
from inference_api.server.tokenizer import Tokenizer
from tests.server.fakes import READY, FakeClient

HARMLESS = "x"
MODEL = {"model": "mock", "max_tokens": 3}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

Make = Callable[[str], Any]


def chat(*turns: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {**MODEL, "messages": list(turns) or [{"role": "user", "content": "x"}], **members}


def user(content: Any, **members: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **members}


def tool(name: str = "f", description: str = "d", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": schema or SCHEMA}
    return {"type": "function", "function": function}


def called(arguments: str, call_id: str = "c1") -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(content: str, call_id: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
FIELDS: dict[str, tuple[str, Make]] = {
    "native raw": ("/inference/mock", lambda it: {"text": it}),
    "native whole": ("/predictions/mock", lambda it: {"text": it}),
    "native chat": ("/chat/mock", lambda it: {"text": it}),
    "native stop": ("/inference/mock", lambda it: {"text": "x", "stop_sequence": it}),
    "chat user": (CHAT, lambda it: chat(user(it))),
    "chat part": (CHAT, lambda it: chat(user([{"type": "text", "text": "a"}, {"type": "text", "text": it}]))),
    "chat system": (CHAT, lambda it: chat({"role": "system", "content": it}, user("x"))),
    "chat developer": (CHAT, lambda it: chat({"role": "developer", "content": it}, user("x"))),
    "chat assistant": (CHAT, lambda it: chat(user("x"), {"role": "assistant", "content": it}, user("y"))),
    "chat name": (CHAT, lambda it: chat(user("x", name=it))),
    "chat stop": (CHAT, lambda it: chat(stop=[it])),
    "chat bad words": (CHAT, lambda it: chat(bad_words=[it])),
    "chat user id": (CHAT, lambda it: chat(user=it)),
    "chat tool description": (CHAT, lambda it: chat(tools=[tool(description=it)])),
    "chat tool schema": (CHAT, lambda it: chat(tools=[tool(schema={**SCHEMA, "description": it})])),
    "chat tool result": (CHAT, lambda it: chat(user("x"), called("{}"), result(it), tools=[tool()])),
    "chat call arguments": (
        CHAT,
        lambda it: chat(user("x"), called(json.dumps({"a": it})), result("y"), tools=[tool()]),
    ),
    "chat call id": (CHAT, lambda it: chat(user("x"), called("{}", it), result("y", it), tools=[tool()])),
    "completion": (COMPLETIONS, lambda it: {**MODEL, "prompt": it}),
    "completion list": (COMPLETIONS, lambda it: {**MODEL, "prompt": ["a", it]}),
    "completion echo": (COMPLETIONS, lambda it: {**MODEL, "prompt": it, "echo": True}),
    "completion stop": (COMPLETIONS, lambda it: {**MODEL, "prompt": "x", "stop": it}),
    "completion bad words": (COMPLETIONS, lambda it: {**MODEL, "prompt": "x", "bad_words": [it]}),
    "embedding": ("/v1/embeddings", lambda it: {"model": "mock", "input": [it]}),
    "messages user": (MESSAGES, lambda it: {**MODEL, "messages": [user(it)]}),
    "messages block": (MESSAGES, lambda it: {**MODEL, "messages": [user([{"type": "text", "text": it}])]}),
    "messages system": (MESSAGES, lambda it: {**MODEL, "system": it, "messages": [user("x")]}),
    "messages stop": (MESSAGES, lambda it: {**MODEL, "messages": [user("x")], "stop_sequences": [it]}),
    "messages tool": (
        MESSAGES,
        lambda it: {
            **MODEL,
            "messages": [user("x")],
            "tools": [{"name": "f", "description": it, "input_schema": SCHEMA}],
        },
    ),
    "responses input": (RESPONSES, lambda it: {"model": "mock", "input": it, "max_output_tokens": 3}),
    "responses item": (RESPONSES, lambda it: {"model": "mock", "input": [user(it)], "max_output_tokens": 3}),
    "responses instructions": (RESPONSES, lambda it: {"model": "mock", "input": "x", "instructions": it}),
    "generate": ("/generate", lambda it: {"inputs": it}),
    "generate stop": ("/generate", lambda it: {"inputs": "x", "parameters": {"stop": [it]}}),
    "generate_stream": ("/generate_stream", lambda it: {"inputs": it}),
    "root": ("/", lambda it: {"inputs": it}),
}
BOUNDED = ("stop", "bad words", "name", "call id")
MAX_SHORT_TEXT = 64
"""Fields of these names take no longer texts; no control text by itself is as long."""

TOKENIZED: dict[str, Make] = {
    "prompt": lambda it: {"prompt": it},
    "prompt alone": lambda it: {"prompt": it, "add_special_tokens": False},
    "content": lambda it: {"content": it, "add_special": True},
    "inputs": lambda it: {"inputs": it},
    "messages": lambda it: {"messages": [user(it)]},
}


@pytest.fixture(scope="module", params=["mock", pytest.param("model", marks=pytest.mark.model)])
def image(request: pytest.FixtureRequest, mock_image: ModelImage) -> ModelImage:
    """The mock's image, and the real model's."""
    if request.param == "mock":
        return mock_image
    return ModelImage.open(request.getfixturevalue("model_image_path"))


@pytest.fixture(scope="module")
def parts(image: ModelImage) -> dict[str, Any]:
    """What a worker makes of an image, once: a vocabulary of 49,152 takes its time."""
    tokenizer = Tokenizer.load(image.tokenizer_path)
    texts = {"bos_text": image.bos_text, "eos_text": image.eos_text}
    return {"tokenizer": tokenizer, "chat_template": ChatTemplate(image.chat_template or "", tokenizer, **texts)}


@pytest.fixture
def app(
    make_app: Callable[..., Flask], image: ModelImage, parts: dict[str, Any], context: Any, fake_client: FakeClient
) -> Flask:
    sizes = {"vocab_size": image.vocab_size, "context_tokens": 2048, "stop_ids": image.stop_ids}
    fake_client.ready = msgspec.structs.replace(READY, embedding_size=2)
    limits = dataclasses.replace(context.limits, **sizes)
    return make_app({**parts, "limits": limits}, body_bytes=1 << 20)


def control_texts(image: ModelImage) -> list[str]:
    """Return every control text: each alone, all in a row, and all in a sentence."""
    alone = [image.token_bytes[token_id].decode() for token_id in sorted(image.special_ids)]
    return [*(text for text in alone if text), "".join(alone), " and ".join(alone)]


def control_ids(image: ModelImage, sent: list[Any]) -> list[list[int]]:
    """Return the control ids of every prompt that was sent, in order; raise AssertionError for one elsewhere."""
    for submit in sent:
        barred = {*submit.sampling.banned_ids, *itertools.chain.from_iterable(submit.sampling.bad_sequences)}
        assert not image.special_ids.intersection(barred), "a bad word is a control token"
    return [[token_id for token_id in submit.token_ids if token_id in image.special_ids] for submit in sent]


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_makes_a_control_token_of_a_text(
    app: Flask, fake_client: FakeClient, image: ModelImage, field: str
) -> None:
    path, make = FIELDS[field]

    def sent_with(text: str) -> list[list[int]]:
        fake_client.submits.clear()
        response = app.test_client().post(path, json=make(text))
        response.get_data()
        if field.endswith(BOUNDED) and len(text) > MAX_SHORT_TEXT and response.status_code in (400, 422):
            return plain  # refused as any text of that length is
        assert response.status_code == 200, response.get_data()
        return control_ids(image, fake_client.submits)

    plain: list[list[int]] = []
    plain = sent_with(HARMLESS)
    assert plain
    for text in control_texts(image):
        assert sent_with(text) == plain, text


def test_a_raw_body_makes_no_control_token(app: Flask, fake_client: FakeClient, image: ModelImage) -> None:
    for text in control_texts(image):
        response = app.test_client().post("/", data=text, content_type="text/plain")
        assert response.status_code == 200
        [ids] = control_ids(image, [fake_client.last])
        assert len(fake_client.last.token_ids) > len(ids), text
        assert ids == control_ids(image, [_submitted(app, fake_client, HARMLESS)])[0], text


@pytest.mark.parametrize("form", TOKENIZED)
def test_tokenize_shows_that_no_text_is_a_control_token(app: Flask, image: ModelImage, form: str) -> None:
    def ids_of(text: str) -> list[int]:
        told = app.test_client().post("/tokenize", json=TOKENIZED[form](text)).get_json()
        spans = told if isinstance(told, list) else told["tokens"]
        ids = [span["id"] if isinstance(span, dict) else span for span in spans]
        return [token_id for token_id in ids if token_id in image.special_ids]

    for text in control_texts(image):
        assert ids_of(text) == ids_of(HARMLESS), text


def _submitted(app: Flask, fake_client: FakeClient, text: str) -> Any:
    assert app.test_client().post("/", data=text, content_type="text/plain").status_code == 200
    return fake_client.last
