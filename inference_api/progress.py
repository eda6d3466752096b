"""Tell a person how far long work is: plain lines with seconds, or on a terminal one line that is written over.

Used by `prepare` and by the supervisor, whose backend reports the stages of its start. No colours, no percentages that
nobody can know. Holds one thread while a stage is shown on a terminal. Knows nothing of what the stages do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from inference_api.lossy_stream import LossyStream

TICK_SECONDS = 0.5
_CLEAR_LINE = "\r\x1b[K"  # ECMA-48: carriage return, then EL, erase to the end of the line


class Progress:
    """Show the stages of one piece of work on `out`; a context manager, whose end leaves no half-written line."""

    def __init__(self, name: str, out: TextIO | LossyStream, now: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._out = out
        self._now = now
        self._began = now()
        self._on_terminal = out.isatty()
        self._stage = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def stage(self, text: str) -> None:
        """Say what begins now: a line of its own, or on a terminal in place of the stage before."""
        with self._lock:
            self._stage = text
        self._write()
        if self._on_terminal and self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._thread.start()

    def finish(self, text: str) -> None:
        """Say that all is done, if a stage was told at all: work that needed nothing says nothing."""
        if self._stage:
            self.clear()
            self._out.write(f"{self._line(text)}\n")
            self._out.flush()

    def clear(self) -> None:
        """Take the line off a terminal, so that others can write there; blocks for a moment at most."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._out.write(_CLEAR_LINE)
        self._out.flush()

    def _tick(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self._write()

    def _write(self) -> None:
        with self._lock:
            line = self._line(self._stage)
            self._out.write(f"{_CLEAR_LINE}{line}" if self._on_terminal else f"{line}\n")
            self._out.flush()

    def _line(self, text: str) -> str:
        return f"{self._name}: {text}, {self._now() - self._began:.1f} s"
