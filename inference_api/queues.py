"""Own the two queues between the processes: framed messages over AF_UNIX stream sockets.

A frame is u32 length (big endian, of what follows), one version byte, a msgpack body. `Connection.send` never blocks:
what the socket does not take waits in a bounded buffer, and a peer that lets it overflow is cut off. End of file means
a dead peer. Used by gunicorn workers, the backend and the supervisor; knows framing, not what the messages mean.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from inference_api.messages import WIRE_VERSION, AnyMessage, Message

MAX_FRAME_BYTES = 8 << 20
"""A frame over this is an error of the peer: the largest honest one is a Submit of 2^20 ids, at most 5 bytes each."""

MAX_BUFFERED_BYTES = 16 << 20
"""Outbound bytes that a peer may leave unread before its connection is cut."""

_HEADER = struct.Struct(">IB")
_PEERCRED = struct.Struct("3i")
_encode = msgspec.msgpack.Encoder().encode


class ConnectionLostError(Exception):
    """Say that the peer is gone, spoke another language, or stopped reading."""


def encode_frame(message: Message) -> bytes:
    """Return the bytes of one frame."""
    body = _encode(message)
    return _HEADER.pack(len(body) + 1, WIRE_VERSION) + body


class FrameParser:
    """Turn received bytes into frame bodies; pure, and fed at any split."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the bodies that `data` completes; raise ConnectionLostError on a wrong version or size."""
        self._buffer += data
        bodies: list[bytes] = []
        offset = 0
        while len(self._buffer) - offset >= _HEADER.size:
            length, version = _HEADER.unpack_from(self._buffer, offset)
            if version != WIRE_VERSION:
                raise ConnectionLostError(f"peer speaks wire version {version}, not {WIRE_VERSION}")
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise ConnectionLostError(f"frame of {length} bytes is outside bounds, 1 to {MAX_FRAME_BYTES}")
            end = offset + 4 + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[offset + _HEADER.size : end]))
            offset = end
        del self._buffer[:offset]
        return bodies


class Connection:
    """One framed stream to a peer. Any thread may send; one thread receives and flushes."""

    def __init__(self, sock: socket.socket, accepts: Any, on_backlog: Callable[[], None] | None = None) -> None:
        """Wrap a connected socket. `accepts` is the union of message types that the peer may send.

        `on_backlog` is called by the sending thread when bytes are left over, so that the receiving thread selects for
        writing and calls `flush`.
        """
        sock.setblocking(False)
        self._sock = sock
        self._decode = msgspec.msgpack.Decoder(accepts).decode
        self._parser = FrameParser()
        self._on_backlog = on_backlog
        self._lock = threading.Lock()
        self._backlog: collections.deque[memoryview] = collections.deque()
        self._backlog_bytes = 0
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message without blocking; raise ConnectionLostError if the peer is gone or does not read."""
        frame = encode_frame(message)
        with self._lock:
            if self._closed:
                raise ConnectionLostError("connection is closed")
            self._backlog.append(memoryview(frame))
            self._backlog_bytes += len(frame)
            left_over = self._write()
            unread_bytes = self._backlog_bytes
            if unread_bytes > MAX_BUFFERED_BYTES:
                self._break()
                raise ConnectionLostError(f"peer left {unread_bytes} bytes unread")
        if left_over and self._on_backlog is not None:
            self._on_backlog()

    def flush(self) -> bool:
        """Write what is left over; return True if bytes remain."""
        with self._lock:
            return self._write()

    @property
    def has_backlog(self) -> bool:
        """Tell whether bytes wait for the socket."""
        return bool(self._backlog)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait for the socket."""
        return self._backlog_bytes

    def receive(self) -> list[AnyMessage]:
        """Return the messages that have arrived, without blocking; raise ConnectionLostError at end of file."""
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionLostError(str(error)) from None
        if not data:
            raise ConnectionLostError("peer closed the connection")
        try:
            return [self._decode(body) for body in self._parser.feed(data)]
        except msgspec.MsgspecError as error:
            raise ConnectionLostError(f"peer sent a malformed message: {error}") from None

    def shutdown(self) -> None:
        """Break the connection from any thread: the receiving thread reads end of file, sending raises from now on."""
        with self._lock:
            self._break()

    def close(self) -> None:
        """Close the socket. For the receiving thread, which has taken it out of its selector."""
        with self._lock:
            self._closed = True
            self._sock.close()

    def _break(self) -> None:
        self._closed = True
        self._backlog.clear()
        self._backlog_bytes = 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> bool:
        """Write as much as the socket takes; the lock is held. Return True if bytes remain."""
        while self._backlog:
            chunk = self._backlog[0]
            try:
                sent = self._sock.send(chunk, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return True
            except OSError as error:
                raise ConnectionLostError(str(error)) from None
            self._backlog_bytes -= sent
            if sent == len(chunk):
                self._backlog.popleft()
            else:
                self._backlog[0] = chunk[sent:]
        return False


class Wakeup:
    """Wake a thread that waits in a selector: register `fileno`, call `wake` from any thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor for a selector."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def make_private_dir(path: Path) -> None:
    """Make `path` a folder of this user with mode 0700; raise PermissionError if it is somebody else's or open."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(f"{path} must be a folder of this user with mode 0700")


def listen(path: Path, backlog: int = 64) -> socket.socket:
    """Bind a listening AF_UNIX socket with mode 0600 at `path`, whose folder is private; replace a stale one."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(backlog)
    return listener


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end (SO_PEERCRED, unix(7))."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    _, uid, _ = _PEERCRED.unpack(credentials)
    return int(uid)
