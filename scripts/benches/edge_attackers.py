"""Be slow and silent clients, in a process of their own: `python -m benches.edge_attackers`, started by edge_clients.

The first line on stdin is `Orders` as a JSON object; every other line is answered with a `Standing` in JSON; the end
of stdin ends the attack. A connection that is cut is opened anew, so that the attack stays as large as it is. One
thread over epoll, so that so many clients cost little of the cores they share with what they attack.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import os
import resource
import selectors
import socket
import sys
import time

DRIP_SECONDS = 1.0
"""Between a dripping client's bytes, and a slow reader's; a client that was cut at once waits as long."""

_STDIN = 0
_ANSWER_BYTES = 65536
_SMALL_BUFFER_BYTES = 4096
_SPARE_DESCRIPTORS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Orders:
    """What each of so many clients does: what it sends at once, what drips, whether it reads a byte now and then,
    or asks again as soon as it has an answer.

    They come evenly over `opening_seconds`. As long as one lasts makes an even attack: else all are cut, and come
    again, at the same moment.
    """

    port: int
    num_clients: int
    opening_seconds: float
    opening: str
    drip: str
    reads_slowly: bool
    asks_again: bool


@dataclasses.dataclass(slots=True)
class Standing:
    """How an attack stands: clients connected now, how many connections have ended, and the longest of them."""

    num_open: int = 0
    num_ended: int = 0
    longest_seconds: float = 0.0


class Client:
    """One slow client, which connects again whenever its connection ends."""

    def __init__(self, attackers: Attackers) -> None:
        """Do nothing yet: `act` opens the connection."""
        self._attackers = attackers
        self._orders = attackers.orders
        self._sock: socket.socket
        self._is_open = False
        self._is_connected = False
        self._began = 0.0

    def act(self) -> None:
        """Do what is due: open the connection, or send or read a byte of it."""
        if not self._is_open:
            self._open()
            return
        try:
            if self._orders.reads_slowly:
                is_over = not self._sock.recv(1)
            else:
                self._sock.send(self._orders.drip.encode())
                is_over = False
        except BlockingIOError:
            is_over = False
        except OSError:
            is_over = True
        if is_over:
            self._end()
        else:
            self._attackers.call_at(time.monotonic() + DRIP_SECONDS, self)

    def be_ready(self) -> None:
        """Go on where the socket is ready: connected by now, or answered or closed by the other end, which ends it."""
        if not self._is_connected:
            self._begin()
        elif not (self._orders.asks_again and self._ask_again()):
            self._end()

    def _begin(self) -> None:
        try:
            self._sock.send(self._orders.opening.encode())
        except OSError:
            self._close()
            self._attackers.call_at(time.monotonic() + DRIP_SECONDS, self)
            return
        self._is_connected = True
        self._began = time.monotonic()
        self._attackers.standing.num_open += 1
        if self._orders.reads_slowly:
            self._attackers.selector.unregister(self._sock)
        else:
            self._attackers.selector.modify(self._sock, selectors.EVENT_READ, self)
        if self._orders.drip or self._orders.reads_slowly:
            self._attackers.call_at(self._began + DRIP_SECONDS, self)

    def _ask_again(self) -> bool:
        """Take the answer, which is short and comes at once, and ask for the next; tell whether there was one."""
        try:
            return bool(self._sock.recv(_ANSWER_BYTES)) and self._sock.send(self._orders.opening.encode()) > 0
        except OSError:
            return False

    def _open(self) -> None:
        self._sock = socket.socket()
        self._is_open = True
        if self._orders.reads_slowly:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
        self._sock.setblocking(False)
        self._sock.connect_ex(("127.0.0.1", self._orders.port))  # whether it failed shows when it is written to
        self._attackers.selector.register(self._sock, selectors.EVENT_WRITE, self)

    def _end(self) -> None:
        standing, now = self._attackers.standing, time.monotonic()
        standing.num_open -= 1
        standing.num_ended += 1
        standing.longest_seconds = max(standing.longest_seconds, now - self._began)
        self._close()
        # Many connections are the attack, not many new ones.
        self._attackers.call_at(max(now, self._began + DRIP_SECONDS), self)

    def _close(self) -> None:
        if self._sock in self._attackers.selector.get_map():
            self._attackers.selector.unregister(self._sock)
        self._sock.close()
        self._is_open = self._is_connected = False
        self._attackers.forget(self)


class Attackers:
    """All clients of an attack, their sockets and what each does next, at a time of the monotonic clock."""

    def __init__(self, orders: Orders) -> None:
        """Let the first client come now."""
        self.orders = orders
        self.standing = Standing()
        self.selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Client]] = []
        self._numbers = itertools.count()
        self._latest: dict[Client, int] = {}
        now, pause = time.monotonic(), orders.opening_seconds / orders.num_clients
        for index in range(orders.num_clients):
            self.call_at(now + index * pause, Client(self))

    def call_at(self, moment: float, client: Client) -> None:
        """Let a client act at a moment, and not at the one that was said before."""
        number = self._latest[client] = next(self._numbers)
        heapq.heappush(self._due, (moment, number, client))

    def forget(self, client: Client) -> None:
        """Let a client not act at the moment that was said before."""
        self._latest.pop(client, None)

    def run(self) -> None:
        """Attack until stdin ends."""
        os.set_blocking(_STDIN, False)
        self.selector.register(_STDIN, selectors.EVENT_READ)
        while True:
            for key, _events in self.selector.select(self._act_on_due()):
                if key.data is not None:
                    key.data.be_ready()
                elif lines := os.read(_STDIN, 4096):
                    sys.stdout.write(lines.count(b"\n") * (json.dumps(dataclasses.asdict(self.standing)) + "\n"))
                    sys.stdout.flush()
                else:
                    return

    def _act_on_due(self) -> float | None:
        """Let those act whose time has come; return the seconds until the next one's, None without one."""
        while self._due:
            moment, number, client = self._due[0]
            if moment > (now := time.monotonic()):
                return moment - now
            heapq.heappop(self._due)
            if self._latest.get(client) == number:
                client.act()
        return None


def _allow_descriptors(number: int) -> None:
    """Raise the limit of open files for so many connections, as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, number + _SPARE_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def main() -> None:
    """Run the attack that stdin describes."""
    # Without a buffer: the lines that come later are for the selector.
    with open(_STDIN, "rb", buffering=0, closefd=False) as stdin:
        orders = Orders(**json.loads(stdin.readline()))
    _allow_descriptors(orders.num_clients)
    Attackers(orders).run()


if __name__ == "__main__":
    main()
