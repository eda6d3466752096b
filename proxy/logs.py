"""Own what the proxy writes: its log on stderr and its lines on stdout, as text or as one JSON object a line.

Runs in PROCESS 3, set up before gunicorn forks the worker, which inherits it. A line goes straight to its descriptor,
and one that cannot be written is lost: a full disk, or a reader that is gone, ends neither a start nor a request. It
does not know what a record says; a traceback ends with the exception's type, for its text may quote a request.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import select
import stat
import traceback
from typing import Any

from gunicorn.glogging import Logger

START_LOGGER = "proxy.start"
TRANSACTION_LOGGER = "proxy.transaction"
_STDOUT_DESCRIPTOR, _STDERR_DESCRIPTOR = 1, 2


def set_up_logging(log_format: str) -> None:
    """Let this process log on stderr, and start and transactions on stdout, as `text` or as `json`."""
    is_json = log_format == "json"
    root = logging.getLogger()
    root.handlers[:] = [LineHandler(_STDERR_DESCRIPTOR, JsonFormatter() if is_json else TextFormatter())]
    root.setLevel(logging.WARNING)
    to_stdout = LineHandler(_STDOUT_DESCRIPTOR, JsonFormatter() if is_json else logging.Formatter("%(message)s"))
    for name in (START_LOGGER, TRANSACTION_LOGGER):
        logger = logging.getLogger(name)
        logger.handlers[:] = [to_stdout]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    # It warns of an answer's head that it cannot read, and quotes the URL, query included.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    logging.captureWarnings(True)


class LineHandler(logging.Handler):
    """Write each record as a line of its own to a descriptor, or lose it: a reader that does not read holds up nobody.

    How many were lost is told once there is room again.
    """

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        """Take where to and how to write; the descriptor stays open as long as this."""
        super().__init__()
        self.setFormatter(formatter)
        self._own_descriptor = _open_again(descriptor)
        self._descriptor = descriptor if self._own_descriptor is None else self._own_descriptor
        self._room = select.poll()
        self._room.register(self._descriptor, select.POLLOUT)
        self._is_torn = False
        self._num_lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line; one that a full disk or a full pipe has torn ends before the next begins."""
        try:
            line = self.format(record)
        except Exception as fault:  # of a library's own words: no reason to end a request
            line = f"a line of {record.name} could not be written: {type(fault).__name__}"
        if self._num_lost and self._has_room():
            lost = {**record.__dict__, "msg": "%d lines were lost: nobody read them in time", "args": (self._num_lost,)}
            lost |= {"levelno": logging.WARNING, "levelname": "WARNING", "exc_info": None, "fields": {}}
            self._num_lost = 0
            self._write(self.format(logging.makeLogRecord(lost)))
        self._write(line)

    def close(self) -> None:
        """Close what was opened here, and not what was given."""
        super().close()
        if self._own_descriptor is not None:
            os.close(self._own_descriptor)
            self._own_descriptor = None

    def _write(self, line: str) -> None:
        text = ("\n" if self._is_torn else "") + line + "\n"
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            # So much a pipe takes at once where it takes anything (pipe(7)).
            while data and self._has_room() and (num_written := self._write_some(data[: select.PIPE_BUF])):
                data = data[num_written:]
                self._is_torn = bool(data)
            self._num_lost += bool(data)

    def _write_some(self, data: bytes) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another process has just filled the pipe
            return 0

    def _has_room(self) -> bool:
        return bool(self._room.poll(0))


def _open_again(descriptor: int) -> int | None:
    """Open a pipe anew, without waits; None for anything else, and where that cannot be.

    Other processes write to it and may fill it at any time. The descriptor itself is shared with them, waits included.
    """
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return None
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING proxy[42]: message`; what follows a line break is indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line and its traceback."""
        text = "\n".join(filter(None, [record.getMessage(), _traceback(record)])).replace("\n", "\n    ")
        return f"{_utc(record.created)} {record.levelname} proxy[{record.process}]: {text}"


class JsonFormatter(logging.Formatter):
    """One object of ASCII: time, level, process, pid, message, then the record's `fields`; numbers stay numbers."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; what is unknown is null."""
        body: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "process": "proxy",
            "pid": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        trace = _traceback(record)
        return json.dumps({**body, "traceback": trace} if trace else body)


class GunicornLog(Logger):  # type: ignore[misc]  # gunicorn has no types
    """gunicorn's logger, without a handler and a format of its own."""

    def setup(self, cfg: Any) -> None:
        """Let what gunicorn says go the way of the rest."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


def _traceback(record: logging.LogRecord) -> str:
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    fault = record.exc_info[1]
    return "".join(traceback.format_tb(fault.__traceback__)) + type(fault).__name__


def _utc(unix_seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(unix_seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
