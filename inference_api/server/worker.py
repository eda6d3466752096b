"""Own how a gunicorn worker of PROCESS 1 closes a connection: in the request's thread, never in the accepting one.

gunicorn's gthread worker lingers up to two seconds on its main thread until the peer of a closed connection closes too
(RFC 9112 section 9.6). A client that keeps a cut stream's socket open would stop the whole worker for that long, and a
hundred of them for minutes. Knows sockets only, nothing of requests.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import traceback
from http import HTTPStatus
from typing import Any

from gunicorn.http import errors
from gunicorn.workers.base import Worker
from gunicorn.workers.gthread import ThreadWorker

_PARSE_ANSWERS = (
    (errors.LimitRequestLine, 414, "Request target is too long."),
    (errors.LimitRequestHeaders, 431, "Request header fields are too large or too many."),
    (errors.ExpectationFailed, 417, "Expectation is not supported."),
    (errors.UnsupportedTransferCoding, 501, "Transfer-Encoding must be chunked."),
    (errors.ParseException, 400, "Request is not valid HTTP."),
)

AT_WORKER_END = "inference_api.at_worker_end"
"""Extension of the Flask application: functions to call once the worker has served its last request."""

LINGER_SECONDS = 2.0
MAX_LINGER_BYTES = 65536
"""How long, and for how many bytes, a peer may go on after our FIN: gunicorn's own numbers (util.close_graceful)."""


class StreamWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's gthread worker, less the lingering on its main thread, and with errors that quote nothing."""

    def run(self) -> None:
        """Serve until told to stop, then do what the application wants done at the end."""
        super().run()
        for ending in self.wsgi.extensions.get(AT_WORKER_END, ()):
            ending()

    def handle_quit(self, sig: int, frame: Any) -> None:
        """End without a grace; gunicorn's own would wait for a lock that the interrupted code may hold."""
        Worker.handle_quit(self, sig, frame)

    def handle(self, conn: Any) -> Any:
        """Serve one request of a connection; runs in a request thread, which lingers if the connection is to close."""
        outcome = super().handle(conn)
        if outcome is False:
            linger(conn.sock)
        return outcome

    def handle_error(self, _req: Any, client: Any, _addr: Any, exc: BaseException) -> None:
        """Answer what is no HTTP, or broke before Flask, in JSON. Nothing that the client sent is logged or echoed."""
        status, reason, message = _answer_for(exc)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            frames = "".join(traceback.format_tb(exc.__traceback__))
            self.log.error("request failed: %s\n%s", type(exc).__name__, frames)
        body = json.dumps({"status_code": status, "message": message})
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with contextlib.suppress(OSError):
            client.sendall(f"{head}Connection: close\r\n\r\n{body}".encode())


def _answer_for(exc: BaseException) -> tuple[int, str, str]:
    """Return status, reason and text for an error of gunicorn's parser, or of ours."""
    status, message = next(
        ((status, message) for kind, status, message in _PARSE_ANSWERS if isinstance(exc, kind)),
        (HTTPStatus.INTERNAL_SERVER_ERROR, "Internal error."),
    )
    return status, HTTPStatus(status).phrase, message


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
