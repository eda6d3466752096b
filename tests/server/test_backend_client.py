"""Check a worker's client against a fake backend at the end of a real socket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inference_api.errors import (
    BackendLostError,
    DrainingError,
    InferenceApiError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    WarmingError,
)
from inference_api.messages import (
    WIRE_VERSION,
    Abort,
    Dropped,
    ErrorInfo,
    Failed,
    FinishReason,
    Grammar,
    GrammarKind,
    Hello,
    Message,
    Ping,
    Query,
    QueryKind,
    RefusalReason,
    Refused,
    SequenceOutput,
    Snapshot,
    StepOutput,
    Submit,
)
from inference_api.queues import Connection
from inference_api.server import backend_client
from inference_api.server.backend_client import BackendClient
from inference_api.server.output_router import OutputRouter, SessionStream
from tests.backend.factories import make_submit
from tests.server.fakes import READY, WAIT_SECONDS, FakeBackend, answer_politely, finished


class Line:
    """A client and the fake backend that it talks to."""

    def __init__(self, folder: Path) -> None:
        self.backend = FakeBackend(folder / "backend.sock")
        self.router = OutputRouter()
        self.died = threading.Event()
        self.client = BackendClient(folder / "backend.sock", self.router, on_death=self.died.set)
        self.client.start()

    def connect(self, ready=READY) -> Connection:
        """Let the client connect, and wait until it has read the greeting."""
        connection = self.backend.accept(ready)
        assert isinstance(self.next_message(), Hello)
        assert self.client.ping(WAIT_SECONDS) is not None
        assert isinstance(self.next_message(), Ping)
        return connection

    def next_message(self) -> Message:
        return self.backend.received.get(timeout=WAIT_SECONDS)

    def refuse(self, reason: RefusalReason) -> None:
        self.backend.answer = lambda message: (
            [Refused(message.session_id, reason, 3.0)] if isinstance(message, Submit) else answer_politely(message)
        )

    def close(self) -> None:
        self.client.stop()
        self.backend.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.close()


def _end_of(stream: SessionStream):
    while True:
        delivery = stream.read(WAIT_SECONDS)
        assert delivery is not None, "no terminal event came"
        if delivery.finished is not None:
            return delivery.finished


def test_the_client_says_hello_and_knows_the_backend_once_it_is_greeted(line: Line) -> None:
    assert line.client.ready is None
    line.backend.accept()
    hello = line.next_message()
    assert isinstance(hello, Hello) and hello.version == WIRE_VERSION
    assert line.client.ping(WAIT_SECONDS) is not None
    assert line.client.ready == READY


def test_a_worker_may_wait_for_its_first_greeting_and_for_no_longer_than_it_says(line: Line) -> None:
    assert not line.client.wait_for_ready(0.05)
    greeting = threading.Timer(0.1, line.backend.accept)
    greeting.start()
    assert line.client.wait_for_ready(WAIT_SECONDS)
    assert line.client.ready == READY
    greeting.join()


def test_a_submit_without_a_backend_is_refused_as_warming_and_leaves_nothing(line: Line) -> None:
    with pytest.raises(WarmingError):
        line.client.submit(make_submit("s0"))
    assert line.router.num_open == 0
    line.connect()


def test_an_accepted_submit_streams_its_ids_to_the_end(line: Line) -> None:
    connection = line.connect()
    submit = make_submit("s0")
    stream, accepted = line.client.submit(submit)
    assert accepted.session_id == "s0"
    assert line.next_message() == submit
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 0, [5, 6])]))
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 2, [7], finished(num_tokens=3))]))
    assert _end_of(stream) == finished(num_tokens=3)
    assert stream.token_ids == [5, 6, 7]
    assert line.router.num_open == 0
    assert line.client._open == {}


def test_a_stream_that_an_output_does_not_fit_ends_with_an_error_and_its_row_is_given_back(line: Line) -> None:
    connection = line.connect()
    submit = make_submit("s0")
    stream, _ = line.client.submit(submit)
    assert line.next_message() == submit
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 5, [9])]))
    assert _end_of(stream).reason is FinishReason.ERROR
    assert line.next_message() == Abort(submit.request_id, submit.tenant)
    assert line.router.foreign_tokens == 1
    assert line.client._open == {}


@pytest.mark.parametrize(
    ("reason", "error", "retry_after_seconds"),
    [
        (RefusalReason.QUEUE_FULL, OverloadedError, 3.0),
        (RefusalReason.DRAINING, DrainingError, 3.0),
        (RefusalReason.TOO_LONG, PromptTooLongError, None),
        (RefusalReason.NO_EMBEDDINGS, InvalidRequestError, None),
    ],
)
def test_each_refusal_is_an_error_of_its_own_and_leaves_nothing(
    line: Line, reason: RefusalReason, error: type[InferenceApiError], retry_after_seconds: float | None
) -> None:
    line.connect()
    line.refuse(reason)
    with pytest.raises(error) as caught:
        line.client.submit(make_submit("s0"))
    assert type(caught.value) is error
    assert getattr(caught.value, "retry_after_seconds", None) == retry_after_seconds
    assert line.router.num_open == 0
    assert line.client._open == {}


def test_a_bad_grammar_is_told_by_the_member_that_it_came_from(line: Line) -> None:
    line.connect()
    refused = Refused("s0", RefusalReason.BAD_GRAMMAR, 0.0, "is no usable JSON schema: no.")
    line.backend.answer = lambda message: [refused] if isinstance(message, Submit) else answer_politely(message)
    with pytest.raises(InvalidRequestError, match=r"^guided_json: is no usable JSON schema: no\.$") as caught:
        line.client.submit(make_submit("s0", grammar=Grammar(GrammarKind.JSON_SCHEMA, "{}", "guided_json")))
    assert caught.value.param == "guided_json"
    assert line.router.num_open == 0


def test_the_overload_text_is_the_one_that_callers_know(line: Line) -> None:
    line.connect()
    line.refuse(RefusalReason.QUEUE_FULL)
    with pytest.raises(OverloadedError, match=r"^Service overloaded, try again later\.$"):
        line.client.submit(make_submit("s0"))


def test_a_lost_connection_ends_every_open_stream_with_exactly_one_error(line: Line) -> None:
    connection = line.connect()
    streams = [line.client.submit(make_submit(f"s{number}"))[0] for number in range(5)]
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 0, [5]), SequenceOutput("s1", 1, 1, 0, [6], finished())]))
    connection.shutdown()
    ends = [_end_of(stream) for stream in streams]
    assert ends[1] == finished()
    for number in (0, 2, 3, 4):
        assert ends[number].reason is FinishReason.ERROR
        assert ends[number].error is not None and ends[number].error.code == "backend_lost"
        assert streams[number].read(0.0).token_ids == (), "nothing comes after the end"
    assert ends[0].num_completion_tokens == 1
    assert line.router.num_open == 0
    assert line.client._open == {}


def test_a_backend_that_dies_before_it_answers_fails_the_submit(line: Line) -> None:
    connection = line.connect()
    line.backend.answer = lambda message: connection.shutdown() or []
    with pytest.raises(BackendLostError):
        line.client.submit(make_submit("s0"))
    assert line.router.num_open == 0


def test_a_backend_that_never_answers_is_given_up_and_told_to_abort(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_client, "ANSWER_SECONDS", 0.02)
    line.connect()
    line.backend.answer = lambda message: []
    with pytest.raises(BackendLostError, match="did not answer"):
        line.client.submit(make_submit("s0"))
    assert isinstance(line.next_message(), Submit)
    assert line.next_message() == Abort("req-s0", "alpha")


def test_the_next_incarnation_is_connected_to_at_once_without_asking_around(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_client, "RECONNECT_SECONDS", 3600.0)
    line.connect().shutdown()
    later = msgspec.structs.replace(READY, incarnation="incarnation-2")
    line.connect(later)
    assert line.client.ready == later
    stream, _ = line.client.submit(make_submit("s0"))
    assert stream.token_ids == [] and line.router.num_open == 1


def test_without_a_backend_there_is_no_ready_and_no_answer(line: Line) -> None:
    connection = line.connect()
    stream, _ = line.client.submit(make_submit("s0"))
    connection.shutdown()
    _end_of(stream)
    assert line.client.ready is None
    assert line.client.ping(0.0) is None
    line.client.abort("req-s0", "alpha")


def test_a_failed_engine_is_logged_and_its_streams_end_with_the_connection(line: Line) -> None:
    connection = line.connect()
    stream, _ = line.client.submit(make_submit("s0"))
    connection.send(Failed(ErrorInfo("backend_lost", "The decode backend failed.")))
    connection.shutdown()
    assert _end_of(stream).error is not None


def test_an_abort_crosses_without_waiting_for_anything(line: Line) -> None:
    line.connect()
    line.client.abort("req-s0", "alpha")
    assert line.next_message() == Abort("req-s0", "alpha")


def test_a_query_returns_its_own_snapshot_whatever_the_order(line: Line) -> None:
    connection = line.connect()
    line.backend.answer = lambda message: []
    found: dict[str, Snapshot | None] = {}

    def ask(tenant: str) -> None:
        found[tenant] = line.client.query(QueryKind.ROWS, tenant, "", WAIT_SECONDS)

    threads = [threading.Thread(target=ask, args=(tenant,)) for tenant in ("alpha", "beta")]
    for thread in threads:
        thread.start()
    queries = [line.next_message() for _ in range(2)]
    for number, query in reversed(list(enumerate(queries))):
        assert isinstance(query, Query)
        connection.send(Snapshot(query.query_id, number, 4, 0))
    for thread in threads:
        thread.join()
    for number, query in enumerate(queries):
        assert isinstance(query, Query)
        snapshot = found[query.tenant]
        assert snapshot is not None and snapshot.num_waiting == number


def test_questions_that_get_no_answer_time_out_and_leave_nothing(line: Line) -> None:
    line.connect()
    line.backend.answer = lambda message: []
    assert line.client.ping(0.01) is None
    assert line.client.query(QueryKind.ROWS, "alpha", "", 0.01) is None
    assert line.client._asked == {}


def test_a_question_that_waits_when_the_backend_dies_is_answered_at_once(line: Line) -> None:
    connection = line.connect()
    line.backend.answer = lambda message: connection.shutdown() or []
    assert line.client.query(QueryKind.ROWS, "alpha", "", 3600.0) is None


def test_ids_of_an_abandoned_submit_are_late_and_never_foreign(line: Line) -> None:
    connection = line.connect()
    line.refuse(RefusalReason.QUEUE_FULL)
    with pytest.raises(OverloadedError):
        line.client.submit(make_submit("s0"))
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 0, [5])]))
    line.backend.answer = answer_politely
    assert line.client.ping(WAIT_SECONDS) is not None
    assert (line.router.late_tokens, line.router.foreign_tokens) == (1, 0)


def test_stopping_ends_open_streams(tmp_path: Path) -> None:
    line = Line(tmp_path)
    line.connect()
    stream, _ = line.client.submit(make_submit("s0"))
    line.close()
    assert _end_of(stream).reason is FinishReason.ERROR


def test_a_backend_that_is_not_there_yet_is_waited_for_and_stopping_does_not_hang(tmp_path: Path) -> None:
    client = BackendClient(tmp_path / "absent.sock", OutputRouter(), on_death=lambda: None)
    client.start()
    client.stop()
    assert client.ready is None


def test_sixteen_threads_submit_at_once_and_each_gets_its_own_ids(line: Line) -> None:
    connection = line.connect()
    results: queue.SimpleQueue[tuple[int, list[int]]] = queue.SimpleQueue()

    def run(number: int) -> None:
        stream, _ = line.client.submit(make_submit(f"s{number}"))
        connection.send(StepOutput([SequenceOutput(f"s{number}", number, 1, 0, [number], finished())]))
        _end_of(stream)
        results.put((number, stream.token_ids))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results.get_nowait() for _ in threads) == [(number, [number]) for number in range(16)]


def test_a_surprise_in_the_reader_thread_ends_its_streams_and_is_told_of(line: Line) -> None:
    connection = line.connect()
    stream, _ = line.client.submit(make_submit("s0"))

    def fail(output: SequenceOutput) -> bool:
        raise RuntimeError("a defect")

    line.router.deliver = fail  # type: ignore[method-assign]
    connection.send(StepOutput([SequenceOutput("s0", 0, 1, 0, [5])]))
    assert line.died.wait(WAIT_SECONDS)
    assert _end_of(stream).reason is FinishReason.ERROR


def test_ids_that_belong_to_nobody_are_reported_to_the_backend(line: Line) -> None:
    connection = line.connect()
    connection.send(StepOutput([SequenceOutput("nobody", 0, 1, 0, [5, 6])]))
    assert line.next_message() == Dropped(0, 2)
    connection.send(StepOutput([SequenceOutput("nobody", 0, 1, 2, [7])]))
    assert line.next_message() == Dropped(0, 1)
