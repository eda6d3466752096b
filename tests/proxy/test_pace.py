"""Check how long a client may still take, with times given."""

from __future__ import annotations

from proxy.pace import Pace, PaceRule


def test_the_total_time_is_never_extended() -> None:
    pace = Pace(PaceRule(10), started=100)
    assert pace.remaining(100) == 10
    pace.num_bytes = 10**6
    assert pace.remaining(109) == 1
    assert pace.remaining(111) == -1


def test_bytes_earn_time_after_the_grace_up_to_the_total() -> None:
    pace = Pace(PaceRule(30, min_bytes_per_second=1024, grace_seconds=5), started=0)
    assert pace.remaining(4) == 1
    pace.num_bytes = 2048
    assert pace.remaining(4) == 3
    pace.num_bytes = 2**30
    assert pace.remaining(4) == 26
