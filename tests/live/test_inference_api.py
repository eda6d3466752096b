"""Check a running service call by call: valid calls, wrong types, every bound from both sides, 128 callers at once.

Runs under pytest, and as a program against any server: `test_inference_api.py --url URL`. Holds for any model; what the
mock answers is compared digit by digit.
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

import pytest

from tests.integration.service import in_parallel
from tests.live.client import LEGACY_MODEL_NAME, Client, chat_events, digits, text_of
from tests.live.program import run_checks, run_program

ROUTES = ("inference", "predictions", "chat")
NUM_CALLERS = 128
MAX_SEED = 2**63 - 1

BOUNDS = (
    # (name, lowest, highest, just below, just above)
    ("temperature", 0.01, 100.0, 0.0099, 100.1),
    ("top_p", 0.01, 1.0, 0.0099, 1.0001),
    ("top_k", 1, 1000, 0, 1001),
    ("max_tokens", 1, 2048, 0, 2049),
    ("seed", 0, MAX_SEED, -1, MAX_SEED + 1),
)
EVERY_PARAMETER: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "max_tokens": 4,
    "stop_sequence": "\n\n",
    "return_prompt": False,
    "seed": 7,
    "session_id": "my chat",
}
AS_STRINGS: dict[str, Any] = {
    "temperature": "1",
    "top_p": "0.9",
    "top_k": "40",
    "max_tokens": "4",
    "return_prompt": "false",
    "seed": "7",
}

WRONG_TYPES: tuple[tuple[str, Any, str, str], ...] = (
    # (name, value, the value's type, the type that is expected)
    ("text", None, "NoneType", "str"),
    ("text", 7, "int", "str"),
    ("text", ["x"], "list", "str"),
    ("text", {"a": 1}, "dict", "str"),
    ("temperature", "warm", "str", "float"),
    ("temperature", True, "bool", "float"),
    ("top_p", None, "NoneType", "float"),
    ("top_p", [0.9], "list", "float"),
    ("top_k", 1.9, "float", "int"),
    ("top_k", "1.5", "str", "int"),
    ("max_tokens", True, "bool", "int"),
    ("max_tokens", {}, "dict", "int"),
    ("return_prompt", 1, "int", "bool"),
    ("return_prompt", "yes", "str", "bool"),
    ("stop_sequence", 5, "int", "str"),
    ("session_id", 5, "int", "str"),
    ("seed", "seven", "str", "int"),
)
MALFORMED = (
    (b'{"text": "x"', "application/json", "Malformed JSON request body."),
    (b"[]", "application/json", "Malformed JSON request body."),
    (b'{"text": "x"}', "text/plain", "Request was not JSON"),
    (b"{}", "application/json", "required 'text' parameter is either empty or not provided"),
    (b'{"text": ""}', "application/json", "required 'text' parameter is either empty or not provided"),
)


def refused(client: Client, body: bytes, content_type: str = "application/json", *, route: str = "inference") -> str:
    """POST a body that must be refused as a fault of the caller; return the message."""
    with client.post(f"/{route}/{LEGACY_MODEL_NAME}", body, content_type) as answer:
        told = answer.json()
    assert answer.status == 400, told
    assert told["status_code"] == 400
    return str(told["message"])


@pytest.mark.parametrize("alias", [False, True], ids=["own-name", "alias"])
@pytest.mark.parametrize("route", ROUTES)
def test_each_route_answers_under_each_name(client: Client, route: str, alias: bool) -> None:
    name = LEGACY_MODEL_NAME if alias else client.model
    with client.generate("The sky is", route=route, model=name, max_tokens=4, top_k=1) as answer:
        body = answer.read_all()
    assert (answer.status, answer.whole) == (200, True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert client.view(answer.request_id)["num_completion_tokens"] <= 4
    if client.counts_digits:
        prompt = "The sky is" if route == "inference" else "User: The sky is\nAI: "
        assert text_of(route, body) == digits(prompt, 4)


@pytest.mark.parametrize("route", ROUTES)
def test_every_parameter_at_once_is_accepted_and_its_labels_come_back(client: Client, route: str) -> None:
    with client.generate("Hello", route=route, **EVERY_PARAMETER) as answer:
        answer.read_all()
    assert (answer.status, answer.whole) == (200, True)
    assert answer.headers["x-inference-seed"] == "7"
    assert answer.headers["x-client-session-id"] == "my chat"


def test_numbers_may_be_given_as_strings(client: Client) -> None:
    with client.generate("Hello", route="inference", **AS_STRINGS) as answer:
        body = answer.read_all()
    assert (answer.status, answer.whole) == (200, True)
    assert answer.headers["x-inference-seed"] == "7"
    if client.counts_digits:
        assert body.decode() == digits("Hello", 4)


@pytest.mark.parametrize("route", ["predictions", "chat"])
def test_material_to_answer_from_is_accepted_where_a_user_asks(client: Client, route: str) -> None:
    with client.generate("Which river?", route=route, rag_context="The Rhine.", max_tokens=2) as answer:
        answer.read_all()
    assert (answer.status, answer.whole) == (200, True)
    message = refused(client, json.dumps({"text": "x", "rag_context": "y"}).encode(), route="inference")
    assert "rag_context is unknown" in message


@pytest.mark.parametrize(
    ("name", "value", "given", "expected"), WRONG_TYPES, ids=[f"{name}-{given}" for name, _, given, _ in WRONG_TYPES]
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_wrong_type_is_refused_by_name(
    client: Client, route: str, name: str, value: object, given: str, expected: str
) -> None:
    message = refused(client, json.dumps({"text": "x", name: value}).encode(), route=route)
    assert message == f"Parameter: {name} is type=<class '{given}'>, expected <class '{expected}'>"


@pytest.mark.parametrize("side", ["below", "above"])
@pytest.mark.parametrize(("name", "low", "high", "below", "above"), BOUNDS, ids=[bound[0] for bound in BOUNDS])
def test_a_value_outside_its_bounds_is_refused_with_both(
    client: Client, name: str, low: float, high: float, below: float, above: float, side: str
) -> None:
    value = below if side == "below" else above
    message = refused(client, json.dumps({"text": "x", name: value}).encode())
    assert message == f"Parameter: {name}={value} is outside bounds, {low} <= {name} <= {high}."


@pytest.mark.parametrize("side", ["low", "high"])
@pytest.mark.parametrize(("name", "low", "high", "below", "above"), BOUNDS, ids=[bound[0] for bound in BOUNDS])
def test_a_value_on_its_bound_is_accepted(
    client: Client, name: str, low: float, high: float, below: float, above: float, side: str
) -> None:
    parameters: dict[str, Any] = {"max_tokens": 1, name: low if side == "low" else high}
    with client.generate("x", route="inference", **parameters) as answer:
        # Leave after the first text: the highest max_tokens would take a real model minutes.
        answer.read_chunk()
        assert answer.status == 200


@pytest.mark.parametrize(
    ("body", "content_type", "text"), MALFORMED, ids=["cut", "list", "not-json", "no-text", "empty-text"]
)
def test_a_body_that_is_no_request_is_refused(client: Client, body: bytes, content_type: str, text: str) -> None:
    assert refused(client, body, content_type) == text


def test_labels_and_stops_have_bounds_too(client: Client) -> None:
    assert "129 characters long" in refused(client, json.dumps({"text": "x", "session_id": "s" * 129}).encode())
    assert "65 characters long" in refused(client, json.dumps({"text": "x", "stop_sequence": "s" * 65}).encode())
    parameters: dict[str, Any] = {"session_id": "s" * 128, "stop_sequence": "s" * 64, "max_tokens": 1}
    with client.generate("x", route="inference", **parameters) as answer:
        answer.read_all()
    assert answer.status == 200


def test_an_unknown_parameter_and_an_unknown_model_are_named(client: Client) -> None:
    assert "max_token is unknown" in refused(client, b'{"text": "x", "max_token": 5}')
    with client.generate("x", model="no-such-model") as answer:
        told = answer.json()
    assert answer.status == 404
    assert "no-such-model" in told["message"] and client.model in told["message"]


@pytest.mark.parametrize("route", ["inference", "chat"])
def test_128_callers_at_once_get_their_own_answer_or_an_honest_refusal(client: Client, route: str) -> None:
    markers = [secrets.token_hex(6) for _ in range(NUM_CALLERS)]

    def call(index: int) -> tuple[int, str]:
        text = f"{markers[index]} is the number"
        with client.generate(text, route=route, max_tokens=8, return_prompt=True, top_k=1) as answer:
            body = answer.read_all()
        if answer.status == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert json.loads(body)["message"] == "Service overloaded, try again later."
            return 503, ""
        assert (answer.status, answer.whole) == (200, True), body
        if route == "chat":
            assert chat_events(body)[-1][0] == "close"
        prompt = text if route == "inference" else f"User: {text}\nAI: "
        answered = text_of(route, body)
        assert answered.startswith(prompt)
        if client.counts_digits:
            assert answered == prompt + digits(prompt, 8)
        return 200, answered

    answers = in_parallel([lambda index=index: call(index) for index in range(NUM_CALLERS)])  # type: ignore[misc]
    assert sum(status == 200 for status, _ in answers) >= client.info["num_rows"]
    for index, (_, answered) in enumerate(answers):
        assert not [marker for marker in markers if marker in answered and marker != markers[index]]


if __name__ == "__main__":
    sys.exit(run_program(lambda arguments: run_checks(__file__, __doc__, arguments)))
