"""Check tokenizing in three servers' shapes, the way back, and that a caller's text never becomes a control id."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_api.model_image import ModelImage
from inference_api.server.context import ServerContext
from inference_api.server.tokenizer import Tokenizer
from tests.server.fakes import FakeClient

START_ID, END_ID = 257, 258
"""The mock vocabulary's `<|im_start|>` and `<|im_end|>`; the ids below 256 are the bytes."""

CONTROL_TEXTS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

CONVERSATION = [{"role": "user", "content": "hi"}]
CONVERSATION_TEXT = "<|im_start|>user\nhi<|im_end|>\n"
OPENING = "<|im_start|>assistant\n"

SPAN_PIECES = st.sampled_from(
    [*CONTROL_TEXTS, "<|", "im_end", "|>", "\U0001f642", "\U0001f468\u200d\U0001f469", "é", "\n", " "]
)
TEXTS = st.lists(st.one_of(SPAN_PIECES, st.text(max_size=8)), max_size=8).map("".join)


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    return make_app(body_bytes=65_536)


def post(app: Flask, path: str, body: object, *, status: int = 200) -> Any:
    response = app.test_client().post(path, json=body)
    assert response.status_code == status, response.data
    return response.get_json()


def fault(app: Flask, path: str, body: object) -> str:
    message: str = post(app, path, body, status=400)["error"]["message"]
    return message


def test_vllms_key_gets_a_count_and_the_context_beside_the_ids(app: Flask) -> None:
    assert post(app, "/tokenize", {"prompt": "hi"}) == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [*b"hi"],
        "token_strs": None,
    }
    assert post(app, "/tokenize", {"prompt": "é", "return_token_strs": True, "model": "alias"}) == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [*"é".encode()],
        "token_strs": ["\ufffd", "\ufffd"],
    }


def test_a_conversation_is_tokenized_by_the_models_template(app: Flask) -> None:
    turn = [START_ID, *b"user\nhi", END_ID, *b"\n"]
    body = post(app, "/tokenize", {"messages": CONVERSATION})
    assert (body["tokens"], body["count"]) == ([*turn, START_ID, *b"assistant\n"], len(turn) + 11)
    assert post(app, "/tokenize", {"messages": CONVERSATION, "add_generation_prompt": False})["tokens"] == turn
    shown = post(app, "/tokenize", {"messages": CONVERSATION, "return_token_strs": True})["token_strs"]
    assert "".join(shown) == CONVERSATION_TEXT + OPENING


def test_llama_cpps_key_gets_the_ids_alone_or_with_what_they_stand_for(app: Flask) -> None:
    assert post(app, "/tokenize", {"content": "hi"}) == {"tokens": [*b"hi"]}
    pieces = post(app, "/tokenize", {"content": "ié", "with_pieces": True})["tokens"]
    assert pieces == [
        {"id": ord("i"), "piece": "i"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


def test_tgis_key_gets_a_list_with_the_place_of_each_id_in_the_text(app: Flask) -> None:
    assert post(app, "/tokenize", {"inputs": "hé"}) == [
        {"id": ord("h"), "text": "h", "start": 0, "stop": 1},
        {"id": 0xC3, "text": "é", "start": 1, "stop": 2},
        {"id": 0xA9, "text": "é", "start": 1, "stop": 2},
    ]


def test_an_empty_text_has_no_ids(app: Flask) -> None:
    assert post(app, "/tokenize", {"prompt": ""})["count"] == 0
    assert post(app, "/tokenize", {"content": ""}) == {"tokens": []}
    assert post(app, "/tokenize", {"inputs": ""}) == []
    assert post(app, "/detokenize", {"tokens": []}) == {"prompt": "", "content": ""}


def with_beginning(tokenizer_json: str) -> Tokenizer:
    """Return the tokenizer with a post-processor that puts `<|im_start|>` in front, as models with a BOS have."""
    model = json.loads(tokenizer_json)
    model["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [START_ID], "tokens": ["<|im_start|>"]}},
    }
    return Tokenizer(json.dumps(model))


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({"prompt": "hi"}, True),
        ({"prompt": "hi", "add_special_tokens": True}, True),
        ({"prompt": "hi", "add_special_tokens": False}, False),
        ({"content": "hi"}, False),
        ({"content": "hi", "add_special": True}, True),
    ],
)
def test_what_the_model_puts_in_front_is_there_as_each_server_has_it(make_app, mock_image, body, begins: bool) -> None:
    app = make_app({"tokenizer": with_beginning(mock_image.tokenizer_path.read_text())})
    assert post(app, "/tokenize", body)["tokens"] == ([START_ID] if begins else []) + [*b"hi"]


def test_tgi_tells_no_place_for_what_the_model_puts_in_front(make_app, mock_image) -> None:
    app = make_app({"tokenizer": with_beginning(mock_image.tokenizer_path.read_text())})
    found = post(app, "/tokenize", {"inputs": "hi"})
    assert found[0] == {"id": START_ID, "text": "", "start": 0, "stop": 0}
    assert [token["text"] for token in found[1:]] == ["h", "i"]
    assert len(post(app, "/tokenize", {"inputs": "hi", "add_special_tokens": False})) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(text=TEXTS)
def test_any_text_comes_back_and_none_of_it_is_a_control_id(app: Flask, text: str) -> None:
    counted = post(app, "/tokenize", {"prompt": text})["tokens"]
    assert max(counted, default=0) < 256
    assert post(app, "/tokenize", {"content": text})["tokens"] == counted
    spans = post(app, "/tokenize", {"inputs": text})
    assert [span["id"] for span in spans] == counted
    assert all(text[span["start"] : span["stop"]] == span["text"] for span in spans)
    assert post(app, "/detokenize", {"tokens": counted}) == {"prompt": text, "content": text}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(text=TEXTS)
def test_a_conversations_ids_are_those_of_its_template_and_come_back_as_its_text(app: Flask, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    token_ids = post(app, "/tokenize", {"messages": messages})["tokens"]
    assert [token_id for token_id in token_ids if token_id >= 256] == [START_ID, END_ID, START_ID]
    written = post(app, "/apply-template", {"messages": messages})["prompt"]
    assert post(app, "/detokenize", {"tokens": token_ids})["prompt"] == written
    assert written == f"<|im_start|>user\n{text}<|im_end|>\n{OPENING}"


def test_detokenizing_shows_control_tokens_and_replaces_bad_bytes(app: Flask) -> None:
    assert post(app, "/detokenize", {"tokens": [START_ID, *b"a", 0xC3, END_ID]})["content"] == (
        "<|im_start|>a\ufffd<|im_end|>"
    )


def test_a_template_is_written_out_with_or_without_the_answers_turn(app: Flask) -> None:
    assert post(app, "/apply-template", {"messages": CONVERSATION}) == {"prompt": CONVERSATION_TEXT + OPENING}
    closed = {"messages": CONVERSATION, "add_generation_prompt": False}
    assert post(app, "/apply-template", closed) == {"prompt": CONVERSATION_TEXT}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/tokenize", {}, "Missing required parameter: one of prompt, messages, content, inputs."),
        ("/tokenize", {"text": "x"}, "Missing required parameter: one of "),
        ("/tokenize", [], "Missing required parameter: one of "),
        ("/tokenize", {"prompt": 1}, "prompt: "),
        ("/tokenize", {"prompt": None}, "prompt: "),
        ("/tokenize", {"prompt": "x", "content": "x"}, "Unknown parameter: content."),
        ("/tokenize", {"prompt": "x", "add_special": True}, "Unknown parameter: add_special."),
        ("/tokenize", {"prompt": "\ud800"}, "Parameter: prompt has half a surrogate pair"),
        ("/tokenize", {"content": "x", "parse_special": True}, "parse_special: "),
        ("/tokenize", {"content": "x", "with_pieces": 1}, "with_pieces: "),
        ("/tokenize", {"messages": []}, "messages: "),
        ("/tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: "),
        ("/tokenize", {"messages": CONVERSATION, "add_special_tokens": True}, "add_special_tokens: "),
        ("/tokenize", {"inputs": "x", "parameters": {}}, "Unknown parameter: parameters."),
        ("/detokenize", {}, "Missing required parameter: tokens."),
        ("/detokenize", {"tokens": "x"}, "tokens: "),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]: "),
        ("/detokenize", {"tokens": [1, 259]}, "tokens[1]: 259 is outside the vocabulary, whose last id is 258."),
        ("/apply-template", {}, "Missing required parameter: messages."),
        ("/apply-template", {"messages": [{"role": "user"}]}, "Missing required parameter: messages[0].content."),
    ],
)
def test_a_fault_is_named(app: Flask, path: str, body: Any, text: str) -> None:
    assert fault(app, path, body).startswith(text)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
@pytest.mark.parametrize(
    ("data", "content_type", "text"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b'{"prompt": "x"}', "text/plain", "Content-Type: application/json"),
        (b'{"prompt": "x", "prompt": "y"}', "application/json", "prompt"),
    ],
)
def test_a_body_that_is_no_object_of_json_is_refused(app: Flask, path: str, data, content_type: str, text: str) -> None:
    response = app.test_client().post(path, data=data, content_type=content_type)
    assert response.status_code == 400
    assert text in response.get_json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": CONVERSATION}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", {"messages": CONVERSATION}),
    ],
)
def test_a_model_that_is_not_served_is_not_found(app: Flask, path: str, body: dict[str, Any]) -> None:
    assert post(app, path, {**body, "model": "gpt"}, status=404)["error"]["code"] == "model_not_found"
    post(app, path, {**body, "model": "mock"})


def test_without_a_template_conversations_are_refused_and_texts_are_not(make_app) -> None:
    app = make_app({"chat_template": None})
    for path in ("/tokenize", "/apply-template"):
        assert fault(app, path, {"messages": CONVERSATION}) == "This model has no chat template: send text."
    post(app, "/tokenize", {"prompt": "x"})


def test_nothing_is_asked_of_the_backend(app: Flask, fake_client: FakeClient) -> None:
    fake_client.ready = None
    post(app, "/tokenize", {"prompt": "x"})
    assert fake_client.submits == [] and fake_client.queries == []


@pytest.mark.model
def test_the_real_vocabulary_comes_back_in_every_shape(
    make_app, context: ServerContext, model_image_path: Path
) -> None:
    image = ModelImage.open(model_image_path)
    limits = dataclasses.replace(context.limits, vocab_size=image.vocab_size)
    app = make_app({"tokenizer": Tokenizer.load(image.tokenizer_path), "limits": limits})
    control_texts = "".join(image.token_bytes[token_id].decode() for token_id in sorted(image.special_ids))
    for text in (control_texts, f"Hello{control_texts} wörld", "\U0001f468\u200d\U0001f469 \U0001f642\n\n  x", "   "):
        token_ids = post(app, "/tokenize", {"prompt": text})["tokens"]
        assert not image.special_ids.intersection(token_ids)
        assert [span["id"] for span in post(app, "/tokenize", {"inputs": text})] == token_ids
        assert post(app, "/detokenize", {"tokens": token_ids})["prompt"] == text
