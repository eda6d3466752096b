"""Check what the proxy's worker answers when a request did not reach the app."""

from __future__ import annotations

from gevent import GreenletExit

from proxy.worker import _refusal_for


def test_a_request_that_outlives_the_grace_is_told_when_to_come_again() -> None:
    refusal = _refusal_for(GreenletExit())
    assert (refusal.status, refusal.code, refusal.headers) == (503, "stopping", {"Retry-After": "1"})
