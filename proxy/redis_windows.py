"""Own the counting of moving windows in Redis, where several proxies count together.

Runs in the proxy's worker; a call blocks its greenlet for at most 50 ms, connecting included. One script counts a call
in all its windows or in none, by Redis' clock: the Redis storage of the `limits` library asks twice a window, goes by
each proxy's clock, and shortens a list that two bearers see with two limits. It does not know what to do in an outage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gevent
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from proxy.answers import Refusal
from proxy.counted_windows import CountedWindow, CountUnavailable, WindowState

BUDGET_SECONDS = 0.05
_MAX_CONNECTIONS = 8
# Of one answer; the script's longest has a few hundred.
_MAX_ANSWER_BYTES = 16384
_PROBE = CountedWindow("probe", 1_000_000, 1)
_MICROSECONDS = 1_000_000
_PREFIX = "inference_api:window:"
_BEGAN_KEY = "inference_api:windows_began"

# KEYS: a list of times a window, the newest first, after the key that tells since when all is counted. ARGV: count and
# microseconds of each window. Answers 1 if the call was counted or 0, for how many microseconds all has been counted,
# then of each window the calls in it and after how many microseconds one of them leaves.
_TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local began = tonumber(redis.call('GET', KEYS[#KEYS]) or now + 1)
if began > now then
    began = now
    redis.call('SET', KEYS[#KEYS], string.format('%.0f', now))
end
local answer = {1, now - began}
for i = 1, #KEYS - 1 do
    local key = KEYS[i]
    local count, length = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
    local newest = tonumber(redis.call('LINDEX', key, 0) or 0)
    -- Only a clock that was put back makes a time to come; it must not hold a tenant until then.
    if newest > now then redis.call('DEL', key) end
    while tonumber(redis.call('LINDEX', key, -1) or now) <= now - length do redis.call('RPOP', key) end
    if redis.call('LLEN', key) >= count then answer[1] = 0 end
end
for i = 1, #KEYS - 1 do
    local key = KEYS[i]
    local count, length = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
    if answer[1] == 1 then
        redis.call('LPUSH', key, string.format('%.0f', now))
        redis.call('PEXPIRE', key, math.ceil(length / 1000))
    end
    local held = redis.call('LLEN', key)
    local next_to_leave = held > count and count - 1 or -1
    answer[2 * i + 1] = held
    answer[2 * i + 2] = tonumber(redis.call('LINDEX', key, next_to_leave) or now) + length - now
end
return answer
"""


class WrongAnswer(Exception):
    """Tell that Redis answered something that this script cannot have said."""


class BoundedAnswers:
    """Stand in for the socket of a connection to Redis: an answer without an end is no answer.

    The client library reads on while there is something to read, and a read that need not wait gives way to no timer:
    the budget alone would not end it.
    """

    def __init__(self, sock: Any) -> None:
        """Take over a connected socket."""
        self._sock = sock
        self._num_bytes = 0

    def sendall(self, data: bytes) -> None:
        """Send a command; its answer begins."""
        self._num_bytes = 0
        self._sock.sendall(data)

    def recv(self, size: int) -> bytes:
        """Read some of an answer; raise WrongAnswer when it has become too long."""
        data: bytes = self._sock.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any) -> int:
        """Read as `recv` does, into a buffer: what the library does where `hiredis` is installed."""
        size: int = self._sock.recv_into(buffer)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        self._num_bytes += size
        if self._num_bytes > _MAX_ANSWER_BYTES:
            raise WrongAnswer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class _TcpConnection(redis.Connection):
    def _connect(self) -> Any:
        return BoundedAnswers(super()._connect())  # type: ignore[no-untyped-call]


class _UnixConnection(redis.UnixDomainSocketConnection):
    def _connect(self) -> Any:
        return BoundedAnswers(super()._connect())  # type: ignore[no-untyped-call]


class RedisWindows:
    """Count in one Redis through a few connections; after a fault the object is closed and another one made."""

    def __init__(self, url: str, budget_seconds: float = BUDGET_SECONDS) -> None:
        """Make the pool for a `redis://` or `unix://` URL, which may hold a password; nothing is connected yet."""
        self._budget_seconds = budget_seconds
        # RESP2 and no driver's name: each costs a new connection another exchange. No retries: the budget has none.
        self._pool = redis.BlockingConnectionPool.from_url(
            url,
            connection_class=_UnixConnection if url.startswith("unix:") else _TcpConnection,
            max_connections=_MAX_CONNECTIONS,
            timeout=budget_seconds,
            socket_timeout=budget_seconds,
            socket_connect_timeout=budget_seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            driver_info=None,
        )
        self._take = redis.Redis(connection_pool=self._pool).register_script(_TAKE)

    def take(self, windows: Sequence[CountedWindow]) -> tuple[list[WindowState], float]:
        """Count one call in all windows if it fits into each, else in none.

        Returns how each window stands then, and for how many seconds nothing that was counted here has been lost.

        Raises CountUnavailable for an answer that is late, wrong or none; the object is to be closed then.
        """
        arguments = [number for window in windows for number in (window.count, window.seconds * _MICROSECONDS)]
        keys = [f"{_PREFIX}{window.key}:{window.seconds}" for window in windows]
        try:
            with gevent.Timeout(self._budget_seconds):
                return _read(self._take(keys=[*keys, _BEGAN_KEY], args=arguments), windows)
        except Refusal:
            # The call was cut while it waited, which tells nothing about Redis.
            raise
        except (gevent.Timeout, Exception) as fault:
            # Whatever the client library trips over is no count. The text may hold the address: the type alone goes on.
            raise CountUnavailable(type(fault).__name__) from None

    def probe(self) -> float:
        """Ask the script about a window of its own; returns the seconds that `take` does and raises as it does."""
        return self.take([_PROBE])[1]

    def close(self) -> None:
        """Close all connections, those in use too: what they would still say belongs to nobody."""
        self._pool.disconnect(inuse_connections=True)


def _read(answer: object, windows: Sequence[CountedWindow]) -> tuple[list[WindowState], float]:
    if not isinstance(answer, list) or len(answer) != 2 + 2 * len(windows):
        raise WrongAnswer
    if not all(type(number) is int and number >= 0 for number in answer):
        raise WrongAnswer
    was_counted, counted_microseconds, *figures = answer
    states = []
    for window, held, microseconds in zip(windows, figures[::2], figures[1::2], strict=True):
        if microseconds > window.seconds * _MICROSECONDS or (was_counted and not 1 <= held <= window.count):
            raise WrongAnswer
        is_full = not was_counted and held >= window.count
        states.append(WindowState(max(0, window.count - held), microseconds / _MICROSECONDS, is_full))
    if was_counted not in (0, 1) or was_counted == any(state.is_full for state in states):
        raise WrongAnswer
    return states, counted_microseconds / _MICROSECONDS
