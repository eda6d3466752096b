"""Own how every process of this package logs: one handler on stderr, one line a record, as text or as JSON.

Called once at the start of the supervisor, the backend and gunicorn. A value that came from a client cannot forge a
line: control characters are escaped, and what follows a line break is indented. A record may carry `fields`, names
and plain values, which stay numbers in JSON. Knows no request and no file but stderr.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import traceback
from collections.abc import Mapping
from typing import TextIO

from inference_api.config import Settings, colour_wish
from inference_api.lossy_stream import LossyStream

OWN_LOGGERS = ("inference_api", "__main__")
"""Loggers that the level is for; libraries say warnings and errors only, whatever the level."""

MAX_WORD_CHARACTERS = 256
MAX_TRACEBACK_CHARACTERS = 16384

# ISO 6429, Select Graphic Rendition: grey, green, yellow, red.
_COLOURS = {"DEBUG": "\x1b[90m", "INFO": "\x1b[32m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
_RESET = "\x1b[0m"

# C0 and C1 controls and the two separators that some viewers break lines at; a line feed is indented instead.
_CONTROLS = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
    if code != ord("\n")
}

Value = str | int | float | None


def set_up_logging(settings: Settings, process: str, *, quote_errors: bool, stream: TextIO | None = None) -> None:
    """Let this process log on `stream` (stderr) as `settings` say, Python's own warnings included.

    `quote_errors` lets a traceback end with the exception's text; without it the text, which may quote a request, is
    left out.
    """
    out = LossyStream(sys.stderr if stream is None else stream)
    formatter: LineFormatter
    if settings.log_format == "json":
        formatter = JsonFormatter(process, quote_errors=quote_errors)
    else:
        wish = colour_wish()
        colours = out.isatty() if wish is None else wish
        formatter = TextFormatter(process, quote_errors=quote_errors, colours=colours)
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(level)
    logging.captureWarnings(True)


def log_fault() -> str:
    """Return why this process's last log line could not be written; empty if it could."""
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    return next((stream.fault for stream in streams if isinstance(stream, LossyStream) and stream.fault), "")


class LineFormatter(logging.Formatter):
    """Share what both formats are made of: the time in UTC, the process, the traceback."""

    def __init__(self, process: str, *, quote_errors: bool) -> None:
        super().__init__()
        self.process = process
        self._quote_errors = quote_errors

    def traceback_of(self, record: logging.LogRecord) -> str:
        """Return the frames of the record's exception and its type, never a local value; empty without one."""
        if not record.exc_info or record.exc_info[1] is None:
            return ""
        return format_error(record.exc_info[1], quote=self._quote_errors)


class TextFormatter(LineFormatter):
    """`2026-01-31T12:00:00.000Z WARNING server[42]: message name=value`; the level is coloured on a terminal."""

    def __init__(self, process: str, *, quote_errors: bool, colours: bool) -> None:
        super().__init__(process, quote_errors=quote_errors)
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line; a traceback follows it, indented."""
        level = record.levelname
        if self._colours:
            level = f"{_COLOURS.get(level, '')}{level}{_RESET}"
        words = [f"{name}={word(value)}" for name, value in _fields(record).items()]
        text = " ".join([record.getMessage(), *words])
        trace = self.traceback_of(record)
        if trace:
            text = f"{text}\n{trace}"
        return f"{utc(record.created)} {level} {self.process}[{record.process}]: {printable(text)}"


class JsonFormatter(LineFormatter):
    """One JSON object a line, ASCII only: time, level, process, pid, message, then the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON; what is unknown is null, what is a number stays one."""
        body: dict[str, Value] = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "process": self.process,
            "pid": record.process,
            "message": record.getMessage(),
            **_fields(record),
        }
        trace = self.traceback_of(record)
        if trace:
            body["traceback"] = trace
        return json.dumps(body)


def format_error(error: BaseException, *, quote: bool) -> str:
    """Return an exception's frames and type without local values; its own text too, and its causes, if `quote`."""
    if quote:
        text = "".join(traceback.format_exception(error))
    else:
        text = "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
    return text.rstrip("\n")[-MAX_TRACEBACK_CHARACTERS:]


def utc(unix_seconds: float) -> str:
    """Return a time as RFC 3339 writes it, in milliseconds."""
    moment = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def printable(text: str) -> str:
    """Escape control characters, and indent every line but the first: no text looks like another line."""
    return text.translate(_CONTROLS).replace("\n", "\n    ")


def word(value: Value) -> str:
    """Return a value as one printable ASCII word of bounded length, `-` for nothing: it cannot forge a field."""
    if not isinstance(value, str):
        return "-" if value is None else str(value)
    escaped = value.encode("unicode_escape").decode("ascii").replace(" ", "\\x20").replace("=", "\\x3d")
    return escaped[:MAX_WORD_CHARACTERS] or "-"


def _fields(record: logging.LogRecord) -> Mapping[str, Value]:
    fields: Mapping[str, Value] = getattr(record, "fields", {})
    return fields
