"""Check answers by beam search over HTTP, with a client that answers each round from a script."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from inference_api.errors import ClientLeftError, DeadlineError, OverloadedError
from inference_api.messages import Submit
from inference_api.sampling_params import SamplingParams
from inference_api.server.beam import BeamOptions
from inference_api.server.beam_rounds import BeamRounds, Caller
from inference_api.server.context import ServerContext
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.output_router import SessionStream
from tests.server.fakes import FakeClient, finished

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "mock", "messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"model": "mock", "prompt": "hello"},
}


@pytest.fixture
def app(make_app: Callable[..., Flask], fake_client: FakeClient) -> Flask:
    """Return an application in which H is the likeliest next id, then I, J and so on, whatever came before."""
    fake_client.pieces, fake_client.end = [b"H"], finished(num_tokens=1)
    return make_app(body_bytes=65_536)


def post(app: Flask, path: str, **members: Any) -> TestResponse:
    return app.test_client().post(path, json={**LEAST[path], "use_beam_search": True, "max_tokens": 3, **members})


def refusal(app: Flask, path: str = TEXT, **members: Any) -> tuple[int, str | None]:
    response = post(app, path, **members)
    return response.status_code, response.get_json()["error"]["param"]


def test_the_best_answers_come_first_and_the_usage_counts_every_id_that_was_drawn(app: Flask) -> None:
    body = post(app, TEXT, n=2).get_json()
    first, second = body["choices"]
    assert (first["index"], first["text"], first["finish_reason"]) == (0, "HHH", "length")
    assert second["index"] == 1 and sorted(second["text"]) == ["H", "H", "I"]
    assert body["usage"]["prompt_tokens"] == 5
    assert body["usage"]["completion_tokens"] == 1 + 2 + 2


def test_each_round_asks_for_one_id_of_each_live_beam(app: Flask, fake_client: FakeClient) -> None:
    post(app, TEXT, n=2)
    prompt = list(b"hello")
    assert [submit.token_ids for submit in fake_client.submits[:3]] == [prompt, [*prompt, 72], [*prompt, 73]]
    # The image has two ends: of four ids two at least go on.
    assert all(submit.sampling == SamplingParams(0.0, 0, 1.0, 0, logprobs=4) for submit in fake_client.submits)
    assert {(submit.max_tokens, submit.tenant) for submit in fake_client.submits} == {(1, "local")}
    assert len({submit.session_id for submit in fake_client.submits}) == 5
    assert len({submit.request_id for submit in fake_client.submits}) == 1


def test_a_search_may_be_wider_than_what_it_returns(app: Flask, fake_client: FakeClient) -> None:
    body = post(app, TEXT, n=1, best_of=3).get_json()
    assert [choice["text"] for choice in body["choices"]] == ["HHH"]
    assert len(fake_client.submits) == 1 + 3 + 3


def test_several_prompts_are_searched_side_by_side(app: Flask) -> None:
    body = post(app, TEXT, prompt=["a", "b"], n=2, echo=True).get_json()
    assert [choice["text"][:2] for choice in body["choices"]] == ["aH", "aH", "bH", "bH"]
    assert body["usage"]["prompt_tokens"] == 2


def test_chats_are_searched_too(app: Flask) -> None:
    body = post(app, CHAT, n=2, temperature=0).get_json()
    assert body["choices"][0]["message"]["content"] == "HHH"


def test_ends_end_beams_and_are_part_of_the_ids(app: Flask) -> None:
    body = post(app, TEXT, n=1, stop_token_ids=[72], max_tokens=8).get_json()
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("H", "stop")]


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"temperature": 1}, "temperature"),
        ({"stream": True}, "stream"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"allowed_token_ids": [72]}, "allowed_token_ids"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"dry_multiplier": 1}, "dry_multiplier"),
        ({"stop": "x"}, "stop"),
        ({"min_tokens": 1}, "min_tokens"),
        ({"logprobs": 0}, "logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
)
def test_what_a_search_has_no_use_for_is_refused_by_name(
    app: Flask, fake_client: FakeClient, members: dict[str, Any], name: str
) -> None:
    assert refusal(app, **members) == (400, name)
    assert fake_client.submits == []


def test_members_at_the_values_that_are_off_are_taken(app: Flask) -> None:
    off = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 1,
        "min_p": 0,
        "stream": False,
        "stop": [],
        "seed": 3,
        "bad_words": [],
    }
    assert post(app, TEXT, **off).status_code == 200


def test_a_search_has_no_idempotency_key(app: Flask, fake_client: FakeClient) -> None:
    body = {**LEAST[TEXT], "use_beam_search": True}
    response = app.test_client().post(TEXT, json=body, headers={"Idempotency-Key": "k1"})
    assert (response.status_code, response.get_json()["error"]["param"]) == (400, "Idempotency-Key")
    assert fake_client.submits == []


def refuse_when(client: FakeClient, is_full: Callable[[int], bool]) -> None:
    """Have the queue full for whatever comes after so many requests; it has room again for a second try."""
    take, refused = client.submit, set()

    def submit(one: Submit, on_news: Callable[[], None] | None = None) -> Any:
        num_before = len(client.submits)
        if is_full(num_before) and num_before not in refused:
            refused.add(num_before)
            raise OverloadedError("Service overloaded, try again later.", 2.0)
        return take(one, on_news)

    client.submit = submit  # type: ignore[method-assign]


def test_a_beam_that_finds_no_place_waits_for_the_others_of_its_round(app: Flask, fake_client: FakeClient) -> None:
    expected = post(app, TEXT, n=2).get_json()["choices"]
    refuse_when(fake_client, lambda num_before: num_before == 5 + 2)
    response = post(app, TEXT, n=2)
    assert (response.status_code, response.get_json()["choices"]) == (200, expected)


def test_a_round_that_finds_no_place_at_all_ends_the_call_with_one_clear_error(
    app: Flask, fake_client: FakeClient
) -> None:
    refuse_when(fake_client, lambda num_before: num_before == 3)
    response = post(app, TEXT, n=2)
    assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
    assert response.get_json()["error"]["code"] == "server_is_overloaded"


def test_a_search_has_no_more_requests_open_than_there_are_rows(
    app: Flask, context: ServerContext, fake_client: FakeClient
) -> None:
    num_submitted_at_end: list[int] = []
    read = SessionStream.read

    def told_read(stream: SessionStream, *given: Any, **named: Any) -> Any:
        num_submitted_at_end.append(len(fake_client.submits))
        return read(stream, *given, **named)

    rounds = rounds_of(context, lambda: 0.0, max_open=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SessionStream, "read", told_read)
        rounds.search(Caller("req_1", "alpha", None))
    assert sorted(set(num_submitted_at_end)) == [1, 2, 3, 4, 5], "each ends before the next is asked for"


def rounds_of(context: ServerContext, now: Callable[[], float], max_tokens: int = 3, max_open: int = 2) -> BeamRounds:
    prompt = GenerationRequest(list(b"hello"), SamplingParams(0.0, 0, 1.0, 0), max_tokens, deadline_seconds=10.0)
    options = BeamOptions(2, max_tokens, frozenset())
    return BeamRounds(
        [prompt], [options], context.settings, lambda ids: context.make_generation(ids, ()), max_open, now
    )


def test_the_deadline_is_that_of_the_whole_search(app: Flask, context: ServerContext, fake_client: FakeClient) -> None:
    # After none, one and three requests: before each round, that is.
    times = [0.0, 4.0, 4.0, 11.0]
    rounds = rounds_of(context, lambda: times[len(fake_client.submits)])
    with pytest.raises(DeadlineError, match="longer than 10 seconds"):
        rounds.search(Caller("req_1", "alpha", None))
    assert [submit.total_seconds for submit in fake_client.submits] == [10.0, 6.0, 6.0]


def test_the_log_line_tells_all_rounds_together(app: Flask, context: ServerContext) -> None:
    rounds = rounds_of(context, lambda: 0.0)
    rounds.search(Caller("req_1", "alpha", None))
    end = rounds.wait_finished(1.0)
    assert end is not None and end.num_completion_tokens == 5
    assert (rounds.num_prompt_tokens, rounds.row, rounds.abandoned) == (5, None, False)


def test_a_client_that_leaves_between_two_rounds_ends_the_search(
    app: Flask, context: ServerContext, fake_client: FakeClient
) -> None:
    ours, clients = socket.socketpair()

    def now() -> float:
        if len(fake_client.submits) == 3:
            clients.close()
        return 0.0

    rounds = rounds_of(context, now, max_tokens=50)
    with ours, pytest.raises(ClientLeftError):
        rounds.search(Caller("req_1", "alpha", ours))
    assert rounds.abandoned and len(fake_client.submits) == 3
