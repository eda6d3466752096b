"""Check every bound of the TGI body on both sides, and that what is not served is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import parse_body
from inference_api.server.tgi.bodies import GenerateBody, GenerateParameters

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    # member, taken, refused
    ("best_of", [1, 32], [0, 33, 1.0, "2", True]),
    ("decoder_input_details", [True, False], [1, "true"]),
    ("details", [True, False], [0, "false"]),
    ("do_sample", [True, False], [1]),
    ("frequency_penalty", [-2, 2, 0.5], [-2.01, 2.01, "0"]),
    ("max_new_tokens", [1, 100_000], [0, -1, 1.5, "8"]),
    ("repetition_penalty", [0.01, 100], [0, 100.1]),
    ("return_full_text", [True, False], [1]),
    ("seed", [0, 2**63 - 1], [-1, 2**63, 1.5]),
    ("stop", [[], ["x"], ["x" * 64], ["x"] * 16], ["x", [""], ["x" * 65], ["x"] * 17, [1]]),
    ("temperature", [0.01, 1, 100], [0, -1, 100.1, "1"]),
    ("top_k", [1, 100_000], [0, -1, 1.5]),
    ("top_n_tokens", [0, 20], [-1, 21]),
    ("top_p", [0.01, 1], [0, 1.01]),
    ("truncate", [1, 100_000], [0, -1]),
    ("typical_p", [0.01, 1], [0, 1.01]),
    ("watermark", [False], [True, 0]),
    (
        "grammar",
        [None],
        ["x", {"type": "xml", "value": "x"}, {"type": "regex", "value": ""}, {"type": "json", "value": 1}],
    ),
    ("adapter_id", [None], ["lora", ""]),
]


def parse(**members: Any) -> GenerateBody:
    return parse_body(GenerateBody, json.dumps({"inputs": "hello", **members}).encode(), "application/json")


def test_the_table_names_every_parameter() -> None:
    assert {name for name, _, _ in BOUNDS} == GenerateParameters.model_fields.keys()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, taken, _ in BOUNDS for value in taken])
def test_a_value_within_bounds_is_taken_as_it_is(name: str, value: Any) -> None:
    assert getattr(parse(parameters={name: value}).given, name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, refused in BOUNDS for value in refused])
def test_a_value_out_of_bounds_is_refused_with_the_members_path_and_the_value(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(parameters={name: value})
    assert (caught.value.param or "").startswith(f"parameters.{name}")
    assert str(caught.value).startswith(f"parameters.{name}")
    assert "; it is " in str(caught.value)


@pytest.mark.parametrize("name", sorted(GenerateParameters.model_fields))
def test_null_is_absent(name: str) -> None:
    assert parse(parameters={name: None}).given == parse(parameters=None).given == parse().given


@pytest.mark.parametrize("name", ["adapter_id", "watermark"])
def test_what_is_not_served_says_so(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="leave it out"):
        parse(parameters={name: True})


def test_an_unknown_member_is_named_wherever_it_stands() -> None:
    with pytest.raises(InvalidRequestError, match=r"^Unknown parameter: model\.$"):
        parse(model="x")
    with pytest.raises(InvalidRequestError, match=r"^Unknown parameter: parameters\.temprature\.$"):
        parse(parameters={"temprature": 1})


@pytest.mark.parametrize("inputs", ["", None, 1, ["a"]])
def test_inputs_are_a_text_that_is_not_empty(inputs: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^inputs: "):
        parse(inputs=inputs)


@pytest.mark.parametrize(
    ("parameters", "draws"),
    [
        ({}, False),
        ({"do_sample": False, "seed": 1, "repetition_penalty": 1.5}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.5}, True),
        ({"top_k": 3}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5, "do_sample": False}, True),
    ],
)
def test_an_answer_is_greedy_unless_something_asks_for_a_draw(parameters: dict[str, Any], draws: bool) -> None:
    assert parse(parameters=parameters).given.draws is draws
