"""Own the bound of the input queue: how many requests and prompt tokens may be in the backend at once.

Used by the intake thread, which takes a place or refuses at once, and by the decode thread, which gives places back;
a lock guards the counts. Knows nothing of rows' owners or of sessions' contents.
"""

from __future__ import annotations

import threading

from inference_api.messages import RefusalReason


class Admission:
    """Count places: `num_rows` run, `queue_requests` more may wait, with `queue_tokens` prompt tokens among them."""

    def __init__(self, num_rows: int, queue_requests: int, queue_tokens: int) -> None:
        self._max_requests = num_rows + queue_requests
        self._num_rows = num_rows
        self._max_waiting_tokens = queue_tokens
        self._lock = threading.Lock()
        self._num_requests = 0
        self._num_waiting_tokens = 0
        self._num_refused = 0
        self._request_seconds = 1.0
        self._draining = False

    def take(self, num_tokens: int) -> int | RefusalReason:
        """Take a place for a prompt of `num_tokens`; return it (0: a row is free, 1: first in line), or why not."""
        with self._lock:
            if self._draining:
                self._num_refused += 1
                return RefusalReason.DRAINING
            waiting_tokens = self._num_waiting_tokens + num_tokens
            must_wait = self._num_requests >= self._num_rows
            too_many_tokens = must_wait and waiting_tokens > self._max_waiting_tokens
            if self._num_requests >= self._max_requests or too_many_tokens:
                self._num_refused += 1
                return RefusalReason.QUEUE_FULL
            place = max(0, self._num_requests - self._num_rows + 1)
            self._num_requests += 1
            self._num_waiting_tokens = waiting_tokens
            return place

    def start(self, num_tokens: int) -> None:
        """Note that a waiting prompt of `num_tokens` got a row, or ended without one."""
        with self._lock:
            self._num_waiting_tokens -= num_tokens

    def wait_again(self, num_tokens: int) -> None:
        """Note that a prompt of `num_tokens` that had a row waits once more; its place it has."""
        with self._lock:
            self._num_waiting_tokens += num_tokens

    def release(self, request_seconds: float | None) -> None:
        """Give a place back; `request_seconds` is how long it held a row (None: it never did)."""
        with self._lock:
            self._num_requests -= 1
            if request_seconds is not None:
                self._request_seconds += 0.1 * (request_seconds - self._request_seconds)

    def drain(self) -> None:
        """Refuse everything from now on."""
        with self._lock:
            self._draining = True

    @property
    def draining(self) -> bool:
        """Tell whether everything is refused."""
        return self._draining

    @property
    def num_requests(self) -> int:
        """Places taken: running and waiting requests."""
        return self._num_requests

    @property
    def num_refused(self) -> int:
        """Requests that got no place, since the start."""
        return self._num_refused

    def eta_seconds(self, place: int) -> float:
        """Estimate the wait of place `place`: rows free up one after another at the mean rate of recent requests."""
        return place * self._request_seconds / self._num_rows
