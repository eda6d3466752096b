"""Check the request window by tenant."""

from __future__ import annotations

import pytest

from proxy.answers import Refusal
from proxy.limits import RequestWindow


def test_a_full_window_refuses_its_tenant_alone_and_says_when() -> None:
    window = RequestWindow(2)
    window.take("a")
    window.take("a")
    with pytest.raises(Refusal) as caught:
        window.take("a")
    assert caught.value.status == 429
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 61
    window.take("b")


def test_a_window_of_zero_counts_nothing() -> None:
    window = RequestWindow(0)
    for _ in range(100):
        window.take("a")
