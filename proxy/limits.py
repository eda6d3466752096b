"""Own the request window of a tenant: at most so many requests in any 60 seconds, counted in this process.

Runs in the proxy; the one impure file of its core (the `limits` library reads the clock itself). It does not know what
a request costs: tokens, rows and queue places are counted where they are spent. Connections are bounded by the
worker's pool.
"""

from __future__ import annotations

import math
import time

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from proxy.answers import Refusal


class RequestWindow:
    """Count requests by tenant in a moving window; a limit of 0 counts nothing."""

    def __init__(self, requests_per_minute: int) -> None:
        """Keep the window in memory; it is lost with the process, which can only let more through."""
        self._item = RateLimitItemPerMinute(requests_per_minute) if requests_per_minute else None
        self._limiter = MovingWindowRateLimiter(MemoryStorage()) if self._item else None

    def take(self, tenant: str) -> None:
        """Count one request of the tenant; raise Refusal 429 with Retry-After when the window is full."""
        if self._item is None or self._limiter is None or self._limiter.hit(self._item, tenant):
            return
        reset_at = self._limiter.get_window_stats(self._item, tenant).reset_time
        wait_seconds = max(1, math.ceil(reset_at - time.time()))
        raise Refusal(429, "rate_limited", "Too many requests, try again later.", {"Retry-After": str(wait_seconds)})
