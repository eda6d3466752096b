"""Write the chunks of one running response straight to its socket, from whichever thread has them, without waiting.

Runs in PROCESS 1. A stream's ids come to the backend client's thread; to wake the request's thread for each of them
costs more than everything else that is done for one. So that thread sends, as long as the socket takes all of it at
once; the rest, and every wait, is the request thread's. Knows chunked framing (RFC 9112 section 7.1), no ids, no text.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

_AT_ONCE = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class ChunkSender:
    """Send chunks of a response whose head has been sent.

    Invariant: one thread at a time calls. `offer` runs under the stream's lock and only while the stream has a relay;
    `settle` runs in the request's thread, without the lock, and only when that relay has been taken away.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._unsent = b""

    @classmethod
    def of(cls, environ: Mapping[str, Any]) -> ChunkSender | None:
        """Return a sender for a call's response; None unless gunicorn writes it in chunks to a plain socket."""
        sock = environ.get("gunicorn.socket")
        if sock is None or environ["SERVER_PROTOCOL"] != "HTTP/1.1" or environ["wsgi.url_scheme"] != "http":
            return None
        return cls(sock)

    def offer(self, data: bytes) -> bool:
        """Send one chunk without waiting; return False if the socket is full: call `settle` before anything else.

        `data` must not be empty, which would end the body. Raises OSError if the client is gone.
        """
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        try:
            num_sent = self._sock.send(chunk, _AT_ONCE)
        except BlockingIOError:
            num_sent = 0
        self._unsent = chunk[num_sent:]
        return not self._unsent

    def settle(self) -> None:
        """Send what the socket did not take, waiting as long as that needs; raises OSError if the client is gone."""
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._sock.sendall(unsent)
