"""Write text where a full disk, or a reader that went away, must not stop the one who writes: stderr and stdout.

Used by every process of the package for what it logs and tells its operator. What cannot be written is lost and the
fault is remembered until a write works again. Text goes straight to the descriptor, so that nothing is left in a buffer
whose flush at the process's end would turn its exit status into 120. Knows nothing of what is written.
"""

from __future__ import annotations

import io
import os
from typing import TextIO


class LossyStream(io.TextIOBase):
    """A text stream over another one. Writing blocks as the other would, and never raises."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False
        """Whether the last line was written in part."""
        self.fault = ""
        """What the system said to the last write; empty if that worked."""
        self.num_lost_lines = 0

    def writable(self) -> bool:
        """Say yes."""
        return True

    def isatty(self) -> bool:
        """Tell whether the other stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the other stream's descriptor; raises OSError if it has none."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write all of the text, or lose what is left of it; return its length."""
        try:
            try:
                descriptor = self._stream.fileno()
            except OSError:  # a stream in memory, which a test reads
                self._stream.write(text)
            else:
                self._write(descriptor, text)
        except (OSError, ValueError) as error:  # ValueError: the stream has been closed
            self.fault = getattr(error, "strerror", None) or str(error)
            self.num_lost_lines += text.count("\n") or 1
        else:
            self.fault = ""
        return len(text)

    def flush(self) -> None:
        """Do nothing: nothing is kept."""

    def _write(self, descriptor: int, text: str) -> None:
        # A line that was torn by a full disk ends before the next one begins.
        data = (("\n" if self._is_torn else "") + text).encode("utf-8", "backslashreplace")
        while data:
            num_written = os.write(descriptor, data)
            self._is_torn = data[num_written - 1 : num_written] != b"\n" if num_written < len(data) else False
            data = data[num_written:]
