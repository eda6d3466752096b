"""Check that a thread that dies by surprise is told of, and that one that ends is not."""

from __future__ import annotations

import logging
import threading

import pytest

from inference_api.threads import vital_thread


def _run(body) -> bool:
    died = threading.Event()
    thread = vital_thread("reader", body, died.set)
    thread.start()
    thread.join()
    return died.is_set()


def test_a_thread_that_raises_is_told_of_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        raise KeyError("surprise")

    with caplog.at_level(logging.ERROR):
        assert _run(body)
    assert "the thread reader died" in caplog.text


def test_a_thread_that_ends_is_no_death() -> None:
    assert not _run(lambda: None)
