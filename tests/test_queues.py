"""Check framing and connections over real sockets: splits, partial sends, deaf peers, ends, and who may connect."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api import queues
from inference_api.messages import WIRE_VERSION, Abort, AnyMessage, Ping, SequenceOutput, StepOutput, WorkerMessage
from inference_api.queues import (
    MAX_BUFFERED_BYTES,
    MAX_FRAME_BYTES,
    Connection,
    ConnectionLostError,
    FrameParser,
    Wakeup,
    encode_frame,
    listen,
    make_private_dir,
    peer_uid,
)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    left, right = (Connection(sock, AnyMessage) for sock in socket.socketpair())
    yield left, right
    left.close()
    right.close()


def _wait_readable(connection: Connection) -> None:
    assert select.select([connection], [], [], 10.0)[0]


def _large(number: int) -> StepOutput:
    return StepOutput([SequenceOutput("s0", 0, 1, number, [70_000] * 100_000)])


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_frames_in_any_split_are_the_same_frames(ping_ids: list[int], sizes: list[int]) -> None:
    stream = b"".join(encode_frame(Ping(ping_id)) for ping_id in ping_ids)
    parser, bodies, offset = FrameParser(), [], 0
    while offset < len(stream):
        size = sizes[offset % len(sizes)]
        bodies += parser.feed(stream[offset : offset + size])
        offset += size
    assert bodies == [encode_frame(Ping(ping_id))[5:] for ping_id in ping_ids]


def test_another_wire_version_is_refused_as_soon_as_it_is_read() -> None:
    frame = bytearray(encode_frame(Ping(1)))
    frame[4] = WIRE_VERSION + 1
    with pytest.raises(ConnectionLostError, match="wire version"):
        FrameParser().feed(bytes(frame[:5]))


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_outside_the_bounds_is_refused_before_its_body_comes(length: int) -> None:
    with pytest.raises(ConnectionLostError, match="outside bounds"):
        FrameParser().feed(struct.pack(">IB", length, WIRE_VERSION))


def test_a_frame_of_the_largest_size_passes() -> None:
    body = b"x" * (MAX_FRAME_BYTES - 1)
    assert FrameParser().feed(struct.pack(">IB", MAX_FRAME_BYTES, WIRE_VERSION) + body) == [body]


def test_messages_arrive_in_order(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    for number in range(5):
        left.send(Ping(number))
    _wait_readable(right)
    assert right.receive() == [Ping(number) for number in range(5)]
    assert right.receive() == []


def test_what_the_socket_does_not_take_is_kept_and_flushed_in_order(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    calls: list[int] = []
    left._on_backlog = lambda: calls.append(1)
    left.send(Ping(0))
    assert not calls and not left.has_backlog
    sent = [_large(number) for number in range(5)]
    for message in sent:
        left.send(message)
    assert calls and left.has_backlog
    received: list[object] = []
    while len(received) < 6:
        left.flush()
        _wait_readable(right)
        received += right.receive()
    assert received == [Ping(0), *sent]
    assert not left.flush()
    assert not left.has_backlog


def test_a_peer_that_does_not_read_is_cut_at_the_bound_while_another_goes_on(
    pair: tuple[Connection, Connection],
) -> None:
    deaf, _ = pair
    well, reader = (Connection(sock, AnyMessage) for sock in socket.socketpair())
    num_sent = 0

    def send_to_both() -> None:
        nonlocal num_sent
        while num_sent < 100:
            deaf.send(_large(num_sent))
            well.send(Ping(num_sent))
            _wait_readable(reader)
            assert reader.receive() == [Ping(num_sent)]
            num_sent += 1

    with pytest.raises(ConnectionLostError, match="unread"):
        send_to_both()
    assert MAX_BUFFERED_BYTES < (num_sent + 1) * len(encode_frame(_large(0))) < 2 * MAX_BUFFERED_BYTES
    assert deaf._backlog_bytes == 0
    with pytest.raises(ConnectionLostError, match="closed"):
        deaf.send(Ping(1))
    well.close()
    reader.close()


def test_end_of_file_is_a_dead_peer(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    left.send(Ping(1))
    left.shutdown()
    _wait_readable(right)
    assert right.receive() == [Ping(1)]
    with pytest.raises(ConnectionLostError, match="closed the connection"):
        right.receive()


def test_sending_to_a_dead_peer_raises_and_never_a_signal(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(ConnectionLostError):
        left.send(Ping(1))


def test_shutdown_from_another_thread_lets_the_reader_see_the_end(pair: tuple[Connection, Connection]) -> None:
    left, _ = pair
    thread = threading.Thread(target=left.shutdown)
    thread.start()
    _wait_readable(left)
    thread.join()
    with pytest.raises(ConnectionLostError):
        left.receive()


@pytest.mark.parametrize("body", [b"\xc1", b"", b"\x93\x01\x02\x03", b"\x81\xa4type\xa8surprise"])
def test_a_malformed_message_ends_the_connection(pair: tuple[Connection, Connection], body: bytes) -> None:
    left, right = pair
    left._sock.send(struct.pack(">IB", len(body) + 1, WIRE_VERSION) + body)
    _wait_readable(right)
    with pytest.raises(ConnectionLostError, match="malformed"):
        right.receive()


def test_a_message_of_the_wrong_direction_ends_the_connection() -> None:
    left, right = (Connection(sock, WorkerMessage) for sock in socket.socketpair())
    left.send(StepOutput([]))
    _wait_readable(right)
    with pytest.raises(ConnectionLostError, match="malformed"):
        right.receive()
    left.close()
    right.close()


def test_sixteen_threads_send_whole_frames(pair: tuple[Connection, Connection]) -> None:
    left, right = pair
    threads = [
        threading.Thread(target=lambda name=name: [left.send(Abort(f"{name}-{n}", "a" * 500)) for n in range(50)])
        for name in range(16)
    ]
    for thread in threads:
        thread.start()
    received: list[object] = []
    while len(received) < 800:
        left.flush()
        _wait_readable(right)
        received += right.receive()
    for thread in threads:
        thread.join()
    assert {message.request_id for message in received} == {f"{name}-{n}" for name in range(16) for n in range(50)}


def test_a_wakeup_makes_its_descriptor_readable_until_it_is_cleared() -> None:
    wakeup = Wakeup()
    wakeup.clear()
    assert not select.select([wakeup], [], [], 0)[0]
    wakeup.wake()
    wakeup.wake()
    assert select.select([wakeup], [], [], 0)[0]
    wakeup.clear()
    assert not select.select([wakeup], [], [], 0)[0]
    wakeup.close()


def test_the_folder_is_made_for_this_user_alone_and_the_socket_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make_private_dir(folder)
    make_private_dir(folder)
    with listen(folder / "backend.sock"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "backend.sock").stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "backend.sock"
    listen(path).close()
    with listen(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="0700"):
        make_private_dir(folder)


def test_a_symbolic_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        make_private_dir(link)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    make_private_dir(folder)
    monkeypatch.setattr(queues.os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        make_private_dir(folder)


def test_the_kernel_tells_the_peers_user(pair: tuple[Connection, Connection]) -> None:
    assert peer_uid(pair[0]._sock) == os.getuid()
