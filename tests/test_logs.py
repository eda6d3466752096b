"""Check a log line in both formats: its parts, its numbers, its colours, and that no value can forge a line."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_api.config import Settings
from inference_api.logs import (
    MAX_TRACEBACK_CHARACTERS,
    OWN_LOGGERS,
    JsonFormatter,
    TextFormatter,
    printable,
    set_up_logging,
    utc,
    word,
)

ROOT = Path(__file__).resolve().parent.parent


def make_record(message: str = "hello", level: int = logging.WARNING, **fields: object) -> logging.LogRecord:
    record = logging.LogRecord("inference_api.x", level, __file__, 1, message, None, None)
    record.created, record.process = 1_700_000_000.25, 42
    if fields:
        record.fields = fields
    return record


def failed_record(error: BaseException) -> logging.LogRecord:
    record = make_record("it broke")
    try:
        raise error
    except type(error) as caught:
        record.exc_info = (type(caught), caught, caught.__traceback__)
    return record


def text_of(record: logging.LogRecord, *, colours: bool = False, quote_errors: bool = False) -> str:
    return TextFormatter("server", quote_errors=quote_errors, colours=colours).format(record)


def json_of(record: logging.LogRecord, *, quote_errors: bool = False) -> dict[str, object]:
    line = JsonFormatter("server", quote_errors=quote_errors).format(record)
    assert line.isascii() and line.isprintable()
    body: dict[str, object] = json.loads(line)
    return body


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """Give the loggers back as they were."""
    loggers = [logging.getLogger(name) for name in ("", *OWN_LOGGERS)]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_a_line_has_time_level_process_message_and_fields() -> None:
    record = make_record("request", path="/a b", row=3, queue_ms=0.5, tenant=None)
    line = "2023-11-14T22:13:20.250Z WARNING server[42]: request path=/a\\x20b row=3 queue_ms=0.5 tenant=-"
    assert text_of(record) == line


def test_a_json_line_has_the_same_names_and_numbers_stay_numbers() -> None:
    assert json_of(make_record("request", path="/a b", row=3, queue_ms=0.5, tenant=None)) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "process": "server",
        "pid": 42,
        "message": "request",
        "path": "/a b",
        "row": 3,
        "queue_ms": 0.5,
        "tenant": None,
    }


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"])
def test_only_the_level_is_coloured_and_only_if_asked(level: str) -> None:
    record = make_record(level=logging.getLevelNamesMapping()[level])
    assert re.search(rf"Z \x1b\[\d+m{level}\x1b\[0m server", text_of(record, colours=True))
    assert "\x1b" not in text_of(record)


def test_a_message_cannot_forge_a_line_or_a_terminal_code() -> None:
    text = text_of(make_record("a\n2023-11-14T22:13:20.250Z ERROR server[42]: forged\r\x1b[2J\x9b2J\u2028x"))
    assert text.count("\n") == 1 and "\n    2023" in text
    assert text.endswith("forged\\x0d\\x1b[2J\\x9b2J\\u2028x")


@given(st.text())
def test_printable_text_has_no_control_but_an_indented_line_feed(text: str) -> None:
    shown = printable(text)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", shown)
    assert shown.count("\n") == shown.count("\n    ")


@given(st.text())
def test_a_word_is_printable_ascii_of_bounded_length_without_blanks(text: str) -> None:
    shown = word(text)
    assert shown.isascii() and shown.isprintable() and not {" ", "="} & set(shown) and 0 < len(shown) <= 256


def test_a_traceback_is_indented_and_leaves_the_exceptions_text_out() -> None:
    record = failed_record(ValueError("the prompt\nERROR forged"))
    for text in (text_of(record), str(json_of(record)["traceback"])):
        assert "ValueError" in text and "failed_record" in text and "the prompt" not in text
    assert all(line.startswith("    ") for line in text_of(record).splitlines()[1:])


def test_where_no_text_of_a_request_comes_an_exception_is_quoted_within_bounds() -> None:
    record = failed_record(ValueError("x" * 2 * MAX_TRACEBACK_CHARACTERS))
    assert len(str(json_of(record, quote_errors=True)["traceback"])) == MAX_TRACEBACK_CHARACTERS
    assert text_of(failed_record(ValueError("9 MiB are short")), quote_errors=True).endswith(
        "ValueError: 9 MiB are short"
    )


def test_times_are_utc_in_milliseconds() -> None:
    assert utc(0.0019) == "1970-01-01T00:00:00.001Z"


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize(
    ("level", "own", "library"),
    [
        ("debug", ["DEBUG", "INFO", "WARNING", "ERROR"], ["WARNING", "ERROR"]),
        ("info", ["INFO", "WARNING", "ERROR"], ["WARNING", "ERROR"]),
        ("warning", ["WARNING", "ERROR"], ["WARNING", "ERROR"]),
        ("error", ["ERROR"], ["ERROR"]),
    ],
)
def test_the_level_is_for_our_own_loggers_and_libraries_stay_quiet(
    level: str, own: list[str], library: list[str]
) -> None:
    out = io.StringIO()
    set_up_logging(Settings(log_level=level), "server", quote_errors=False, stream=out)
    for name in ("inference_api.server.app", "__main__", "a_library"):
        for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(number, "from %s", name)
    said = [(line.split()[-1], line.split()[1]) for line in out.getvalue().splitlines()]
    assert [level for name, level in said if name == "a_library"] == library
    assert [level for name, level in said if name == "__main__"] == own
    assert [level for name, level in said if name.endswith("app")] == own


@pytest.mark.usefixtures("restored_logging")
def test_pythons_warnings_are_lines_too_and_a_second_set_up_adds_no_handler() -> None:
    out = io.StringIO()
    for _ in range(2):
        set_up_logging(Settings(log_format="json"), "backend", quote_errors=True, stream=out)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old news", UserWarning, stacklevel=1)
    (line,) = out.getvalue().splitlines()
    body = json.loads(line)
    assert body["level"] == "warning" and "UserWarning: old news" in body["message"]


PROGRAM = """
import logging
from inference_api.config import Settings
from inference_api.logs import set_up_logging
set_up_logging(Settings(), "server", quote_errors=False)
logging.getLogger("inference_api").warning("hello")
"""


def said_on_a_terminal(**environ: str) -> str:
    """Return what a process logs whose stderr is a terminal."""
    ours, theirs = pty.openpty()
    wishes = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    try:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=theirs, check=True, cwd=ROOT, env={**wishes, **environ})
        return os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)


def said_in_a_pipe(**environ: str) -> str:
    wishes = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, check=True, cwd=ROOT, env={**wishes, **environ}
    )
    return run.stderr.decode()


def test_colours_come_on_a_terminal_alone_unless_the_user_wishes_otherwise() -> None:
    assert "\x1b[33mWARNING\x1b[0m" in said_on_a_terminal()
    assert "\x1b" not in said_in_a_pipe()
    assert "\x1b" not in said_on_a_terminal(NO_COLOR="1", FORCE_COLOR="1")
    assert "\x1b[33mWARNING\x1b[0m" in said_in_a_pipe(FORCE_COLOR="1")
