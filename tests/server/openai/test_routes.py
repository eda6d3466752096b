"""Check the OpenAI routes over HTTP, whole and streamed, with a client that answers from a script."""

from __future__ import annotations

import pytest
from flask import Flask

from inference_api.server.context import ServerContext
from tests.server.fakes import FakeClient
from tests.server.openai.route_calls import BOTH, CHAT, HELLO, TEXT, choice_text, joined, post, refusal, streamed, whole


@pytest.mark.parametrize(
    ("path", "kind", "prefix"), [(CHAT, "chat.completion", "chatcmpl-"), (TEXT, "text_completion", "cmpl-")]
)
def test_a_whole_answer_has_text_reason_usage_and_the_calls_id(app: Flask, path: str, kind: str, prefix: str) -> None:
    response = post(app, path)
    body = response.get_json()
    assert (body["object"], body["model"]) == (kind, "mock")
    assert body["id"] == prefix + response.headers["Request-Id"].removeprefix("req_")
    assert body["system_fingerprint"] == "fp_digest-1"
    (choice,) = body["choices"]
    assert (choice_text(choice), choice["finish_reason"], choice["index"]) == ("Hello", "stop", 0)
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("path", BOTH)
def test_a_stream_joins_to_the_whole_answers_text(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.pieces = ["h\u00e9".encode()[:2], "h\u00e9".encode()[2:], "\U0001f642!".encode()]
    chunks = streamed(app, path)
    assert joined(chunks) == choice_text(whole(app, path)["choices"][0]) == "h\u00e9\U0001f642!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_a_conversation_is_rendered_with_the_models_template(app: Flask, fake_client: FakeClient) -> None:
    body = whole(app, CHAT, messages=[{"role": "system", "content": "be"}, *HELLO])
    start, end = 257, 258
    expected = [
        *(start, *b"system\nbe", end, *b"\n"),
        *(start, *b"user\nhello", end, *b"\n"),
        *(start, *b"assistant\n"),
    ]
    assert fake_client.last.token_ids == expected
    assert body["usage"]["prompt_tokens"] == len(expected)


def test_control_texts_of_a_caller_stay_text(app: Flask, fake_client: FakeClient) -> None:
    whole(app, TEXT, prompt="<|im_end|>")
    assert bytes(fake_client.last.token_ids) == b"<|im_end|>"
    whole(app, CHAT, messages=[{"role": "user", "content": "<|im_end|>"}])
    assert bytes(fake_client.last.token_ids[6:16]) == b"<|im_end|>"


def test_a_chat_goes_on_to_the_end_of_the_context_and_a_completion_for_16_tokens(app, fake_client) -> None:
    whole(app, CHAT)
    assert fake_client.last.max_tokens == 64 - len(fake_client.last.token_ids)
    whole(app, TEXT)
    assert fake_client.last.max_tokens == 16
    whole(app, TEXT, prompt="x" * 60)
    assert fake_client.last.max_tokens == 4


def test_max_completion_tokens_wins_over_max_tokens(app: Flask, fake_client: FakeClient) -> None:
    whole(app, CHAT, max_tokens=3, max_completion_tokens=4)
    assert fake_client.last.max_tokens == 4
    whole(app, CHAT, max_tokens=3)
    assert fake_client.last.max_tokens == 3


def test_a_prompt_may_be_ids_and_is_taken_as_it_is(app: Flask, fake_client: FakeClient) -> None:
    whole(app, TEXT, prompt=[257, 104, 105])
    assert fake_client.last.token_ids == [257, 104, 105]


@pytest.mark.parametrize("prompts", [["one", "three"], [[111, 110, 101], [116, 104, 114, 101, 101]]])
def test_several_prompts_are_answered_in_their_order_and_each_is_counted_once(app, fake_client, prompts) -> None:
    fake_client.answers = [[b"a"], [b"b"], [b"c"], [b"d"]]
    body = whole(app, TEXT, prompt=prompts, n=2, echo=True)
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert texts == [(0, "onea"), (1, "oneb"), (2, "threec"), (3, "threed")]
    assert [submit.choice for submit in fake_client.submits] == [0, 1, 0, 1]
    assert body["usage"]["prompt_tokens"] == 8 and body["usage"]["completion_tokens"] == 20
    assert len({submit.sampling.seed for submit in fake_client.submits}) == 1


@pytest.mark.parametrize("path", BOTH)
def test_n_answers_differ_in_their_choice_and_share_request_and_seed(app: Flask, fake_client, path: str) -> None:
    fake_client.answers = [[b"a"], [b"b"], [b"c"]]
    response = post(app, path, n=3)
    assert [choice_text(choice) for choice in response.get_json()["choices"]] == ["a", "b", "c"]
    assert [submit.choice for submit in fake_client.submits] == [0, 1, 2]
    assert {submit.request_id for submit in fake_client.submits} == {response.headers["Request-Id"]}
    assert {str(submit.sampling.seed) for submit in fake_client.submits} == {response.headers["X-Inference-Seed"]}


@pytest.mark.parametrize("path", BOTH)
def test_n_answers_are_streamed_side_by_side(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.answers = [[b"one"], [b"two"]]
    chunks = streamed(app, path, n=2)
    assert [joined(chunks, index) for index in (0, 1)] == ["one", "two"]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1]


def test_best_of_returns_the_likeliest_and_counts_all_that_were_made(app: Flask, fake_client: FakeClient) -> None:
    fake_client.answers = [[b"z"], [b"a"], [b"m"]]
    body = whole(app, TEXT, best_of=3, n=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "a"), (1, "m")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 15
    assert fake_client.last.sampling.logprobs == 0


def test_best_of_as_many_as_n_is_n(app: Flask, fake_client: FakeClient) -> None:
    assert len(whole(app, TEXT, best_of=2, n=2)["choices"]) == 2
    assert fake_client.last.sampling.logprobs is None
    assert streamed(app, TEXT, best_of=1)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(app: Flask, stream: bool) -> None:
    if stream:
        assert joined(streamed(app, TEXT, prompt="say ", echo=True)) == "say Hello"
    else:
        assert whole(app, TEXT, prompt="say ", echo=True)["choices"][0]["text"] == "say Hello"


@pytest.mark.parametrize(
    "pieces", [[b"Hello"], [b"He", b"llo"], [bytes([one]) for one in "h\u00e9\U0001f642".encode()]]
)
def test_logprobs_join_to_the_text_whole_and_streamed(app: Flask, fake_client: FakeClient, pieces: list[bytes]) -> None:
    fake_client.pieces = pieces
    text = b"".join(pieces).decode()
    (choice,) = whole(app, CHAT, logprobs=True, top_logprobs=2)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"] == text
    assert [one["logprob"] for one in content] == [-byte / 100 for byte in text.encode()]
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    assert bytes(byte for one in content for byte in one["bytes"]) == text.encode()
    chunks = streamed(app, CHAT, logprobs=True, top_logprobs=2)
    parts = [part for chunk in chunks for part in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert parts == content
    (choice,) = whole(app, TEXT, logprobs=1)["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == text
    lengths = [len(one) for one in choice["logprobs"]["tokens"]]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:place]) for place in range(len(lengths))]


@pytest.mark.parametrize(("logprobs", "num_top"), [(0, 1), (1, 1), (3, 3)])
def test_as_many_likeliest_as_were_asked_for_and_the_chosen_one(app: Flask, logprobs: int, num_top: int) -> None:
    (choice,) = whole(app, TEXT, logprobs=logprobs)["choices"]
    assert [len(one) for one in choice["logprobs"]["top_logprobs"]] == [num_top] * 5


@pytest.mark.parametrize("path", BOTH)
def test_logprobs_that_nobody_asked_for_are_null_and_cost_nothing(
    app: Flask, fake_client: FakeClient, path: str
) -> None:
    assert whole(app, path)["choices"][0]["logprobs"] is None
    assert fake_client.last.sampling.logprobs is None


@pytest.mark.parametrize("path", BOTH)
@pytest.mark.parametrize("pieces", [[b"one STOP"], [b"one ST", b"OP"], [bytes([one]) for one in b"one STOP"]])
def test_nothing_of_a_stop_is_sent_however_it_was_cut_into_tokens(app, fake_client, path: str, pieces) -> None:
    fake_client.pieces = pieces
    assert choice_text(whole(app, path, stop=["never", "STOP"])["choices"][0]) == "one "
    assert fake_client.last.stop_sequences == [b"never", b"STOP"]
    assert joined(streamed(app, path, stop="STOP")) == "one "


def test_logprobs_end_where_a_stop_cuts_a_token(app: Flask, fake_client: FakeClient) -> None:
    fake_client.pieces = [b"ab", b"cSTOP"]
    (choice,) = whole(app, CHAT, stop="STOP", logprobs=True)["choices"]
    assert choice["message"]["content"] == "abc"
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["a", "b", "c"]
    chunks = streamed(app, CHAT, stop="STOP", logprobs=True)
    parts = [part for chunk in chunks for part in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [part["token"] for part in parts] == ["a", "b", "c"]


@pytest.mark.parametrize("path", BOTH)
def test_ends_and_options_cross_as_they_were_sent(app: Flask, fake_client: FakeClient, path: str) -> None:
    whole(app, path, stop_token_ids=[5, 6, 5], min_tokens=2, ignore_eos=True, seed=-1, temperature=0, top_k=-1)
    submit = fake_client.last
    assert (submit.stop_ids, submit.min_tokens, submit.ignore_eos) == ((5, 6), 2, True)
    assert (submit.sampling.seed, submit.sampling.temperature, submit.sampling.top_k) == (2**63 - 1, 0.0, 0)


@pytest.mark.parametrize("path", BOTH)
def test_usage_ends_a_stream_that_asks_for_it(app: Flask, path: str) -> None:
    expected = whole(app, path)["usage"]
    *chunks, last = streamed(app, path, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], expected)
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("path", BOTH)
def test_continuous_usage_counts_what_has_come(app: Flask, path: str) -> None:
    chunks = streamed(app, path, stream_options={"continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {whole(app, path)["usage"]["prompt_tokens"]}


def test_every_served_name_is_answered_under_that_name(app: Flask) -> None:
    assert whole(app, CHAT, model="alias")["model"] == "alias"
    assert refusal(app, CHAT, model="falcon40b")[0] == 404


@pytest.mark.parametrize("path", BOTH)
def test_an_old_client_gets_the_whole_stream_with_its_length(app: Flask, path: str) -> None:
    response = post(app, path, stream=True, protocol="HTTP/1.0")
    assert response.headers["Content-Length"] == str(len(response.data))
    assert response.data.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("path", BOTH)
def test_a_stream_that_is_closed_early_aborts_its_request(app: Flask, fake_client: FakeClient, path: str) -> None:
    fake_client.end = None
    response = post(app, path, stream=True, n=2)
    next(iter(response.iter_encoded()))
    response.close()
    assert set(fake_client.aborts) == {(response.headers["Request-Id"], "local")}


def test_models_are_listed_and_described(app: Flask, context: ServerContext) -> None:
    listed = app.test_client().get("/v1/models").get_json()
    assert listed["object"] == "list" and [model["id"] for model in listed["data"]] == ["mock", "alias"]
    for model in listed["data"]:
        assert model == app.test_client().get(f"/v1/models/{model['id']}").get_json()
        assert model["object"] == "model" and model["root"] == "mock" and isinstance(model["created"], int)
        assert model["max_model_len"] == context.limits.context_tokens
    missing = app.test_client().get("/v1/models/gpt-9")
    assert (missing.status_code, missing.get_json()["error"]["code"]) == (404, "model_not_found")
