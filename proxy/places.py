"""Own who may stay when the proxy's connections run out: first those that have shown a good bearer.

Pure; the worker asks it when a connection comes, asks, or goes. For a newcomer the longest-waiting connection without a
whole request is closed, then the longest-running request without a bearer. Who sends a whole head at once is never the
longest-waiting, so that a flood of silent connections keeps nobody out. It does not know sockets or bearers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class Places(Generic[Connection]):
    """Count the connections of one worker; `num_places` is how many may stay without one having to go."""

    def __init__(self, num_places: int) -> None:
        """Begin with none."""
        self._num_places = num_places
        self._num_open = 0
        # The longest there first.
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._asking: OrderedDict[Connection, None] = OrderedDict()
        self._kept: set[Connection] = set()

    def enter(self, connection: Connection) -> Connection | None:
        """Count a newcomer; return the connection to close for it, None while there is room or nobody can go."""
        self._num_open += 1
        evicted = None
        leavers = self._waiting or self._asking
        if self._num_open > self._num_places and leavers:
            # It stays counted until it has left.
            evicted, _ = leavers.popitem(last=False)
        self._waiting[connection] = None
        return evicted

    def ask(self, connection: Connection) -> None:
        """Note that its request is whole: those whose are not go first."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._asking[connection] = None

    def keep(self, connection: Connection) -> bool:
        """Let one that asks with a good bearer stay, whatever comes; say False if all places are kept already."""
        if connection in self._asking:
            if len(self._kept) >= self._num_places:
                return False
            del self._asking[connection]
            self._kept.add(connection)
        return True

    def wait(self, connection: Connection) -> None:
        """Take back the leave to stay when an answer has ended: the next request has to show a bearer again."""
        if connection in self._kept or connection in self._asking:
            self._kept.discard(connection)
            self._asking.pop(connection, None)
            self._waiting[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget one that has closed."""
        self._num_open -= 1
        self._kept.discard(connection)
        self._waiting.pop(connection, None)
        self._asking.pop(connection, None)
