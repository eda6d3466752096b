"""Own gunicorn's gevent worker as this proxy needs it: deadlines on the client, one status line, truncation that shows.

Runs as the one worker of PROCESS 3, a greenlet a connection. It wraps each client socket in a `ClientConnection` and
leaves the parsing to gunicorn. It does not know routes, bearers or the upstream.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from gevent import GreenletExit, get_hub, monkey
from gevent import socket as gevent_socket
from gevent.event import Event
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.http import errors, wsgi
from gunicorn.workers.ggevent import GeventWorker

from proxy.answers import Refusal, raw_error_answer
from proxy.chunks import FramedBytes
from proxy.connection import ClientConnection, ClientLeft, Deadlines, give_way
from proxy.pace import PaceRule
from proxy.places import Places
from proxy.watched_file import watch_files

_HEARTBEAT_SECONDS = 1.0
# So many objects made and not freed bring a collection of the youngest, every 20th of the older ones too (gc module). A
# request leaves no cycle: what is looked through are open connections, some 80 objects each, and those of 1,000 take
# 40 ms, for which all others wait. Python's own 700 means ten collections a second where clients come and go.
_COLLECTION_THRESHOLDS = 50_000, 20, 20
# Beyond the places of clients: so many may be open at once while others are made to leave for them.
_NUM_SPARE_PLACES = 32
# Descriptors for listeners, pipes, logs and libraries, and for the spare places and their upstream sockets.
_OWN_DESCRIPTORS = 64 + 2 * _NUM_SPARE_PLACES
# The server takes far fewer requests at once, so no more upstream sockets than these are ever open.
_MAX_UPSTREAM_DESCRIPTORS = 1024

# Of a drain: whose connection is younger than this has not had the time to send a request, and gets so long for it.
_JUST_NOW_SECONDS = 2.0
_FIRST_REQUEST_SECONDS = 5.0

_CROWDED_LOG_SECONDS = 60.0
_RETRY_AFTER_SECONDS = "1"

# First match wins; everything else that gunicorn's parser raises is a 400.
_REFUSALS = (
    (errors.LimitRequestLine, 414, "target_too_long", "Request target is too long."),
    (errors.LimitRequestHeaders, 431, "headers_too_large", "Request header fields are too large or too many."),
    (errors.ExpectationFailed, 417, "expectation_failed", "Expectation is not supported."),
    (errors.UnsupportedTransferCoding, 501, "coding_unsupported", "Transfer-Encoding must be chunked."),
    (errors.ParseException, 400, "request_malformed", "Request is not valid HTTP."),
)


class AnswerBroken(Exception):
    """Give up an answer that has started; the client must see that it is not whole."""


class NamelessResponse(wsgi.Response):  # type: ignore[misc]
    """Write answers without a Server header: what runs here is nobody's business."""

    def default_headers(self) -> list[str]:
        """List the framing headers that gunicorn adds, minus Server."""
        return [line for line in super().default_headers() if not line.startswith("Server:")]

    def _emit_body(self, data: bytes) -> None:
        """Write chunks that are framed already as they are."""
        if isinstance(data, FramedBytes):
            self.sock.sendall(data)
        else:
            super()._emit_body(data)


class ListenerName:
    """What gunicorn asks of a listener for each connection; the listener itself may be closed by then."""

    def __init__(self, name: Any) -> None:
        """Keep the address that the listener is bound to."""
        self._name = name

    def getsockname(self) -> Any:
        """Return the address, as a socket does."""
        return self._name


class ProxyWorker(GeventWorker):  # type: ignore[misc]
    """Serve connections with deadlines; see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Read the deadlines from the application's settings."""
        super().__init__(*args, **kwargs)
        settings = self.app.settings
        self._deadlines = Deadlines(
            head=PaceRule(settings.header_deadline_seconds),
            body=PaceRule(
                settings.body_deadline_seconds, settings.body_min_bytes_per_second, settings.body_grace_seconds
            ),
            write_stall_seconds=settings.write_stall_seconds,
        )
        self._open: set[ClientConnection] = set()
        self._places: Places[ClientConnection] = Places(self.worker_connections)
        self._crowded_told_at = -_CROWDED_LOG_SECONDS
        # Set once nothing is accepted any more: a client that sees its connection end can rely on that.
        self._draining = False
        # Set on SIGINT and SIGQUIT, which give no grace.
        self._hurried = False

    def patch(self) -> None:
        """Make sockets cooperative; TLS is left alone, the proxy speaks none and gunicorn has imported it already."""
        monkey.patch_all(ssl=False)
        self.sockets: list[Any] = [
            gevent_socket.socket(listener.FAMILY, gevent_socket.SOCK_STREAM, fileno=listener.sock.detach())
            for listener in self.sockets
        ]

    def timeout_ctx(self) -> contextlib.AbstractContextManager[None]:
        """Leave time to the connection, which knows when the head began."""
        return contextlib.nullcontext()

    def init_signals(self) -> None:
        """Let SIGTERM in as soon as it has its handler; it was held back over the fork so that none is lost."""
        self._stopping = Event()
        super().init_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Start to drain at once on SIGTERM."""
        super().handle_exit(sig, frame)
        self._stopping.set()

    def handle_quit(self, sig: int, frame: Any) -> None:
        """End without a grace on SIGINT and SIGQUIT; gunicorn's own would exit from a greenlet, with a traceback."""
        self._hurried = True
        self.handle_exit(sig, frame)

    def run(self) -> None:
        """Accept until told to stop, then finish what is running within the grace."""
        get_hub().print_exception = _tell_fault
        _spare_collections()
        soft_limit, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_connections = fitting_connections(self.worker_connections, soft_limit)
        if num_connections < self.worker_connections:
            self.log.warning("at most %d connections fit into %d open files (ulimit -n)", num_connections, soft_limit)
        self._places = Places(num_connections)
        pool = Pool(num_connections + _NUM_SPARE_PLACES)
        servers = []
        for listener in self.sockets:
            listener.setblocking(True)
            servers.append(self.server_of(listener, pool))
            servers[-1].start()
        watchers = [watch_files(group) for group in self.wsgi.extensions["watched"]]
        while self.alive:
            self.notify()
            self._stopping.wait(timeout=_HEARTBEAT_SECONDS)
        for server in servers:
            server.close()
        self._draining = True
        self._drain(pool)
        for watcher in watchers:
            watcher.kill()

    def server_of(self, listener: Any, pool: Pool) -> StreamServer:
        """Return a server that will hand the listener's connections to `handle`, each in a greenlet of the pool."""
        return StreamServer(listener, handle=partial(self.handle, ListenerName(listener.getsockname())), spawn=pool)

    def _drain(self, pool: Pool) -> None:
        began = time.monotonic()
        deadline = began + self.cfg.graceful_timeout
        first_requests_due = began + min(_FIRST_REQUEST_SECONDS, self.cfg.graceful_timeout / 2)
        # What has just connected has a request on its way, and on a busy machine that may take its time.
        self._end_idle(
            [connection for connection in self._open if not connection.came_after(began - _JUST_NOW_SECONDS)]
        )
        while not self._hurried and (remaining := deadline - time.monotonic()) > 0:
            self.notify()
            if pool.join(timeout=min(remaining, _HEARTBEAT_SECONDS)):
                return
            is_late = time.monotonic() >= first_requests_due
            self._end_idle([connection for connection in self._open if is_late or not connection.fresh])
        if not self._hurried:
            self.log.warning("grace is over with %d connections open", len(pool))
        pool.kill(timeout=_HEARTBEAT_SECONDS)

    def _end_idle(self, connections: list[ClientConnection]) -> None:
        for connection in connections:
            if connection.idle:
                with contextlib.suppress(OSError):
                    connection.shutdown(gevent_socket.SHUT_RD)

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        """Serve one connection to its end."""
        connection = ClientConnection(client, self._deadlines, keep=self._places.keep)
        self._open.add(connection)
        self._make_room(connection)
        try:
            super().handle(listener, connection, addr)
        finally:
            self._places.leave(connection)
            self._open.discard(connection)

    def _make_room(self, newcomer: ClientConnection) -> None:
        evicted = self._places.enter(newcomer)
        if evicted is None:
            return
        evicted.give_up()
        now = time.monotonic()
        if now - self._crowded_told_at >= _CROWDED_LOG_SECONDS:
            self._crowded_told_at = now
            self.log.warning("all connections are in use: those without a good bearer are closed for new ones")

    def handle_request(self, listener_name: Any, req: Any, sock: ClientConnection, addr: Any) -> None:
        """Run the app for one request; raise StopIteration when the connection is not to be used again."""
        connection = sock
        # RFC 9110 section 2.5: a later minor version is served as the one we speak, and answered as that.
        req.version = min(req.version, (1, 1))
        connection.begin_request(req)
        self._places.ask(connection)
        response, environ = wsgi.create(req, connection, addr, listener_name, self.cfg, response_class=NamelessResponse)
        environ["proxy.connection"] = connection
        if self._draining:
            response.force_close()
        try:
            self._answer(environ, response)
        except ClientLeft:
            connection.left = True
            raise StopIteration from None
        except AnswerBroken as fault:
            self.log.warning("answer given up: %s", fault)
            raise StopIteration from None
        finally:
            connection.end_request()
        if response.should_close() or self._draining:
            raise StopIteration
        self._places.wait(connection)
        connection.begin_head()
        # Whoever sends requests without waiting for their answers must not keep the others from theirs.
        give_way()

    def _answer(self, environ: dict[str, Any], response: Any) -> None:
        chunks = self.wsgi(environ, response.start_response)
        try:
            for chunk in chunks:
                response.write(chunk)
            response.close()
        finally:
            close: Callable[[], None] | None = getattr(chunks, "close", None)
            if close is not None:
                close()

    def handle_error(self, _req: Any, client: ClientConnection, _addr: Any, exc: BaseException) -> None:
        """Answer a request that did not reach the app or broke it: one status line at most, none of its text."""
        if isinstance(exc, ClientLeft):
            return
        refusal = _refusal_for(exc)
        if refusal.status == 500:
            # Frames only: the exception's text may quote the request.
            frames = "".join(traceback.format_tb(exc.__traceback__))
            self.log.error("request failed: %s\n%s", type(exc).__name__, frames)
        if client.answer_started:
            return
        client.linger = True
        with contextlib.suppress(ClientLeft):
            client.sendall(raw_error_answer(refusal, client.error_headers))


def _spare_collections() -> None:
    """Collect garbage rarely, and never look again through what is loaded by now and stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTION_THRESHOLDS)


def fitting_connections(wanted: int, soft_limit: int) -> int:
    """Return how many clients fit into the limit of open files, each with a descriptor for its upstream socket.

    An accept without a free descriptor would spin; below the limit the kernel's backlog waits instead.
    """
    if soft_limit == resource.RLIM_INFINITY:
        return wanted
    free = soft_limit - _OWN_DESCRIPTORS
    return max(1, min(wanted, max(free // 2, free - _MAX_UPSTREAM_DESCRIPTORS)))


def _tell_fault(_context: object, kind: type[BaseException], fault: BaseException, frames: TracebackType) -> None:
    """Log what ended a greenlet; gevent would write its text as well, which may quote a request."""
    logging.getLogger("proxy").error("a greenlet ended", exc_info=(kind, fault, frames))


def _refusal_for(exc: BaseException) -> Refusal:
    if isinstance(exc, Refusal):
        return exc
    if isinstance(exc, GreenletExit):
        # What outlives the grace is ended; another proxy, or this one's successor, may take it at once.
        return Refusal(503, "stopping", "Proxy is stopping, try again later.", {"Retry-After": _RETRY_AFTER_SECONDS})
    for kind, status, code, message in _REFUSALS:
        if isinstance(exc, kind):
            return Refusal(status, code, message)
    return Refusal(500, "internal", "Internal error.")
