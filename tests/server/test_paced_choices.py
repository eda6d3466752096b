"""Check that a call of many generations has a bounded number of them open, and still comes to one end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from inference_api.errors import AbortedError, BackendLostError, ClientLeftError, DeadlineError, OverloadedError
from inference_api.messages import FinishReason, SequenceOutput, Submit
from inference_api.server.context import ServerContext
from inference_api.server.paced_choices import PacedChoices
from tests.backend.factories import make_submit
from tests.server.fakes import WAIT_SECONDS, FakeClient, finished

REQUEST = ("req", "alpha")
MAX_OPEN = 2


def submits(count: int) -> list[Submit]:
    return [make_submit(f"s{index}", request_id=REQUEST[0], total_seconds=60.0) for index in range(count)]


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(context: ServerContext, fake_client: FakeClient, clock: Clock) -> Callable[[int], PacedChoices]:
    """Return a factory of choices that have nothing yet; the test delivers."""
    fake_client.pieces, fake_client.end = [], None

    def make(count: int) -> PacedChoices:
        generations = [context.make_generation(list(b"hello"), ()) for _ in range(count)]
        return PacedChoices(generations, MAX_OPEN, clock)

    return make


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    yield client, server
    client.close()
    server.close()


def end(client: FakeClient, index: int, reason: FinishReason = FinishReason.STOP, error: str = "") -> None:
    """End the session that was submitted as number `index`, with that many ids."""
    stream = client.streams[index]
    assert stream.deliver(SequenceOutput(stream.session_id, 0, 1, 0, [], finished(reason, index, error=error)))


def started(client: FakeClient) -> list[str]:
    return [submit.session_id for submit in client.submits]


def test_no_more_than_allowed_are_open_and_each_end_starts_the_next(make, fake_client: FakeClient) -> None:
    choices = make(5)
    choices.start(submits(5), None)
    for num_ended, ended in enumerate((1, 0, 2, 4, 3)):
        assert started(fake_client) == [f"s{index}" for index in range(min(5, MAX_OPEN + num_ended))]
        end(fake_client, ended)
        assert choices.next_piece(0.0).index == ended
    assert not choices.is_running
    choices.close()
    assert fake_client.aborts == [] and not choices.abandoned


def test_answers_stand_in_the_order_of_their_inputs_whatever_ends_first(make, fake_client: FakeClient) -> None:
    choices = make(3)
    choices.start(submits(3), None)
    taken = fake_client.submit

    def submit_and_end(submit, on_news=None):
        answer = taken(submit, on_news)
        end(fake_client, 2)
        return answer

    fake_client.submit = submit_and_end
    end(fake_client, 1)
    first = choices.next_piece(0.0)
    assert first is not None and first.index == 1
    end(fake_client, 0)
    rest = list(choices.pieces())
    assert sorted(piece.index for piece in rest) == [0, 2]
    assert {piece.index: piece.piece.finished.num_completion_tokens for piece in [first, *rest]} == {0: 0, 1: 1, 2: 2}
    choices.close()


def test_a_full_queue_leaves_the_rest_to_the_next_end(make, fake_client: FakeClient) -> None:
    choices = make(3)
    choices.start(submits(3), None)
    fake_client.refusal = OverloadedError("full", 1.0)
    end(fake_client, 0)
    assert choices.next_piece(0.0) is not None
    assert len(fake_client.streams) == 2
    fake_client.refusal = None
    end(fake_client, 1)
    assert choices.next_piece(0.0) is not None
    assert len(fake_client.streams) == 3
    end(fake_client, 2)
    assert choices.next_piece(0.0).index == 2
    choices.close()
    assert fake_client.aborts == []


def test_a_full_queue_is_told_where_nothing_of_the_call_is_open(make, fake_client: FakeClient) -> None:
    choices = make(2)
    fake_client.refusal = OverloadedError("full", 1.0)
    with pytest.raises(OverloadedError):
        choices.start(submits(2), None)
    assert len(fake_client.submits) == 1 and fake_client.aborts == []


def test_one_that_fails_ends_the_call_and_nothing_more_is_started(make, fake_client: FakeClient) -> None:
    choices = make(4)
    choices.start(submits(4), None)
    end(fake_client, 1, error="backend_lost")
    with pytest.raises(BackendLostError):
        choices.answers()
    choices.close()
    assert started(fake_client) == ["s0", "s1"] and set(fake_client.aborts) == {REQUEST}
    assert not choices.abandoned


def test_an_abort_by_its_tenant_starts_nothing_more(make, fake_client: FakeClient) -> None:
    choices = make(4)
    choices.start(submits(4), None)
    for index in range(MAX_OPEN):
        end(fake_client, index, FinishReason.ABORT)
    with pytest.raises(AbortedError):
        choices.answers()
    choices.close()
    assert started(fake_client) == ["s0", "s1"]


def test_a_client_that_leaves_ends_what_is_open_and_what_would_have_come(make, fake_client: FakeClient, pair) -> None:
    client, server = pair
    choices = make(4)
    choices.start(submits(4), server)
    client.close()
    left = choices._generations[0]._client_left
    assert left.wait(WAIT_SECONDS)
    end(fake_client, 1)
    with pytest.raises(ClientLeftError):
        choices.next_piece(0.0)
    choices.close()
    assert len(fake_client.streams) == MAX_OPEN + 1, "one was on its way: it is aborted"
    assert fake_client.aborts.count(REQUEST) >= 2
    assert choices.abandoned


def test_what_starts_later_has_the_less_time_and_none_starts_over_the_deadline(make, fake_client, clock) -> None:
    choices = make(4)
    choices.start(submits(4), None)
    clock.now += 20.0
    end(fake_client, 0)
    assert choices.next_piece(0.0) is not None
    assert [submit.total_seconds for submit in fake_client.submits] == [60.0, 60.0, 40.0]
    clock.now += 40.0
    end(fake_client, 1)
    with pytest.raises(DeadlineError, match="The request took longer than 60 seconds"):
        choices.next_piece(0.0)
    choices.close()
    assert len(fake_client.submits) == 3
