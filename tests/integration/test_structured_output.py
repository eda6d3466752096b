"""Ask the whole service for answers in a form, over HTTP: on the mock, and with the real model's sampling."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
import requests

from tests.backend.json_schemas import keeps_to, make_schema
from tests.integration.service import Service, in_parallel, running_service

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Describe a person."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {
            "type": "array",
            "items": {"enum": ["tea", "coffee", "water"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


class Address(pydantic.BaseModel):
    street: Annotated[str, pydantic.Field(min_length=2, max_length=4)]


class Person(pydantic.BaseModel):
    name: Literal["Ada", "Alan"]
    ages: list[Literal[1, 2]] = pydantic.Field(min_length=1, max_length=2)
    home: Address | None


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with running_service() as it:
        yield it


def ask(service: Service, model: str = "mock", **members: Any) -> requests.Response:
    return service.post(CHAT, {"model": model, "messages": HELLO, **members})


def content(response: requests.Response) -> str:
    """Return the text of an answer that came to its own end."""
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop", response.text
    text: str = choice["message"]["content"]
    return text


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, "strict": True}}


def test_answers_keep_to_their_schemas_among_others_without_one(service: Service) -> None:
    rng = random.Random(3)
    schemas = [make_schema(rng, bounded=True) for _ in range(12)]
    formed = [partial(ask, service, response_format=schema_format(schema)) for schema in schemas]
    plain = [partial(ask, service, max_tokens=20)] * 4
    alone = ask(service, max_tokens=20).json()["choices"][0]["message"]
    answers = in_parallel([*formed, *plain])
    for schema, answer in zip(schemas, answers, strict=False):
        assert keeps_to(json.loads(content(answer)), schema), (schema, answer.text)
    assert [answer.json()["choices"][0]["message"] for answer in answers[len(schemas) :]] == [alone] * 4


def test_a_stream_and_several_choices_keep_to_a_form_too(service: Service) -> None:
    body = {"model": "mock", "messages": HELLO, "guided_regex": "[xyz]{3}-[0-9]{2}", "n": 2, "stream": True}
    events = [line[6:] for line in service.post(CHAT, body).text.splitlines() if line.startswith("data: {")]
    texts = {0: "", 1: ""}
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert all(re.fullmatch("[xyz]{3}-[0-9]{2}", text) for text in texts.values())


@pytest.mark.parametrize(
    ("members", "pattern"),
    [
        ({"guided_choice": ["tea", "coffee"]}, "tea|coffee"),
        ({"structured_outputs": {"regex": "a{2}b"}}, "aab"),
        ({"grammar": 'start: "(" word ")"\nword: /[xyz]/ | word word'}, r"\([xyz]+\)"),
    ],
    ids=["choice", "regex", "lark"],
)
def test_every_kind_of_form_ends(service: Service, members: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(ask(service, **members)))


def test_openais_client_parses_what_comes_into_its_own_type(service: Service) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model="mock", messages=HELLO, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_any_object_is_one_as_far_as_max_tokens_lets_it_be_said(service: Service) -> None:
    (choice,) = ask(service, max_tokens=8, response_format={"type": "json_object"}).json()["choices"]
    assert choice["message"]["content"].startswith("{") and choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"response_format": schema_format({"type": "hiccup"})}, "response_format.json_schema.schema"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a" * 65_537}, "guided_regex"),
    ],
    ids=["schema", "regex", "grammar", "size"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_form_is_a_400_before_the_head_that_names_the_member(
    service: Service, members: dict[str, Any], param: str, stream: bool
) -> None:
    response = ask(service, stream=stream, **members)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: is ")
    assert service.num_rows_in_use() == 0


def test_rows_go_on_decoding_while_grammars_compile(service: Service) -> None:
    options = [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(400)]
    heavy = partial(ask, service, max_tokens=2, json_schema={"anyOf": options})
    seconds: list[float] = []

    def plain() -> requests.Response:
        began = time.monotonic()
        response = ask(service, max_tokens=50)
        seconds.append(time.monotonic() - began)
        return response

    answers = in_parallel([*[heavy] * 8, plain, plain, *[heavy] * 8])
    assert {answer.status_code for answer in answers} == {200}
    assert max(seconds) < 5


AMBIGUOUS = (
    # Each doubles the ways to read the text so far with every "x", of which the mock says nothing but these.
    "start: a0\n"
    + "".join(f'a{n}: a{n + 1} a{n + 1} | "x" a{n + 1} | a{n + 1} "x" | "x"\n' for n in range(12))
    + 'a12: "x" | a0 a0',
    'start: a\na: "x" | a a | a a a',
    'start: a a a a a a a a\na: "" | "x" | a a',
)


def test_ambiguous_grammars_keep_nobody_else_waiting(service: Service) -> None:
    seconds: list[float] = []
    statuses: set[int] = set()
    is_over = threading.Event()

    def plain() -> None:
        while not is_over.is_set():
            began = time.monotonic()
            statuses.add(ask(service, max_tokens=40).status_code)
            seconds.append(time.monotonic() - began)

    others = threading.Thread(target=plain)
    others.start()
    ambiguous = [partial(ask, service, grammar=grammar, max_tokens=200) for grammar in AMBIGUOUS * 2]
    answers = in_parallel(ambiguous)
    is_over.set()
    others.join()
    assert {answer.status_code for answer in answers} <= {200, 500}
    assert statuses == {200}
    assert len(seconds) > 3 and max(seconds) < 5, seconds
    assert service.num_rows_in_use() == 0


@pytest.fixture(scope="module")
def real_service(model_image_path: object) -> Iterator[Service]:
    with running_service(mock=False, INFERENCE_API_ENGINE="fused") as it:
        yield it


@pytest.mark.model
@pytest.mark.timeout(400)
def test_the_real_model_fills_forms_by_chance_and_greedily(real_service: Service) -> None:
    name = "smollm2-135m-instruct"
    sampled = [
        partial(ask, real_service, name, response_format=schema_format(PERSON), temperature=1.2, seed=seed)
        for seed in range(6)
    ]
    greedy = partial(ask, real_service, name, response_format=schema_format(PERSON), temperature=0)
    city = partial(ask, real_service, name, guided_choice=["Paris", "London", "日本"], temperature=1.5)
    date = partial(ask, real_service, name, guided_regex=r"\d{4}-\d{2}-\d{2}", temperature=1.0)
    plain = partial(ask, real_service, name, temperature=0, max_tokens=24)
    alone = plain().json()["choices"]
    answers = in_parallel([*sampled, greedy, city, date, plain])
    for answer in answers[:7]:
        assert keeps_to(json.loads(content(answer)), PERSON), answer.text
    assert content(answers[7]) in ("Paris", "London", "日本")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", content(answers[8]))
    assert answers[9].json()["choices"] == alone
