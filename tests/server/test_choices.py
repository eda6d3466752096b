"""Check several generations of one call: the order of their news, and that they share a client and an end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from inference_api.errors import AbortedError, BackendLostError, ClientLeftError, OverloadedError, ReaderBehindError
from inference_api.messages import Finished, FinishReason, SequenceOutput, Submit
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer, Choices, likeliest
from inference_api.server.context import ServerContext
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.token_trail import TokenText
from tests.backend.factories import make_submit
from tests.server.fakes import WAIT_SECONDS, FakeClient, finished

REQUEST = ("req", "alpha")
ABORTED = finished(FinishReason.ABORT)


def submits(count: int, **changes: object) -> list[Submit]:
    return [make_submit(f"s{index}", request_id=REQUEST[0], choice=index, **changes) for index in range(count)]


@pytest.fixture
def make(context: ServerContext) -> Callable[..., Choices]:
    """Return a factory of choices that are not started yet."""

    def make(count: int = 3, *stops: str) -> Choices:
        return Choices([context.make_generation(list(b"hello"), stops) for _ in range(count)])

    return make


@pytest.fixture
def running(make: Callable[..., Choices], fake_client: FakeClient) -> Choices:
    """Return three choices that have nothing yet; the test delivers."""
    fake_client.pieces, fake_client.end = [], None
    choices = make()
    choices.start(submits(3), None)
    return choices


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    yield client, server
    client.close()
    server.close()


def deliver(client: FakeClient, choice: int, text: bytes, end: Finished | None = None) -> None:
    stream = client.streams[choice]
    assert stream.deliver(SequenceOutput(f"s{choice}", choice, 1, len(stream.token_ids), list(text), end))


def test_answers_stand_in_their_order_whatever_the_order_of_their_ends(running, fake_client: FakeClient) -> None:
    for choice, text in ((2, b"two"), (0, b"zero"), (1, b"one")):
        deliver(fake_client, choice, text, finished(num_tokens=len(text)))
    answers = running.answers()
    assert [answer.text for answer in answers] == ["zero", "one", "two"]
    assert [answer.finished.num_completion_tokens for answer in answers] == [4, 3, 3]
    assert not running.is_running
    running.close()
    assert fake_client.aborts == [] and not running.abandoned


def test_whole_answers_are_not_read_before_their_ends(make, fake_client: FakeClient) -> None:
    fake_client.pieces, fake_client.end = [], None
    choices = make(1)
    choices.start(submits(1), None)
    (stream,) = fake_client.streams
    waits = threading.Event()
    only_end = stream.only_end
    stream.only_end = lambda: (only_end(), waits.set())  # type: ignore[method-assign]
    answers: list[Answer] = []
    reader = threading.Thread(target=lambda: answers.extend(choices.answers()))
    reader.start()
    assert waits.wait(WAIT_SECONDS)
    for letter in b"whol":
        deliver(fake_client, 0, bytes([letter]))
    assert choices._news.empty() and stream.num_read == 0
    deliver(fake_client, 0, b"e", finished(num_tokens=5))
    reader.join(WAIT_SECONDS)
    assert [answer.text for answer in answers] == ["whole"]
    choices.close()


def test_an_answer_has_its_own_prompts_logprobs(make, fake_client: FakeClient) -> None:
    choices = make(2)
    prompts = ([1, 2, 3], [4, 5])
    asked = [make_submit(f"s{place}", token_ids=ids, prompt_logprobs=0) for place, ids in enumerate(prompts)]
    choices.start(asked, None)
    scored = [[one.logprob for one in answer.prompt_logprobs] for answer in choices.answers()]
    assert scored == [[-0.02, -0.03], [-0.05]]
    choices.close()


def test_news_come_in_the_order_in_which_they_happened(running, fake_client: FakeClient) -> None:
    for choice, text in ((1, b"a"), (0, b"b"), (2, b"c"), (0, b"d")):
        deliver(fake_client, choice, text)
    pieces = [running.next_piece(0.0) for _ in range(4)]
    assert [(piece.index, piece.piece.text) for piece in pieces if piece] == [(1, "a"), (0, "b"), (2, "c"), (0, "d")]
    running.close()


def test_the_first_id_of_each_comes_alone_and_what_came_with_it_follows(running, fake_client: FakeClient) -> None:
    deliver(fake_client, 0, b"abc", finished(num_tokens=3))
    deliver(fake_client, 1, b"xyz")
    pieces = [running.next_piece(0.0) for _ in range(4)]
    assert [(piece.index, piece.piece.text) for piece in pieces if piece] == [(0, "a"), (1, "x"), (0, "bc"), (1, "yz")]
    assert running.next_piece(0.0) is None
    assert [piece.num_tokens for piece in pieces if piece] == [1, 1, 3, 3]
    running.close()


def test_nothing_in_time_is_none_however_often_an_old_wakeup_is_left(running, fake_client: FakeClient) -> None:
    assert running.next_piece(0.0) is None
    for letter in b"ab":
        deliver(fake_client, 0, bytes([letter]))
    assert [running.next_piece(0.0).piece.text for _ in range(2)] == ["a", "b"]
    assert running.next_piece(0.0) is None
    running.close()


def test_one_that_ends_is_heard_of_no_more_and_the_others_go_on(running, fake_client: FakeClient) -> None:
    deliver(fake_client, 0, b"a", finished(num_tokens=1))
    assert running.next_piece(0.0).piece.finished is not None
    assert running.is_running
    deliver(fake_client, 1, b"b", finished(num_tokens=1))
    deliver(fake_client, 2, b"c", finished(num_tokens=1))
    assert [choice.index for choice in running.pieces()] == [1, 2]
    running.close()
    assert fake_client.aborts == []


def test_one_that_fails_ends_the_call_and_the_others_are_aborted(running, fake_client: FakeClient) -> None:
    deliver(fake_client, 0, b"a")
    deliver(fake_client, 1, b"bcd", finished(error="backend_lost"))
    texts: list[str] = []
    with pytest.raises(BackendLostError, match="it broke"):
        texts.extend(piece.piece.text for piece in running.pieces())
    assert texts == ["a", "b", "cd"]
    with pytest.raises(BackendLostError):
        running.next_piece(0.0)
    running.close()
    assert set(fake_client.aborts) == {REQUEST}
    assert not running.abandoned


def test_a_failure_without_text_is_raised_at_once(running, fake_client: FakeClient) -> None:
    deliver(fake_client, 2, b"", finished(error="backend_lost"))
    with pytest.raises(BackendLostError):
        running.answers()
    running.close()


def test_an_abort_by_its_tenant_is_told_as_one(running, fake_client: FakeClient) -> None:
    for choice in range(3):
        deliver(fake_client, choice, b"", ABORTED)
    with pytest.raises(AbortedError) as caught:
        running.answers()
    assert caught.type is AbortedError
    running.close()


def test_the_one_for_whose_fault_the_others_are_aborted_is_told_whichever_end_is_read_first(
    running, fake_client: FakeClient
) -> None:
    deliver(fake_client, 0, b"", ABORTED)
    deliver(fake_client, 1, b"", ABORTED)
    deliver(fake_client, 2, b"", finished(error="reader_behind"))
    with pytest.raises(ReaderBehindError):
        list(running.pieces())
    running.close()


def test_a_refusal_in_the_middle_leaves_none_behind(make, watcher: DisconnectWatcher, fake_client, pair) -> None:
    fake_client.pieces, fake_client.end = [], None
    accept = fake_client.submit

    def submit(submit: Submit, on_news: Callable[[], None] | None = None):
        if submit.choice == 2:
            raise OverloadedError("Service overloaded, try again later.")
        return accept(submit, on_news)

    fake_client.submit = submit
    choices = make(4)
    with pytest.raises(OverloadedError):
        choices.start(submits(4), pair[1])
    assert set(fake_client.aborts) == {REQUEST}
    assert watcher.num_watched == 0


def test_a_refusal_of_the_first_aborts_nothing(make, watcher: DisconnectWatcher, fake_client, pair) -> None:
    fake_client.refusal = OverloadedError("Service overloaded, try again later.")
    with pytest.raises(OverloadedError):
        make().start(submits(3), pair[1])
    assert fake_client.aborts == [] and len(fake_client.submits) == 1
    assert watcher.num_watched == 0


def test_closing_before_the_end_aborts_the_call_and_forgets_the_client(make, watcher, fake_client, pair) -> None:
    fake_client.pieces, fake_client.end = [b"a"], None
    choices = make()
    choices.start(submits(3), pair[1])
    assert watcher.num_watched == 1
    assert choices.next_piece(0.0).piece.text == "a"
    choices.close()
    assert set(fake_client.aborts) == {REQUEST} and choices.abandoned
    assert watcher.num_watched == 0


def test_the_client_is_watched_until_the_last_end_though_the_first_has_ended(make, fake_client, pair) -> None:
    client, server = pair
    fake_client.pieces, fake_client.end = [], None
    aborted = threading.Event()

    def abort(request_id: str, tenant: str, _call_id: str = "") -> None:
        deliver(fake_client, 1, b"", ABORTED)
        aborted.set()

    fake_client.abort = abort
    choices = make(2)
    choices.start(submits(2), server)
    deliver(fake_client, 0, b"a", finished(num_tokens=1))
    assert choices.next_piece(0.0).piece.finished is not None
    client.close()
    assert aborted.wait(WAIT_SECONDS)
    with pytest.raises(ClientLeftError):
        choices.next_piece(WAIT_SECONDS)
    fake_client.abort = lambda request_id, tenant: None
    choices.close()


def events_of_a_client_that_leaves_during_the_second_submit(choices, num_submits, fake_client, pair) -> list[str]:
    client, server = pair
    fake_client.pieces, fake_client.end = [], None
    accept, events, left = fake_client.submit, [], threading.Event()

    def submit(submit: Submit, on_news: Callable[[], None] | None = None):
        if submit.choice == 1:
            client.close()
            assert left.wait(WAIT_SECONDS)
        events.append("submit")
        return accept(submit, on_news)

    def abort(request_id: str, tenant: str, _call_id: str = "") -> None:
        events.append("abort")
        left.set()

    fake_client.submit, fake_client.abort = submit, abort
    with pytest.raises(ClientLeftError):
        choices.start(submits(num_submits), server)
    return events


def test_a_client_that_leaves_while_they_are_submitted_leaves_none_running(make, fake_client, pair) -> None:
    events = events_of_a_client_that_leaves_during_the_second_submit(make(), 3, fake_client, pair)
    assert events[:2] == ["submit", "abort"] and events[-1] == "abort", "the later ones would run on, read by nobody"
    assert events.count("submit") == 2, "nobody would read the third"


def test_a_client_that_leaves_while_the_last_one_is_submitted_leaves_none_running(make, fake_client, pair) -> None:
    events = events_of_a_client_that_leaves_during_the_second_submit(make(2), 2, fake_client, pair)
    assert events.count("submit") == 2 and events[-1] == "abort"


def test_the_log_hears_of_all_of_them(running, fake_client: FakeClient) -> None:
    assert running.wait_finished(0.0) is None
    for choice in range(3):
        deliver(fake_client, choice, b"ab", finished(FinishReason.STOP, num_tokens=2))
    end = running.wait_finished(0.0)
    assert end is not None and (end.reason, end.num_completion_tokens) == (FinishReason.STOP, 6)
    assert (running.num_prompt_tokens, running.num_delivered_tokens, running.num_choices) == (5, 6, 3)
    assert running.row is None
    running.answers()
    running.close()


def test_the_log_hears_of_a_failure_though_others_ended_well(running, fake_client: FakeClient) -> None:
    for choice, error in enumerate(("", "deadline_exceeded", "")):
        deliver(fake_client, choice, b"", finished(error=error))
    end = running.wait_finished(0.0)
    assert end is not None and end.error is not None and end.error.code == "deadline_exceeded"
    running.close()


def test_a_single_one_keeps_its_row_and_its_timing(make, fake_client: FakeClient) -> None:
    choices = make(1)
    choices.start(submits(1), None)
    assert choices.row == 0
    assert choices.wait_finished(0.0) == finished()
    assert [answer.text for answer in choices.answers()] == ["Hello"]
    choices.close()


def test_an_answer_that_says_nothing_is_as_likely_as_its_end() -> None:
    def answer(text: str, *logprobs: float, end: float) -> Answer:
        tokens = tuple(TokenText(ord("a"), "a", TokenLogprobs(logprob, [])) for logprob in logprobs)
        return Answer(text, finished(), tokens, (TokenText(256, "", TokenLogprobs(end, [])),))

    silent, likely, unlikely = answer("", end=-2.0), answer("a", -1.0, end=-1.0), answer("aa", -5.0, -3.0, end=-0.5)
    assert likeliest([silent, unlikely, likely], num_made=3, num_kept=3) == [likely, silent, unlikely]
    assert likeliest([Answer("", finished(), ()), silent], num_made=2, num_kept=1) == [silent]


def test_the_likeliest_of_each_prompt_by_mean_logprob_are_kept_best_first(make, fake_client: FakeClient) -> None:
    fake_client.answers = [[b"zz"], [b"aaaaaa"], [b"b"], [b"c"], [b"x"], [b"d"]]
    choices = make(6)
    sampling = make_submit("s").sampling
    sampling = type(sampling)(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, logprobs=0)
    choices.start(submits(6, sampling=sampling), None)
    kept = likeliest(choices.answers(), num_made=3, num_kept=2)
    assert [answer.text for answer in kept] == ["aaaaaa", "b", "c", "d"]
    choices.close()
