"""Own the watching of settings files: what was read last stays in force until the file says something new and right.

Runs in the proxy's worker; `watch_files` is a greenlet that looks every 2 s, beside the requests. inotify is not in the
standard library and misses what network and overlay file systems change; a stat sees all of it. It does not know what a
file means: `read` turns bytes into a value and raises ValueError, naming the file, for what must not come into force.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar, cast

import gevent
from gevent.event import Event

from proxy.located_json import FileFault

WATCH_SECONDS = 2.0
MAX_FILE_BYTES = 4 * 1024 * 1024
# A parser in Python takes about a microsecond a byte: the loop can wait for less than this.
_MAX_INLINE_BYTES = 8192
# Two writes within a tick of the file system's clock have one time: what is younger than this is read again.
_UNSETTLED_SECONDS = 2.0

Value = TypeVar("Value")
_Stamp = tuple[int, int, int, int]


class WatchedFile(Generic[Value]):
    """Hold what a file says; `value` is replaced as a whole, so that nobody sees half of a change."""

    def __init__(
        self,
        path: str | Path,
        read: Callable[[bytes], Value],
        on_change: Callable[[Value], None] | None = None,
        now: Callable[[], float] = time.time,
        *,
        is_pure: bool = False,
    ) -> None:
        """Read the file (blocking); raise OSError if that cannot be, FileFault for no file, ValueError as `read` does.

        `is_pure` says that `read` touches nothing but its argument: a large file is then read anew in a thread.
        `on_change` is called with each value after this first one; `now` gives Unix seconds, as file times are.
        """
        self._path = Path(path)
        self._read = read
        self._on_change = on_change
        self._now = now
        self._is_pure = is_pure
        self._stamp = self._take_stamp()
        self._raw = read_bounded(self._path)
        self._told: str | None = None
        self.value: Value = read(self._raw)

    def refresh(self) -> bool:
        """Take over what the file says by now; return whether that is a new value.

        Blocks for one small read, where `read` is pure; the calling greenlet alone waits for more.
        A file that is wrong or gone changes nothing and raises nothing; the log tells of it once.
        """
        try:
            stamp = self._take_stamp()
            if stamp is not None and stamp == self._stamp:
                return False
            raw = read_bounded(self._path)
            self._stamp = stamp
            is_new = raw != self._raw
            value = self._read_anew(raw) if is_new else self.value
        except OSError as fault:
            self._tell_once(f"{self._path}: cannot be read ({fault.strerror})")
            return False
        except ValueError as fault:
            self._tell_once(str(fault))
            return False
        self._raw, self._told, self.value = raw, None, value
        if is_new:
            logging.getLogger("proxy").warning("%s: the new text is in force", self._path)
            if self._on_change is not None:
                self._on_change(value)
        return is_new

    def look_again(self) -> None:
        """Read the file at the next refresh even if it looks as it did, for what else its meaning depends on."""
        self._stamp = None

    def _read_anew(self, raw: bytes) -> Value:
        if not self._is_pure or len(raw) <= _MAX_INLINE_BYTES:
            return self._read(raw)

        def attempt() -> tuple[Value | None, Exception | None]:
            # A fault is carried as a value: gevent would write it, with its text, to stderr.
            try:
                return self._read(raw), None
            except Exception as fault:
                return None, fault

        value, fault = gevent.get_hub().threadpool.apply(attempt)
        if fault is not None:
            raise fault
        return cast(Value, value)

    def _take_stamp(self) -> _Stamp | None:
        """Return what changes with the file; None while it is too young for that to be sure."""
        found = os.stat(self._path)
        if abs(self._now() - found.st_mtime) < _UNSETTLED_SECONDS:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def _tell_once(self, fault: str) -> None:
        if fault != self._told:
            self._told = fault
            logging.getLogger("proxy").warning("%s; what was read before stays in force", fault)


def read_bounded(path: Path) -> bytes:
    """Read a regular file whole (blocking); raise OSError, or FileFault when it is none or over MAX_FILE_BYTES."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileFault(f"{path}: is not a regular file")
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise FileFault(f"{path}: is larger than {MAX_FILE_BYTES} bytes")
    return raw


class Refreshed(Protocol):
    """What is looked at every few seconds: a file, keys that are published, Redis."""

    def refresh(self) -> bool:
        """Take over what is new; say whether anything was."""


def watch_files(group: Sequence[Refreshed]) -> gevent.Greenlet:
    """Look at all of a group every 2 s in a greenlet of its own, until that is killed or the process ends."""

    never = Event()

    def watch() -> None:
        while not never.wait(WATCH_SECONDS):
            for refreshed in group:
                refresh_safely(refreshed)

    return gevent.spawn(watch)


def refresh_safely(refreshed: Refreshed) -> None:
    """Refresh one of a group; a defect of it is logged and must not end the watching of the others."""
    try:
        refreshed.refresh()
    except Exception as fault:
        # The type alone: the text may quote a file, which may hold a key.
        logging.getLogger("proxy").error("what is refreshed every few seconds was not: %s", type(fault).__name__)
