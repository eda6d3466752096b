"""Notice clients that leave: one epoll thread a worker over every socket whose request is open.

Runs in PROCESS 1. FIN from the client means left: nobody can tell a close from a half-close, so that a client must
keep its sending side open while it reads. Writing never finds a client gone that only waits; this does, at once.
Knows sockets and callbacks, nothing of requests.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Callable

from inference_api.queues import Wakeup

logger = logging.getLogger(__name__)

_LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class DisconnectWatcher:
    """Call back, once and from its own thread, when the peer of a watched socket sends FIN or RST."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.fileno(), select.EPOLLIN)
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="disconnects", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._closing = True
        self._wakeup.wake()
        self._thread.join()
        self._epoll.close()
        self._wakeup.close()

    def watch(self, sock: socket.socket, on_left: Callable[[], None]) -> int:
        """Watch a socket until `forget`; return the handle for that. The socket must stay open until then."""
        handle = sock.fileno()
        with self._lock:
            self._callbacks[handle] = on_left
        self._epoll.register(handle, _LEFT | select.EPOLLONESHOT)
        return handle

    def forget(self, handle: int) -> None:
        """Stop watching; after this returns the callback is not started any more."""
        with self._lock:
            if self._callbacks.pop(handle, None) is not None:
                self._epoll.unregister(handle)

    @property
    def num_watched(self) -> int:
        """Sockets under watch."""
        return len(self._callbacks)

    def _run(self) -> None:
        while not self._closing:
            for handle, _ in self._epoll.poll():
                with self._lock:
                    on_left = self._callbacks.get(handle)
                    if on_left is not None:
                        on_left()
