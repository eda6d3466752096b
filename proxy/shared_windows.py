"""Own who counts: Redis while it answers right and in time, this proxy by its share while it does not.

Runs in the proxy's worker. The first fault turns every call to the local count; every 2 s the worker looks whether
Redis is there, so that a proxy without calls knows it too. What passes is counted here in any case: neither an outage
nor a Redis that lies or was emptied lets this proxy alone pass more than the limit. Knows no tenants and no routes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from proxy.counted_windows import CountedWindow, CountUnavailable, LocalWindows, WindowState
from proxy.outage_shares import OutageShares

_BLIND = ":blind"


class RemoteWindows(Protocol):
    """Count for all proxies; whatever goes wrong is raised as CountUnavailable, in 50 ms at the latest."""

    def take(self, windows: Sequence[CountedWindow]) -> tuple[list[WindowState], float]:
        """Count one call in all windows if it fits into each, else in none; say for how many seconds all is counted."""

    def probe(self) -> float:
        """Ask whether it would count, and for how many seconds all has been counted."""

    def close(self) -> None:
        """Close what is connected."""


class SharedWindows:
    """Count calls for all proxies, as well as that can be."""

    def __init__(
        self,
        num_proxies: int,
        connect: Callable[[], RemoteWindows] | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take how many proxies share the limits, and what makes a new client of Redis; None: there is no Redis."""
        self._now = now
        self._connect = connect
        self._remote = connect() if connect is not None else None
        self._local = LocalWindows(now)
        self._num_proxies = num_proxies
        self._shares = OutageShares(num_proxies, least_share=1 if connect is None else 0)

    def take(self, windows: Sequence[CountedWindow]) -> list[WindowState]:
        """Count one call in all windows if it fits into each, else in none; blocks for at most Redis' budget."""
        own = self._ask_locally(self._local.look, windows)
        if any(state.is_full for state in own):
            return own
        shared = self._take_remotely(windows)
        if shared is not None and any(state.is_full for state in shared):
            return shared
        # Anew: Redis may have gone, or others called, while this call waited.
        own = self._ask_locally(self._local.take, windows)
        return own if shared is None else [_tighter(pair) for pair in zip(own, shared, strict=True)]

    def _ask_locally(
        self, ask: Callable[[Sequence[CountedWindow]], list[WindowState]], windows: Sequence[CountedWindow]
    ) -> list[WindowState]:
        """Ask about what this proxy may let pass of the windows now, and of those calls that it counts blindly."""
        now, asked = self._now(), list[tuple[int, CountedWindow]]()
        for index, window in enumerate(windows):
            asked.append((index, replace(window, count=self._shares.own_limit(window.count, window.seconds, now))))
            if self._shares.is_blind(window.seconds, now):
                count = self._shares.blind_limit(window.count)
                asked.append((index, CountedWindow(window.key + _BLIND, count, window.seconds)))
        by_window: list[list[WindowState]] = [[] for _ in windows]
        for (index, _), state in zip(asked, ask([window for _, window in asked]), strict=True):
            by_window[index].append(state)
        return [_tighter(states) for states in by_window]

    def _take_remotely(self, windows: Sequence[CountedWindow]) -> list[WindowState] | None:
        remote = self._remote
        if remote is None:
            return None
        try:
            states, counted_seconds = remote.take(windows)
        except CountUnavailable as fault:
            self._fall_back(remote, fault)
            return None
        if self._remote is remote:
            self._shares.hear(self._now() - counted_seconds)
        return states

    def refresh(self) -> bool:
        """Look whether Redis is there (blocks for at most its budget); return whether that has changed."""
        if self._connect is None:
            return False
        was_there, remote = self._remote is not None, self._remote or self._connect()
        try:
            counted_seconds = remote.probe()
        except CountUnavailable as fault:
            if was_there:
                self._fall_back(remote, fault)
            else:
                _close(remote)
            return was_there
        if not was_there:
            self._remote = remote
            self._shares.come(self._now(), self._now() - counted_seconds)
            logging.getLogger("proxy").warning("Redis answers again: limits are counted there")
        elif self._remote is remote:
            self._shares.hear(self._now() - counted_seconds)
        return not was_there

    def _fall_back(self, remote: RemoteWindows, fault: CountUnavailable) -> None:
        if self._remote is not remote:
            # Another call was faster.
            return
        self._remote = None
        self._shares.go(self._now())
        logging.getLogger("proxy").warning(
            "Redis did not answer right and in time (%s): this proxy counts by itself, 1/%d of each limit",
            fault,
            self._num_proxies,
        )
        _close(remote)


def _tighter(states: Sequence[WindowState]) -> WindowState:
    return min(states, key=lambda state: (not state.is_full, state.remaining))


def _close(remote: RemoteWindows) -> None:
    # What cannot be closed is closed by its finaliser; a limit must not fail for that.
    try:
        remote.close()
    except Exception as fault:
        logging.getLogger("proxy").warning("connections to Redis could not be closed: %s", type(fault).__name__)
