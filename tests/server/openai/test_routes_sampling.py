"""Check over HTTP what an answer may hold: a stop that is left in it, and no words that are ruled out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from flask import Flask

from inference_api.messages import FinishReason
from tests.server.fakes import FakeClient, finished
from tests.server.openai.route_calls import BOTH, TEXT, choice_text, joined, refusal, streamed, whole


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    fake_client.pieces = [b"one, t", b"wo", b"!?"]
    fake_client.end = finished(FinishReason.STOP, num_tokens=9, stop=b"two!")
    return make_app(body_bytes=65_536)


@pytest.mark.parametrize("path", BOTH)
def test_a_stop_is_left_in_the_answer_if_it_is_asked_for(app: Flask, path: str) -> None:
    for keeps, text in ((None, "one, "), (False, "one, "), (True, "one, two!")):
        members = {"stop": ["two!"], "include_stop_str_in_output": keeps}
        assert choice_text(whole(app, path, **members)["choices"][0]) == text
        assert joined(streamed(app, path, **members)) == text


def test_the_tokens_of_a_stop_that_is_left_in_are_told_with_it(app: Flask) -> None:
    for keeps, tokens in ((False, ["o", "n", "e", ",", " "]), (True, [*"one, two!"])):
        members = {"stop": ["two!"], "include_stop_str_in_output": keeps, "logprobs": 0}
        (choice,) = whole(app, TEXT, **members)["choices"]
        assert choice["logprobs"]["tokens"] == tokens


@pytest.mark.parametrize("path", BOTH)
def test_bad_words_cross_as_ids(app: Flask, fake_client: FakeClient, path: str) -> None:
    whole(app, path, bad_words=["x", "hey"])
    sampling = fake_client.last.sampling
    # The mock writes a byte an id, and with a blank before it a word is longer.
    assert sampling.banned_ids == (ord("x"),)
    assert sampling.bad_sequences == (tuple(b"hey"),)


def test_bad_words_that_leave_nothing_are_refused(app: Flask) -> None:
    status, message, param = refusal(app, TEXT, bad_words=["x"], allowed_token_ids=[ord("x")])
    assert (status, param) == (400, "bad_words") and "no token" in message
