"""Check what the front end makes of a model's ids: text, stop sequences, lengths, events, the prompt before the answer.

Runs under pytest, and as a program against any server: `test_frontend_api.py --url URL`. On the mock every digit is
known; on another engine the same properties are checked on whatever the model says.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

from tests.live.client import Client, chat_events, digits, text_of
from tests.live.program import run_checks, run_program

TEXT = "Count with me: one, two,"
NUM_TOKENS = 24
END_TEXTS = ("<|endoftext|>", "<|im_end|>", "</s>")


def generate(client: Client, route: str = "inference", **parameters: Any) -> str:
    """Return the text of a whole greedy answer."""
    with client.generate(TEXT, route=route, top_k=1, **{"max_tokens": NUM_TOKENS, **parameters}) as answer:
        body = answer.read_all()
    assert (answer.status, answer.whole) == (200, True), body
    return text_of(route, body)


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 10, 11, 100])
def test_an_answer_has_as_many_tokens_as_were_asked_for(client: Client, num_tokens: int) -> None:
    with client.generate(TEXT, route="inference", top_k=1, max_tokens=num_tokens) as answer:
        text = answer.read_all().decode()
    view = client.view(answer.request_id)
    assert view["num_completion_tokens"] <= num_tokens
    assert (view["finish_reason"] == "length") == (view["num_completion_tokens"] == num_tokens)
    if client.counts_digits:
        assert text == digits(TEXT, num_tokens)


def test_the_raw_routes_carry_text_and_nothing_else(client: Client) -> None:
    for route in ("inference", "predictions"):
        text = generate(client, route)
        assert text
        assert not [mark for mark in (*END_TEXTS, "event:", "data:") if mark in text]


def test_an_answer_ends_before_its_stop_sequence(client: Client) -> None:
    whole = generate(client)
    for first, length in ((0, 1), (3, 1), (3, 2), (5, 4)):
        stop = whole[first : first + length]
        assert generate(client, stop_sequence=stop) == whole[: whole.index(stop)]
    if client.counts_digits:
        assert whole == digits(TEXT, NUM_TOKENS)


def test_a_stop_sequence_that_never_comes_and_the_documented_default_change_nothing(client: Client) -> None:
    whole = generate(client)
    assert generate(client, stop_sequence="\u2603\u2603\u2603") == whole
    assert generate(client, stop_sequence="<|endoftext|>") == whole
    # The beginning of a stop is held back while it may become one, and must come out when it does not.
    assert generate(client, stop_sequence=whole[4:7] + "\u2603") == whole


def test_a_chat_tells_the_message_so_far_and_then_closes(client: Client) -> None:
    with client.generate(TEXT, route="chat", top_k=1, max_tokens=NUM_TOKENS) as answer:
        events = chat_events(answer.read_all())
    assert answer.whole
    assert events[-1] == ("close", {"message": "Connection closed"})
    assert {name for name, _ in events[:-1]} == {"answer"}
    messages = [data["message"] for _, data in events[:-1]]
    assert all(len(after) > len(before) for before, after in itertools.pairwise(messages))
    assert all(after.startswith(before) for before, after in itertools.pairwise(messages))
    assert messages[-1] == generate(client, "predictions")
    if client.counts_digits:
        assert messages[-1] == digits(f"User: {TEXT}\nAI: ", NUM_TOKENS)


def test_a_chat_ends_before_its_stop_sequence(client: Client) -> None:
    whole = generate(client, "chat")
    stop = whole[3:5]
    assert generate(client, "chat", stop_sequence=stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize("route", ["inference", "predictions", "chat"])
def test_the_prompt_comes_first_when_it_is_asked_for(client: Client, route: str) -> None:
    prompt = TEXT if route == "inference" else f"User: {TEXT}\nAI: "
    answered = generate(client, route)
    assert generate(client, route, return_prompt=True) == prompt + answered
    assert generate(client, route, return_prompt="false") == answered


def test_control_texts_in_a_prompt_are_text(client: Client) -> None:
    for text in (*END_TEXTS, "<|stop|>"):
        with client.generate(text, route="inference", return_prompt=True, max_tokens=2, top_k=1) as answer:
            body = answer.read_all().decode()
        assert (answer.status, answer.whole) == (200, True)
        assert body.startswith(text)
        if client.counts_digits:
            assert body == text + digits(text, 2)


def test_an_answer_comes_while_it_is_made(client: Client) -> None:
    with client.generate(TEXT, route="inference", top_k=1, max_tokens=64) as answer:
        answer.read_all()
    # The first id goes out alone; later ones may share a chunk when the front end or the network is busy.
    assert len(answer.chunks) >= 2
    assert answer.ttft_seconds < answer.chunks[-1].at - answer.sent_at


if __name__ == "__main__":
    sys.exit(run_program(lambda arguments: run_checks(__file__, __doc__, arguments)))
