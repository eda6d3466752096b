"""Own the chunks of a streamed answer on their way through: check each one's framing and pass it on as it is.

Pure: bytes in at any split, bytes out that are whole chunks again (RFC 9112 section 7.1). An id's chunk leaves as the
chunk that it was, and those that arrived together leave together; of one that arrives in parts each part leaves as a
chunk, so that nothing waits. It does not know sockets or what a chunk holds. Chunk extensions and trailers, which the
server never sends, are faults: nothing unknown is passed on.
"""

from __future__ import annotations

import re

_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
_MAX_SIZE_LINE_BYTES = 8 + len(b"\r\n")


class ChunkFault(ValueError):
    """Tell that the bytes are not chunks, or that they ended in the middle of one."""


class FramedBytes(bytes):
    """Whole chunks, framing included: to be written as they are."""


class ChunkRelay:
    """Follow one chunked body. `ended` is set by the last chunk, which is not passed on: the writer ends the answer."""

    def __init__(self) -> None:
        self._held = b""
        self.ended = False

    def feed(self, data: bytes) -> FramedBytes:
        """Return what has come as whole chunks, b"" if it is no byte of a body; raise ChunkFault for no chunks."""
        if self.ended:
            raise ChunkFault("bytes after the last chunk")
        held = self._held + data if self._held else data
        end = self._scan(held)
        self._held = held[end:]
        return FramedBytes(held[:end] + self._split_held() if self._held else held[:end])

    def _scan(self, held: bytes) -> int:
        """Return where the last whole chunk ends."""
        position = 0
        while (line_end := held.find(b"\r\n", position, position + _MAX_SIZE_LINE_BYTES)) >= 0:
            if _SIZE.fullmatch(held, position, line_end) is None:
                raise ChunkFault("not a chunk size")
            size = int(held[position:line_end], 16)
            end = line_end + 2 + size + 2
            if len(held) < end:
                return position
            if held[end - 2 : end] != b"\r\n":
                raise ChunkFault("a chunk is longer than its size")
            if size == 0:
                self.ended = True
                if len(held) > end:
                    raise ChunkFault("bytes after the last chunk")
                return position
            position = end
        if len(held) - position >= _MAX_SIZE_LINE_BYTES:
            raise ChunkFault("not a chunk size")
        return position

    def _split_held(self) -> bytes:
        """Return what has come of a chunk as a chunk of its own; the rest will be another."""
        size_line, _, payload = self._held.partition(b"\r\n")
        num_missing = int(size_line, 16) - len(payload) if payload else 0
        if num_missing <= 0:  # no byte of it has come, or nothing but its end is missing
            return b""
        self._held = b"%x\r\n" % num_missing
        return b"%x\r\n%b\r\n" % (len(payload), payload)
