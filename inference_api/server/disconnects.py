"""Notice clients that leave: one epoll thread a worker over every socket whose request is open.

Runs in PROCESS 1. FIN from the client means left: nobody can tell a close from a half-close, so that a client must
keep its sending side open while it reads. Writing never finds a client gone that only waits; this does, at once.
Knows sockets and callbacks, nothing of requests.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable

from inference_api.queues import Wakeup
from inference_api.threads import vital_thread

_LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class DisconnectWatcher:
    """Call back, once and from its own thread, when the peer of a watched socket sends FIN or RST."""

    def __init__(self, on_death: Callable[[], None]) -> None:
        """`on_death` is called if the thread dies by surprise: nobody would notice a leaver any more."""
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.fileno(), select.EPOLLIN)
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[], None]] = {}
        self._closing = False
        self._thread = vital_thread("disconnects", self._run, on_death)

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
            self._epoll.register(handle, _LEFT | select.EPOLLONESHOT)
            self._callbacks[handle] = on_left
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
                self._tell(handle)

    def _tell(self, handle: int) -> None:
        """Call back if the socket that has this number now has really been left.

        Between the event and the lock the number may have gone to another connection, whose client is still there.
        """
        with self._lock:
            on_left = self._callbacks.get(handle)
            if on_left is not None and has_left(handle):
                on_left()


def has_left(handle: int) -> bool:
    """Tell whether the peer of the socket with this number has sent FIN or RST; never blocks."""
    poll = select.poll()
    poll.register(handle, select.POLLRDHUP)
    return bool(poll.poll(0))
