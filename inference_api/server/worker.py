"""Own how a gunicorn worker of PROCESS 1 closes a connection: in the request's thread, never in the accepting one.

gunicorn's gthread worker lingers up to two seconds on its main thread until the peer of a closed connection closes too
(RFC 9112 section 9.6). A client that keeps a cut stream's socket open would stop the whole worker for that long, and a
hundred of them for minutes. Knows sockets only, nothing of requests.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from gunicorn.workers.gthread import ThreadWorker

LINGER_SECONDS = 2.0
MAX_LINGER_BYTES = 65536
"""How long, and for how many bytes, a peer may go on after our FIN: gunicorn's own numbers (util.close_graceful)."""


class StreamWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's gthread worker, less the lingering on its main thread."""

    def handle(self, conn: Any) -> Any:
        """Serve one request of a connection; runs in a request thread, which lingers if the connection is to close."""
        outcome = super().handle(conn)
        if outcome is False:
            linger(conn.sock)
        return outcome


def linger(sock: socket.socket) -> None:
    """Send FIN and wait for the peer's; leave the socket such that gunicorn's own wait returns at once."""
    deadline = time.monotonic() + LINGER_SECONDS
    num_bytes = 0
    try:
        sock.shutdown(socket.SHUT_WR)
        while num_bytes < MAX_LINGER_BYTES and (seconds := deadline - time.monotonic()) > 0:
            sock.settimeout(seconds)
            data = sock.recv(4096)
            if not data:
                return
            num_bytes += len(data)
    except TimeoutError:
        pass  # the peer keeps its side open: it is told nothing more
    except OSError:
        return  # reset by the peer, or closed already
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
