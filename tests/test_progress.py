"""Check what long work tells: plain lines into a file, one line that is written over on a terminal."""

from __future__ import annotations

import io
import threading

from inference_api.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and tells when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        self.written.set()
        return written


def test_into_a_file_each_stage_is_a_plain_line_with_the_seconds_since_the_start() -> None:
    times = iter([10.0, 10.0, 12.34, 15.0])
    out = io.StringIO()
    with Progress("prepare", out, lambda: next(times)) as progress:
        progress.stage("fetching")
        progress.stage("converting")
        progress.finish("ready")
    assert out.getvalue() == "prepare: fetching, 0.0 s\nprepare: converting, 2.3 s\nprepare: ready, 5.0 s\n"


def test_on_a_terminal_one_line_is_written_over_and_counts_by_itself() -> None:
    seconds = [0.0]
    out = Terminal()
    with Progress("prepare", out, lambda: seconds[0]) as progress:
        progress.stage("fetching")
        out.written.clear()
        seconds[0] = 1.5
        assert out.written.wait(5.0), "the line is not kept up to date"
        progress.stage("converting")
        progress.finish("ready")
    text = out.getvalue()
    assert "\r\x1b[Kprepare: fetching, 0.0 s" in text and "\r\x1b[Kprepare: fetching, 1.5 s" in text
    assert text.endswith("\r\x1b[Kprepare: converting, 1.5 s\r\x1b[Kprepare: ready, 1.5 s\n")
    assert text.count("\n") == 1
    assert "\x1b[3" not in text, "no colours"


def test_work_that_fails_leaves_a_clean_line_and_no_thread() -> None:
    out = Terminal()
    with Progress("prepare", out) as progress:
        progress.stage("fetching")
    assert out.getvalue().endswith("\r\x1b[K")
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_work_that_needed_nothing_says_nothing() -> None:
    out = io.StringIO()
    with Progress("prepare", out) as progress:
        progress.finish("ready")
    assert out.getvalue() == ""
