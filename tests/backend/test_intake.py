"""Check the intake thread against real sockets: greeting, refusal, Pong and the ends of both kinds of peer."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inference_api.backend import intake as intake_module
from inference_api.backend.admission import Admission
from inference_api.backend.decode_loop import Inbox
from inference_api.backend.inbox_messages import WorkerGone
from inference_api.backend.intake import Intake
from inference_api.messages import (
    WIRE_VERSION,
    Abort,
    Accepted,
    BackendMessage,
    Drain,
    Hello,
    Ping,
    Pong,
    Pooling,
    Query,
    QueryKind,
    Ready,
    RefusalReason,
    Refused,
    SequenceOutput,
    StatusMessage,
    StepOutput,
    Stop,
)
from inference_api.queues import Connection, ConnectionLostError, listen
from tests.backend.factories import make_submit

WAIT_SECONDS = 10.0
READY = Ready("incarnation-1", "digest", "mock", "mock", "none", 2, 64, True)


class Peer:
    """The other end of a connection to the intake."""

    def __init__(self, sock: socket.socket, accepts: object) -> None:
        self.connection = Connection(sock, accepts)
        self._messages: list[object] = []

    def send(self, *messages: object) -> None:
        for message in messages:
            self.connection.send(message)

    def receive(self) -> object:
        """Return the next message; wait for it."""
        while not self._messages:
            assert select.select([self.connection], [], [], WAIT_SECONDS)[0], "no message came"
            self._messages += self.connection.receive()
        return self._messages.pop(0)

    def has_nothing(self) -> bool:
        return not self._messages and not select.select([self.connection], [], [], 0)[0]


class Desk:
    """A running Intake, its supervisor's end, and workers that connect."""

    def __init__(self, folder: Path, admission: Admission) -> None:
        self.path = folder / "backend.sock"
        self.listener = listen(self.path)
        self.admission = admission
        self.inbox = Inbox()
        self.stopped = threading.Event()
        self.statuses: list[int] = []
        self.heartbeat_seconds = 0.25
        ours, theirs = socket.socketpair()
        self.supervisor = Peer(ours, StatusMessage)
        self.intake = Intake(
            self.listener,
            theirs,
            admission,
            self.inbox,
            lambda: self.heartbeat_seconds,
            self._on_stop,
        )
        self.peers: list[Peer] = [self.supervisor]
        self.intake.start()

    def _on_stop(self, exit_status: int) -> None:
        self.statuses.append(exit_status)
        self.stopped.set()

    def connect(self) -> Peer:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.path))
        peer = Peer(sock, BackendMessage)
        self.peers.append(peer)
        peer.send(Hello("test", WIRE_VERSION))
        return peer

    def serve(self) -> None:
        self.intake.start_serving(READY)
        assert self.supervisor.receive() == READY

    def connect_served(self) -> Peer:
        peer = self.connect()
        assert peer.receive() == READY
        return peer

    def close(self) -> None:
        self.intake.close()
        self.listener.close()
        for peer in self.peers:
            peer.connection.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, Admission(2, 1, 100))
    yield desk
    desk.close()


def test_a_worker_is_greeted_only_once_the_engine_is_warm(desk: Desk) -> None:
    early = desk.connect()
    early.send(Ping(1))
    assert isinstance(early.receive(), Pong)
    assert early.has_nothing()
    desk.serve()
    assert early.receive() == READY
    assert desk.connect().receive() == READY


def test_submits_are_accepted_with_their_place_and_refused_at_once_when_the_queue_is_full(desk: Desk) -> None:
    desk.serve()
    worker = desk.connect_served()
    worker.send(*(make_submit(f"s{number}") for number in range(4)))
    answers = [worker.receive() for _ in range(4)]
    assert [type(answer) for answer in answers] == [Accepted, Accepted, Accepted, Refused]
    assert [answer.place for answer in answers[:3]] == [0, 0, 1]
    refused = answers[3]
    assert (refused.session_id, refused.reason) == ("s3", RefusalReason.QUEUE_FULL)
    assert refused.retry_after_seconds >= 1.0
    assert [message.session_id for _, message in desk.inbox.drain(0)] == ["s0", "s1", "s2"]


@pytest.mark.parametrize("token_ids", [[], [1] * 65])
def test_a_prompt_that_no_row_can_hold_is_refused_and_keeps_no_place(desk: Desk, token_ids: list[int]) -> None:
    desk.serve()
    worker = desk.connect_served()
    worker.send(make_submit("s0", token_ids=token_ids))
    assert worker.receive() == Refused("s0", RefusalReason.TOO_LONG, 0.0)
    assert desk.admission.num_requests == 0
    assert desk.inbox.drain(0) == []


def test_an_embedding_is_refused_where_the_engine_makes_none_and_keeps_no_place(desk: Desk) -> None:
    desk.intake.start_serving(READY)
    worker = desk.connect_served()
    worker.send(make_submit("s0", max_tokens=0, pooling=Pooling.MEAN), make_submit("s1"))
    assert worker.receive() == Refused("s0", RefusalReason.NO_EMBEDDINGS, 0.0)
    assert isinstance(worker.receive(), Accepted)
    assert [message.session_id for _, message in desk.inbox.drain(WAIT_SECONDS)] == ["s1"]
    assert desk.admission.num_requests == 1


def test_an_embedding_is_accepted_where_the_engine_makes_some(desk: Desk) -> None:
    ready = msgspec.structs.replace(READY, embedding_size=16)
    desk.intake.start_serving(ready)
    worker = desk.connect()
    assert worker.receive() == ready
    worker.send(make_submit("s0", max_tokens=0, pooling=Pooling.MEAN))
    assert isinstance(worker.receive(), Accepted)


def test_a_drain_refuses_new_work_and_wakes_the_decode_thread(desk: Desk) -> None:
    desk.serve()
    worker = desk.connect_served()
    desk.supervisor.send(Drain())
    worker.send(Ping(1))
    while not worker.receive().draining:
        worker.send(Ping(1))
    worker.send(make_submit("s0"))
    answer = worker.receive()
    assert isinstance(answer, Refused) and answer.reason is RefusalReason.DRAINING


def test_a_pong_comes_while_the_decode_thread_is_stuck_and_tells_its_age(desk: Desk) -> None:
    desk.serve()
    worker = desk.connect_served()
    desk.heartbeat_seconds = 77.0
    worker.send(*(make_submit(f"s{number}") for number in range(3)), Ping(9))
    pong = [worker.receive() for _ in range(4)][-1]
    assert pong == Pong(9, 77.0, draining=False, num_waiting=1, num_rows_in_use=2)


def test_aborts_and_queries_reach_the_decode_thread_in_order(desk: Desk) -> None:
    desk.serve()
    worker = desk.connect_served()
    abort, query = Abort("req-s0", "alpha"), Query(4, QueryKind.ROWS)
    worker.send(make_submit("s0"), abort, query, Ping(1))
    while not isinstance(worker.receive(), Pong):
        continue
    assert [message for _, message in desk.inbox.drain(0)] == [make_submit("s0"), abort, query]


def test_a_worker_that_closes_is_told_to_the_decode_thread_and_the_others_are_served(desk: Desk) -> None:
    desk.serve()
    gone, stays = desk.connect_served(), desk.connect_served()
    gone.connection.shutdown()
    ((worker, message),) = desk.inbox.drain(WAIT_SECONDS)
    assert message == WorkerGone(worker)
    desk.intake.send(worker, Pong(1, 0.0, False, 0, 0))
    stays.send(Ping(2))
    assert isinstance(stays.receive(), Pong)


def test_a_worker_of_another_wire_version_or_with_malformed_bytes_is_cut(desk: Desk) -> None:
    desk.serve()
    other = desk.connect_served()
    other.send(Hello("future", WIRE_VERSION + 1))
    assert isinstance(desk.inbox.drain(WAIT_SECONDS)[0][1], WorkerGone)
    broken = desk.connect_served()
    broken.connection._sock.send(b"\x00\x00\x00\x02" + bytes([WIRE_VERSION]) + b"\xc1")
    assert isinstance(desk.inbox.drain(WAIT_SECONDS)[0][1], WorkerGone)
    with pytest.raises(ConnectionLostError):
        broken.receive()


def test_a_connection_of_another_user_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.serve()
    monkeypatch.setattr(intake_module, "peer_uid", lambda sock: os.getuid() + 1)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(desk.path))
    desk.peers.append(Peer(sock, BackendMessage))
    with pytest.raises(ConnectionLostError):
        desk.peers[-1].receive()
    monkeypatch.undo()
    assert isinstance(desk.connect(), Peer)


def test_a_worker_that_does_not_read_is_cut_off_while_another_gets_every_message(desk: Desk) -> None:
    desk.serve()
    deaf, well = desk.connect_served(), desk.connect_served()
    output = StepOutput([SequenceOutput("s0", 0, 1, 0, [70_000] * 100_000)])
    for number in range(60):
        desk.intake.send("worker-1", output)
        desk.intake.send("worker-2", Pong(number, 0.0, False, 0, 0))
    assert [well.receive().ping_id for _ in range(60)] == list(range(60))
    assert desk.inbox.drain(WAIT_SECONDS) == [("worker-1", WorkerGone("worker-1"))]
    assert deaf is desk.peers[1]


def test_what_a_slow_worker_left_over_is_written_once_it_reads(desk: Desk) -> None:
    desk.serve()
    slow = desk.connect_served()
    outputs = [StepOutput([SequenceOutput("s0", 0, 1, number, [number] * 50_000)]) for number in range(20)]
    for output in outputs:
        desk.intake.send("worker-1", output)
    assert [slow.receive() for _ in range(20)] == outputs


def test_the_supervisors_stop_and_its_death_both_stop_the_backend(tmp_path: Path) -> None:
    for number, end in enumerate(
        (lambda desk: desk.supervisor.send(Stop()), lambda desk: desk.supervisor.connection.shutdown())
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        desk = Desk(folder, Admission(1, 1, 10))
        end(desk)
        assert desk.stopped.wait(WAIT_SECONDS)
        desk.close()


def test_a_report_to_a_supervisor_that_is_gone_stops_the_backend(desk: Desk) -> None:
    desk.supervisor.connection.shutdown()
    desk.intake.report(READY)
    assert desk.stopped.wait(WAIT_SECONDS)


def test_a_broadcast_reaches_every_worker(desk: Desk) -> None:
    desk.serve()
    workers = [desk.connect_served() for _ in range(3)]
    message = msgspec.structs.replace(READY, incarnation="other")
    desk.intake.broadcast(message)
    assert [worker.receive() for worker in workers] == [message] * 3


def test_a_surprise_in_the_intake_stops_the_backend_with_a_status(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise RuntimeError("a defect")

    desk.serve()
    peer = desk.connect_served()
    monkeypatch.setattr(desk.intake, "_heartbeat_age", fail)
    peer.send(Ping(1))
    assert desk.stopped.wait(WAIT_SECONDS)
    assert desk.statuses == [1]


def test_a_worker_that_does_not_introduce_itself_is_not_greeted(desk: Desk) -> None:
    desk.serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(desk.path))
        assert desk.connect_served() is not None
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
