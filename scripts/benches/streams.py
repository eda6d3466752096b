"""Be the clients: many streams over raw sockets in one thread, recorded as they arrive and taken apart afterwards.

The client shares the machine with what it measures, so that while streams run it does nothing but epoll, recv and read
the clock; chunks, texts and counts are worked out once the last byte is in. Knows HTTP/1.1 framing (RFC 9112 sections
6.2 and 7.1) and nothing of what is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import select
import socket
import time
from collections.abc import Iterable

from benches.service import BenchError, Target

_LAST_CHUNK = b"\r\n0\r\n\r\n"
_RECEIVE_BYTES = 1 << 18
STALL_SECONDS = 120.0


@dataclasses.dataclass(slots=True)
class Recording:
    """One answer as it came: when the request was sent, and each read with its time (monotonic seconds)."""

    sent_at: float
    reads: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)
    tail: bytes = b""

    def parse(self) -> Answer:
        """Take the answer apart; raise BenchError unless it is a whole 200. One that is not chunked is one chunk."""
        data = b"".join(part for _, part in self.reads)
        head, blank_line, body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines[1:])}
        if not blank_line or " 200 " not in f"{lines[0]} ":
            raise BenchError(f"not a 200: {lines[0]!r}, {body[:200]!r}")
        if headers.get("transfer-encoding") == "chunked":
            chunks = _parse_chunks(body, self.reads, len(head) + len(blank_line))
        elif headers.get("content-length") == str(len(body)):
            chunks = [(self.reads[-1][0], body)]
        else:
            raise BenchError(f"neither chunked nor of the length that it says: {lines[0]!r}, {body[:200]!r}")
        return Answer(self.sent_at, self.reads[-1][0], headers, chunks)

    def is_of_its_length(self) -> bool:
        """Tell whether everything has come of an answer that says how long it is."""
        head, blank_line, body = b"".join(part for _, part in self.reads).partition(b"\r\n\r\n")
        return bool(blank_line) and f"\r\ncontent-length: {len(body)}".encode() in head.lower()


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer: its chunks, each with the time at which its last byte arrived."""

    sent_at: float
    ended_at: float
    headers: dict[str, str]
    chunks: list[tuple[float, bytes]]

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(data for _, data in self.chunks)

    @property
    def first_token_seconds(self) -> float:
        """From before the connect to the first chunk's last byte."""
        return self.chunks[0][0] - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between each chunk and the next."""
        times = [at for at, _ in self.chunks]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def make_request(target: Target, path: str, body: object) -> bytes:
    """Return the bytes of a POST that ends its connection: of JSON, or of plain text where `body` is bytes."""
    content, kind = (body, "text/plain") if isinstance(body, bytes) else (json.dumps(body).encode(), "application/json")
    headers = {"Host": "127.0.0.1", "Content-Type": kind, "Content-Length": str(len(content))}
    headers |= {"Connection": "close", **target.headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + content


def run_streams(target: Target, requests: Iterable[bytes], num_users: int) -> list[Recording]:
    """Send the requests, `num_users` at a time: who has its whole answer sends the next. Return them as they ended.

    Blocks to the end of the last one. Raises BenchError if an answer breaks off or nothing comes for STALL_SECONDS.
    """
    waiting = iter(requests)
    open_streams: dict[int, tuple[socket.socket, Recording]] = {}
    done: list[Recording] = []
    with select.epoll() as epoll:
        try:
            for _, request in zip(range(num_users), waiting, strict=False):
                _open(target, request, epoll, open_streams)
            while open_streams:
                events = epoll.poll(STALL_SECONDS)
                if not events:
                    raise BenchError(f"nothing came for {STALL_SECONDS:g} s")
                for handle, _ in events:
                    sock, recording = open_streams[handle]
                    if not _read(sock, recording):
                        continue
                    del open_streams[handle]
                    sock.close()
                    done.append(recording)
                    for request in waiting:
                        _open(target, request, epoll, open_streams)
                        break
        finally:
            for sock, _ in open_streams.values():
                sock.close()
    return done


def _open(
    target: Target, request: bytes, epoll: select.epoll, streams: dict[int, tuple[socket.socket, Recording]]
) -> None:
    recording = Recording(time.monotonic())
    sock = socket.create_connection(("127.0.0.1", target.port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(request)
    sock.setblocking(False)
    epoll.register(sock, select.EPOLLIN)
    streams[sock.fileno()] = (sock, recording)


def _read(sock: socket.socket, recording: Recording) -> bool:
    """Take what has arrived; return True once the answer is whole. Raises BenchError if it breaks off."""
    try:
        data = sock.recv(_RECEIVE_BYTES)
    except ConnectionResetError:
        data = b""
    if not data:
        if recording.is_of_its_length():
            return True  # the request asked for the connection's end, so that only such an answer ends with it
        so_far = b"".join(part for _, part in recording.reads)
        raise BenchError(f"an answer broke off after {len(so_far)} bytes: {so_far[:300]!r}")
    recording.reads.append((time.monotonic(), data))
    # A size line and a data line never look like this: only the last chunk ends with an empty line.
    recording.tail = (recording.tail + data)[-len(_LAST_CHUNK) :]
    return recording.tail == _LAST_CHUNK


def _parse_chunks(body: bytes, reads: list[tuple[float, bytes]], head_bytes: int) -> list[tuple[float, bytes]]:
    """Split a chunked body; `head_bytes` is where it starts in what was read."""
    chunks: list[tuple[float, bytes]] = []
    arrivals = iter(reads)
    arrived_at, part = next(arrivals)
    num_arrived = len(part)
    position = 0
    while True:
        line_end = body.index(b"\r\n", position)
        size = int(body[position:line_end], 16)
        if size == 0:
            return chunks
        end = line_end + 2 + size + 2
        while num_arrived < head_bytes + end:
            arrived_at, part = next(arrivals)
            num_arrived += len(part)
        chunks.append((arrived_at, body[line_end + 2 : end - 2]))
        position = end
