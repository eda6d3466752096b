"""Check on the running service that parameters end answers where they say, and that a wrong one is only a 400."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.service import SLOW_START, Service, running_service

EOS_ID = 256
VOCAB_SIZE = 259
ROUTE = "/inference/mock"


@pytest.fixture(scope="module")
def digits() -> Iterator[Service]:
    """A service that answers with the digits of the positions, several ids a step."""
    with running_service(**SLOW_START) as service:
        yield service


@pytest.fixture(scope="module")
def echo() -> Iterator[Service]:
    """A service that answers with the prompt and then ends."""
    with running_service(INFERENCE_API_MOCK_MODE="echo", **SLOW_START) as service:
        yield service


def test_a_stop_id_ends_the_answer(digits: Service) -> None:
    request = {"text": "01234", "max_tokens": 40}
    assert digits.ask(ROUTE, {**request, "stop_token_ids": [ord("8")]}) == "5678"
    assert digits.ask(ROUTE, {**request, "stop_token_ids": [ord("8")], "min_tokens": 4}) == "56789012345678"


def test_a_stop_sequence_counts_after_min_tokens(digits: Service) -> None:
    request = {"text": "01234", "max_tokens": 40, "stop_sequence": "67"}
    assert digits.ask(ROUTE, request) == "5"
    # The third id completes the first "67": it counts only if two ids, not three, must come before.
    assert digits.ask(ROUTE, {**request, "min_tokens": 2}) == "5"
    assert digits.ask(ROUTE, {**request, "min_tokens": 3}) == "56789012345"
    assert digits.ask("/chat/mock", {**request, "min_tokens": 3}).count("67") > 0


def test_the_models_end_waits_for_min_tokens_or_is_ignored(echo: Service) -> None:
    def num_tokens(**members: object) -> int:
        answer = echo.post(ROUTE, {"text": "hi", "max_tokens": 9, **members})
        assert answer.text == "hi"
        return int(echo.view(answer.headers["Request-Id"])["num_completion_tokens"])

    assert num_tokens() == 3
    assert num_tokens(min_tokens=5) == 6
    assert num_tokens(ignore_eos=True) == 9
    assert num_tokens(ignore_eos=True, stop_token_ids=[EOS_ID]) == 3


WRONG = {
    "min_p": (1.5, "min_p=1.5 is outside bounds, 0.0 <= min_p <= 1.0"),
    "typical_p": (0, "typical_p=0.0 is outside bounds, 0.01 <= typical_p <= 1.0"),
    "repetition_penalty": (-1, "repetition_penalty=-1.0 is outside bounds, 0.01 <="),
    "presence_penalty": (2.5, "presence_penalty=2.5 is outside bounds, -2.0 <="),
    "frequency_penalty": ("x", "frequency_penalty is type=<class 'str'>"),
    "logit_bias": ({"7": 1e9}, "logit_bias[7]=1000000000.0 is outside bounds, -100.0 <="),
    "allowed_token_ids": ([VOCAB_SIZE], f"allowed_token_ids[0]={VOCAB_SIZE} is outside bounds, 0 <="),
    "banned_token_ids": (list(range(VOCAB_SIZE)), f"banned_token_ids holds all {VOCAB_SIZE} ids that may be drawn"),
    "stop_token_ids": ([-1], "stop_token_ids[0]=-1 is outside bounds, 0 <="),
    "min_tokens": (6, "min_tokens=6 is outside bounds, 0 <= min_tokens <= max_tokens=5"),
    "ignore_eos": ("maybe", "ignore_eos is type=<class 'str'>"),
}


def test_every_wrong_value_is_a_400_with_its_reason_and_the_service_goes_on(digits: Service) -> None:
    backend, errors = digits.backend_pid, digits.log.read_text().count("ERROR")
    for name, (value, reason) in WRONG.items():
        for route in (ROUTE, "/chat/mock"):
            answer = digits.post(route, {"text": "01234", "max_tokens": 5, name: value})
            assert answer.status_code == 400 and answer.headers["X-Error-Code"] == "invalid_request"
            assert f"Parameter: {reason}" in answer.json()["message"]
        assert digits.ask(ROUTE, {"text": "01234", "max_tokens": 5}) == "56789"
    assert (digits.backend_pid, digits.log.read_text().count("ERROR")) == (backend, errors)


def test_a_top_k_above_the_vocabulary_and_every_option_at_once_are_served(digits: Service) -> None:
    options = {
        "top_k": 1000,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": 1, "8": -100},
        "allowed_token_ids": list(range(VOCAB_SIZE)),
        "banned_token_ids": list(range(200)),
    }
    assert digits.ask(ROUTE, {"text": "01234", "max_tokens": 5, **options}) == "56789"
