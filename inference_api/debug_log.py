"""Own the files of the debug modes: what happens to each session, one JSON line an event, and a dying backend's stack.

Written by a gunicorn worker (`frontend-…`) and by the backend (`backend-…`) into the cache root's `debug_logs`, a
folder of mode 0700, in bounded files of mode 0600. Lines hold ids, counts, lengths and times; whoever writes one gives
no text and no token id. A disk that fails later ends the debug log, never the service.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inference_api.config import Settings
from inference_api.errors import SettingError
from inference_api.logs import Value, format_error, utc

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 * 1024 * 1024
"""A fuller file becomes `….1`, in place of an older one."""

MAX_OLD_PROCESSES = 4
"""Files of ended processes that are kept, a side and port."""

MAX_STACK_TRACE_BYTES = 1024 * 1024


def check_debug_folder(settings: Settings) -> None:
    """Make the folder if a debug mode is on; raise SettingError if nothing can be written there."""
    modes = {
        "INFERENCE_API_FRONTEND_DEBUG (FRONTEND_DEBUG_MODE)": settings.frontend_debug,
        "INFERENCE_API_BACKEND_DEBUG (BACKEND_DEBUG_MODE)": settings.backend_debug,
    }
    names = [name for name, on in modes.items() if on]
    if not names:
        return
    folder = settings.debug_logs_path
    trace = _stack_trace_path(folder, settings.port)
    try:
        _make_folder(folder)
        probe = folder / f"probe-{os.getpid()}"
        os.close(_open_private(probe))
        probe.unlink()
        if settings.backend_debug and (trace.is_symlink() or trace.exists()):
            os.close(_open_private(trace))
    except OSError as error:
        where = trace if error.filename == str(trace) else f"into {folder}"
        raise SettingError(
            f"{names[0]}: cannot write {where}: {error.strerror}; choose another INFERENCE_API_CACHE_DIR, or "
            f"switch the debug mode off"
        ) from None


class DebugLog:
    """One process's file of session events. Any thread may write; a line is one write(2)."""

    def __init__(self, folder: Path, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Open `<name>-<pid>.jsonl`; remove the oldest files of ended processes of that name. Raises OSError."""
        _make_folder(folder)
        _remove_oldest(folder, name)
        self.path = folder / f"{name}-{os.getpid()}.jsonl"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._descriptor = _open_private(self.path)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def write(self, event: str, session_id: str, **figures: Value) -> None:
        """Append an event. The first failing write is told of on the log; nothing is written after it."""
        body = {"time": utc(time.time()), "event": event, "session_id": session_id, **figures}
        line = json.dumps(body).encode() + b"\n"
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                if self._num_bytes + len(line) > self._max_bytes:
                    self._turn_over()
                self._num_bytes += os.write(self._descriptor, line)
            except OSError as error:
                self._close()
                logger.warning("the debug log %s is given up: %s", self.path, error.strerror)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            self._close()

    def _turn_over(self) -> None:
        """Begin an empty file; the full one takes the place of the one before it."""
        self.path.replace(self.path.with_name(self.path.name + ".1"))
        os.close(self._descriptor)
        self._descriptor = -1
        self._descriptor = _open_private(self.path)
        self._num_bytes = 0

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StackTrace:
    """The file `stack_trace-<port>`: where a backend was when it died. Removed by a backend that died of nothing.

    A service has a file of its own, for one that ends must not remove the file of another on the same cache root.
    """

    def __init__(self, folder: Path, port: int, *, now: Callable[[], float] = time.time) -> None:
        """Open the service's file and let fatal signals write every thread's frames there. Raises OSError."""
        _make_folder(folder)
        self.path = _stack_trace_path(folder, port)
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size > MAX_STACK_TRACE_BYTES:
                self.path.unlink()
        self._now = now
        self._file = os.fdopen(_open_private(self.path), "ab", buffering=0)
        faulthandler.enable(self._file)

    def write(self, error: BaseException) -> None:
        """Append the time, this process and the exception's frames, without local values."""
        head = f"{utc(self._now())} pid {os.getpid()}\n"
        with contextlib.suppress(OSError):
            self._file.write((head + format_error(error, quote=True) + "\n").encode())

    def expect_step(self, seconds: float) -> None:
        """Append every thread's frames if this is not called again within `seconds`."""
        faulthandler.dump_traceback_later(seconds, file=self._file)

    def close(self) -> None:
        """Point fatal signals at stderr again; remove the file if nothing was written."""
        faulthandler.cancel_dump_traceback_later()
        faulthandler.enable()
        is_empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        if is_empty:
            self.path.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Make the folder of mode 0700; refuse a link, for what it leads to is somebody else's."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link", str(folder))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)


def _open_private(path: Path) -> int:
    """Open a regular file of mode 0600; never waits, as a FIFO would have it (fifo(7))."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def _stack_trace_path(folder: Path, port: int) -> Path:
    return folder / f"stack_trace-{port}"


def _remove_oldest(folder: Path, name: str) -> None:
    """Remove the files of processes that have ended, but for the newest few."""
    pattern = re.compile(re.escape(name) + r"-(\d+)\.jsonl(\.1)?")
    ended: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            ended.setdefault(found[1], []).append(path)
    by_age = sorted(ended.values(), key=lambda paths: max(_modified_at(path) for path in paths))
    for paths in by_age[: max(0, len(by_age) - MAX_OLD_PROCESSES)]:
        for path in paths:
            path.unlink(missing_ok=True)


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed by another worker that starts
        return 0.0
