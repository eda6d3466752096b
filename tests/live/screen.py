"""Show what a terminal would show of a program's output: just enough of one for the live display.

Used by tests. Knows printable text, carriage return, line feed with scrolling, cursor up and erase line (ECMA-48), and
refuses any other control sequence.
"""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(?P<count>\d*)(?P<final>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x00-\x1f]+)")


class Screen:
    """A screen of fixed size; `rows` is its content, without blanks at the ends."""

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self._num_columns = num_columns
        self._cells = [""] * num_rows
        self._row = self._column = 0

    @property
    def rows(self) -> list[str]:
        """The lines on the screen, top to bottom."""
        return [line.rstrip() for line in self._cells]

    def write(self, text: str) -> None:
        """Take in a program's output; raise ValueError for a sequence that is not known."""
        end = 0
        for match in _PART.finditer(text):
            if match.start() != end:
                break
            end = match.end()
            self._apply(match)
        if end != len(text):
            raise ValueError(f"unknown control sequence at {text[end : end + 10]!r}")

    def _apply(self, match: re.Match[str]) -> None:
        if match["final"] == "A":
            self._row = max(0, self._row - int(match["count"] or 1))
        elif match["final"] == "K" and match["count"] == "2":
            self._cells[self._row] = ""
        elif match["final"]:
            raise ValueError(f"unknown control sequence {match[0]!r}")
        elif match["control"] == "\r":
            self._column = 0
        elif match["control"] == "\n":
            self._feed()
        else:
            for character in match["text"]:
                self._put(character)

    def _feed(self) -> None:
        self._row += 1
        if self._row == len(self._cells):
            self._cells = [*self._cells[1:], ""]
            self._row -= 1

    def _put(self, character: str) -> None:
        if self._column == self._num_columns:
            self._column = 0
            self._feed()
        line = self._cells[self._row].ljust(self._column)
        self._cells[self._row] = line[: self._column] + character + line[self._column + 1 :]
        self._column += 1
