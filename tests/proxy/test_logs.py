"""Check what the proxy's log lines look like, and that one which cannot be written costs nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys

import pytest

from proxy.logs import JsonFormatter, LineHandler, TextFormatter


def make_record(message: str = "said", *, fault: Exception | None = None) -> logging.LogRecord:
    record = logging.LogRecord("proxy", logging.WARNING, __file__, 1, message, None, None)
    if fault is not None:
        try:
            raise fault
        except Exception:
            record.exc_info = sys.exc_info()
    record.created = 1_700_000_000.25
    record.process = 42
    return record


def test_a_text_line_has_time_level_and_process_and_what_follows_a_line_break_is_indented() -> None:
    assert TextFormatter().format(make_record("one\ntwo")) == (
        "2023-11-14T22:13:20.250Z WARNING proxy[42]: one\n    two"
    )


def test_a_json_line_is_one_object_of_ascii() -> None:
    line = JsonFormatter().format(make_record("é\n\x1b"))
    assert line.isascii() and line.isprintable()
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "process": "proxy",
        "pid": 42,
        "message": "é\n\x1b",
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_ends_with_the_type_and_never_with_the_text(formatter: logging.Formatter) -> None:
    line = formatter.format(make_record(fault=ValueError("canary")))
    assert "ValueError" in line and "test_logs.py" in line and "canary" not in line.replace("ValueError(", "")


def test_a_line_that_was_torn_ends_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    room, written = [3], bytearray()

    def write(_descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        part = data[: room[0]]
        room[0] -= len(part)
        written.extend(part)
        return len(part)

    with open(os.devnull, "wb") as always_ready:
        handler = LineHandler(always_ready.fileno(), logging.Formatter("%(message)s"))
        monkeypatch.setattr(os, "write", write)
        for text, space in (("first", 3), ("lost", 0), ("second", 100), ("third", 100)):
            room[0] = space
            handler.emit(make_record(text))
    assert bytes(written) == b"fir\nsecond\nthird\n"


def test_a_pipe_that_another_process_fills_at_this_moment_holds_up_nobody() -> None:
    reader, writer = os.pipe()
    with (
        open(reader, "rb"),
        open(writer, "wb") as other,
        contextlib.closing(LineHandler(writer, TextFormatter())) as handler,
    ):
        handler._has_room = lambda: True  # as it was when it was asked
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(other.fileno(), bytes(4096))
        os.set_blocking(writer, True)
        handler.emit(make_record("lost"))
        assert handler._num_lost == 1


@pytest.mark.parametrize("size", [200, 3000, 10_000])
def test_a_pipe_that_nobody_reads_holds_up_nobody_and_the_lost_lines_are_counted(size: int) -> None:
    reader, writer = os.pipe()
    with (
        open(reader, "rb") as told,
        open(writer, "wb") as _open,
        contextlib.closing(LineHandler(writer, TextFormatter())) as handler,
    ):
        for _ in range(1000):
            handler.emit(make_record("x" * size))
        os.set_blocking(reader, False)
        num_whole = sum(line.endswith(b"x" * size + b"\n") for line in told.read().splitlines(keepends=True))
        handler.emit(make_record("read again"))
        *_, lost, last = told.read().decode().splitlines()
        assert os.get_blocking(writer), "others write to it as they did"
    assert lost.endswith(f": {1000 - num_whole} lines were lost: nobody read them in time")
    assert last.endswith(": read again")


def test_a_line_that_cannot_be_made_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _descriptor, data: written.append(bytes(data)) or len(data))
    record = make_record("%d")
    record.args = ("canary",)
    LineHandler(2, TextFormatter()).emit(record)
    assert written == [b"a line of proxy could not be written: TypeError\n"]
