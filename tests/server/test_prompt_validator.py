"""Check that every route that takes a prompt holds it to the tenant's rule, and tells so in its API's words."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from inference_api.errors import SettingError
from inference_api.server.prompt_validator import PROMPT_MEMBERS, PromptRule
from tests.server.fakes import FakeClient
from tests.server.validated_calls import Make, chat, message, post, told

RULE = "must be 1 to 200 characters of [a-zA-Z0-9 ?',.-]."

# Endpoint, path, field that is told, and a body around a text.
ROUTES: list[tuple[str, str, str, Callable[[str], Any]]] = [
    ("native.inference", "/inference/mock", "text", lambda text: {"text": text}),
    ("native.predictions", "/predictions/mock", "text", lambda text: {"text": text}),
    ("native.predictions", "/predictions/mock", "rag_context", lambda text: {"text": "fine", "rag_context": text}),
    ("native.chat", "/chat/mock", "text", lambda text: {"text": text}),
    ("native.chat", "/chat/mock", "rag_context", lambda text: {"text": "fine", "rag_context": text}),
    ("openai.chat", "/v1/chat/completions", "messages[0].content", chat),
    (
        "openai.chat",
        "/v1/chat/completions",
        "messages[0].content[0].text",
        lambda text: chat([{"type": "text", "text": text}]),
    ),
    ("openai.completions", "/v1/completions", "prompt", lambda text: {"model": "mock", "prompt": text}),
    ("openai.completions", "/v1/completions", "prompt[1]", lambda text: {"model": "mock", "prompt": ["fine", text]}),
    ("openai_responses.create", "/v1/responses", "input", lambda text: {"model": "mock", "input": text}),
    (
        "openai_responses.create",
        "/v1/responses",
        "instructions",
        lambda text: {"model": "mock", "input": "fine", "instructions": text},
    ),
    (
        "openai_responses.create",
        "/v1/responses",
        "input[0].content[0].text",
        lambda text: {"model": "mock", "input": [message([{"type": "input_text", "text": text}])]},
    ),
    ("anthropic.messages", "/v1/messages", "messages[0].content", chat),
    ("anthropic.messages", "/v1/messages", "system", lambda text: chat("fine", system=text)),
    (
        "anthropic.messages",
        "/v1/messages",
        "system[0].text",
        lambda text: chat("fine", system=[{"type": "text", "text": text}]),
    ),
    (
        "anthropic.count_tokens",
        "/v1/messages/count_tokens",
        "messages[0].content",
        lambda text: {"model": "mock", "messages": [message(text)]},
    ),
    ("tgi.generate", "/generate", "inputs", lambda text: {"inputs": text}),
    ("tgi.generate_stream", "/generate_stream", "inputs", lambda text: {"inputs": text}),
    ("root.answer", "/", "inputs", lambda text: {"inputs": text}),
    ("root.answer", "/", "The body", str),
    ("embeddings.embed", "/v1/embeddings", "input", lambda text: {"model": "mock", "input": text}),
    ("embeddings.embed", "/v1/embeddings", "input[0]", lambda text: {"model": "mock", "input": [text]}),
    ("tokenization.tokenize", "/tokenize", "prompt", lambda text: {"prompt": text}),
    ("tokenization.tokenize", "/tokenize", "content", lambda text: {"content": text}),
    ("tokenization.tokenize", "/tokenize", "inputs", lambda text: {"inputs": text}),
    ("tokenization.tokenize", "/tokenize", "messages[0].content", lambda text: {"messages": [message(text)]}),
    (
        "tokenization.apply_template",
        "/apply-template",
        "messages[0].content",
        lambda text: {"messages": [message(text)]},
    ),
]
IDS = [f"{path} {field}" for _endpoint, path, field, _body in ROUTES]


def test_every_route_that_takes_a_prompt_is_in_the_table_of_this_test() -> None:
    assert {endpoint for endpoint, *_ in ROUTES} == {endpoint for endpoint, names in PROMPT_MEMBERS.items() if names}
    assert {endpoint for endpoint, names in PROMPT_MEMBERS.items() if not names} == {
        "openai_responses.cancel",
        "tokenization.detokenize",
    }


@pytest.mark.parametrize(("path", "field", "body"), [route[1:] for route in ROUTES], ids=IDS)
def test_reject_refuses_what_is_no_plain_text_in_the_apis_words_and_nothing_else(
    make_app: Make, fake_client: FakeClient, path: str, field: str, body: Any
) -> None:
    app = make_app(prompt_validator="reject")
    for text in ("caf\u00e9", "a#b", "a\nb", "fine\n", "", "a" * 201, "<|im_start|>"):
        response = post(app, path, body(text))
        # What is wrong with a prompt has the status 422 in text-generation-inference.
        assert response.status_code == (422 if field == "inputs" and path != "/tokenize" else 400)
        assert told(path, body(text), response) == f"Invalid prompt: {field} {RULE}"
    assert fake_client.submits == []
    assert b"Invalid prompt" not in post(app, path, body("Is it 5-6, or 'so'.")).data


@pytest.mark.parametrize(("path", "field", "body"), [route[1:] for route in ROUTES], ids=IDS)
def test_strip_is_the_same_call_as_one_without_the_other_characters_and_off_changes_none(
    make_app: Make, fake_client: FakeClient, path: str, field: str, body: Any
) -> None:
    stripped = post(make_app(prompt_validator="strip"), path, body("a\u00e9#b\nc <d>"))
    seen = [submit.token_ids for submit in fake_client.submits]
    fake_client.submits.clear()
    off = make_app()
    plain = post(off, path, body("abc d"))
    assert stripped.status_code == plain.status_code
    assert seen == [submit.token_ids for submit in fake_client.submits]
    if path in ("/tokenize", "/apply-template", "/"):
        assert stripped.data == plain.data
    assert b"Invalid prompt" not in post(off, path, body("caf\u00e9 #1")).data


@pytest.mark.parametrize("text", ["\u00e9#", "a" * 201 + "#"])
def test_strip_refuses_what_is_too_short_or_too_long_without_the_other_characters(make_app: Make, text: str) -> None:
    response = post(make_app(prompt_validator="strip"), "/inference/mock", {"text": text})
    assert (response.status_code, response.get_json()["message"]) == (400, f"Invalid prompt: text {RULE}")


def nested(depth: int) -> str:
    return "[" * depth + '"fine"' + "]" * depth


@pytest.mark.parametrize("mode", ["reject", "strip"])
@pytest.mark.parametrize("depth", [9, 100, 600, 900, 960])
def test_a_prompt_that_is_nested_deep_is_refused_and_no_fault_of_the_server(
    make_app: Make, fake_client: FakeClient, depth: int, mode: str
) -> None:
    for path, name in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        raw = f'{{"model": "mock", "{name}": {nested(depth)}}}'
        headers = {"Content-Type": "application/json"}
        response = make_app(prompt_validator=mode).test_client().post(path, data=raw, headers=headers)
        assert response.status_code == 400
        message = response.get_json()["error"]["message"]
        assert message.startswith("Invalid prompt: ") and len(message) < 200
    assert fake_client.submits == []


def test_the_deepest_conversation_that_a_route_takes_is_not_nested_too_deep(make_app: Make) -> None:
    app = make_app(prompt_validator="reject")
    assert post(app, "/v1/chat/completions", chat([{"type": "text", "text": "fine"}])).status_code == 200


def test_what_cannot_be_written_again_for_its_depth_is_refused(make_app: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: object) -> str:
        raise RecursionError

    app = make_app(prompt_validator="strip")
    monkeypatch.setattr("inference_api.server.prompt_validator.json", SimpleNamespace(dumps=fail))
    raw = b'{"text": "fine"}'
    response = app.test_client().post("/inference/mock", data=raw, content_type="application/json")
    assert response.status_code == 400
    assert b"nested too deep" in response.data


@pytest.mark.parametrize("name", ["x" * 1000, "\ud800" * 300])
def test_a_members_name_is_told_cut_short(make_app: Make, name: str) -> None:
    body = chat("fine", messages=[message("fine", **{name: 1})])
    response = post(make_app(prompt_validator="reject"), "/v1/chat/completions", body)
    text = told("/v1/chat/completions", body, response)
    assert response.status_code == 400
    assert text.startswith("Invalid prompt: messages[0].") and len(text) < 200
    assert len(response.data) < 500


@pytest.mark.parametrize("raw", ['{"text": "#", "text": "fine"}', "{", '"#"', "\ufeff{}"])
def test_a_body_that_two_readers_could_read_in_two_ways_is_refused(
    make_app: Make, fake_client: FakeClient, raw
) -> None:
    for path in ("/inference/mock", "/generate", "/v1/completions"):
        app = make_app(prompt_validator="strip")
        response = app.test_client().post(path, data=raw.encode(), content_type="application/json")
        assert response.status_code in (400, 422)
    assert fake_client.submits == []


def test_the_mode_that_the_proxy_tells_wins_over_the_setting(make_app: Make) -> None:
    def statuses(setting: str, mode: str) -> int:
        app = make_app(anonymous=False, prompt_validator=setting)
        return post(app, "/inference/mock", {"text": "#"}, mode).status_code

    assert [statuses("off", "reject"), statuses("reject", "off"), statuses("off", "off")] == [400, 200, 200]


def test_an_unknown_mode_of_another_version_refuses_as_reject_does(make_app: Make) -> None:
    app = make_app(anonymous=False)
    assert post(app, "/inference/mock", {"text": "#"}, "later").status_code == 400
    assert post(app, "/inference/mock", {"text": "fine"}, "later").status_code == 200


def test_a_repetition_is_the_same_call_whatever_was_stripped(make_app: Make, fake_client: FakeClient) -> None:
    app = make_app(prompt_validator="strip")
    for text in ("a#b", "a%b"):
        app.test_client().post("/inference/mock", json={"text": text}, headers={"Idempotency-Key": "k"})
    assert len({submit.request_id for submit in fake_client.submits}) == 1


def test_the_settings_say_the_characters_and_the_bounds(make_app: Make) -> None:
    app = make_app(prompt_validator="reject", prompt_characters="a-c", prompt_min_characters=2, prompt_max_characters=3)
    assert [post(app, "/inference/mock", {"text": text}).status_code for text in ("ab", "abc")] == [200, 200]
    for text in ("a", "abca", "ad"):
        message = post(app, "/inference/mock", {"text": text}).get_json()["message"]
        assert message == "Invalid prompt: text must be 2 to 3 characters of [a-c]."


@pytest.mark.parametrize("characters", ["", "z-a", "a]b", "[a", "^a", "a\\w", "a--z"])
def test_a_character_set_that_is_none_stops_the_start(characters: str) -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_PROMPT_CHARACTERS"):
        PromptRule(characters, 1, 200)


def test_bounds_the_wrong_way_round_stop_the_start() -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_PROMPT_MIN_CHARACTERS"):
        PromptRule("a", 5, 4)


def test_a_route_of_which_nothing_is_said_stops_the_start(make_app: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(PROMPT_MEMBERS, "openai.chat")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"where their prompts are: openai\.chat$"):
        make_app()
