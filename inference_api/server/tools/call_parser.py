"""Read a model's calls out of its text as it comes: what it says, which function it calls, and with what, in pieces.

Runs in PROCESS 1, in the request's own thread; pure. Nothing is lost: what looks like a call and is none is text. The
arguments go on as the model writes them, without waiting for their end. Knows no API's words for any of it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence

from inference_api.server.tools.formats import CallFormat

MAX_HEAD_CHARS = 4096
"""Longest beginning of a call, up to its arguments, that is waited for."""

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_OPENING = re.compile(r"\s*\[")
_DECODER = json.JSONDecoder()


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """Text that belongs to no call."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
    """The beginning of the call number `index`."""

    index: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Argued:
    """The next piece of a call's arguments: an object as the model writes it, whole unless the answer was cut off."""

    index: int
    text: str


Heard = Said | Called | Argued


class CallParser:
    """Read one answer. `feed` its text in any pieces, then `finish`."""

    def __init__(self, formats: Sequence[CallFormat]) -> None:
        """`formats` are those that a call may come in; one without a beginning is the whole answer's."""
        self._formats = formats
        self._marked = [one for one in formats if one.begin]
        self._format = formats[0]
        self._read: Callable[[], bool] = self._read_text
        self._buffer = ""
        self._opened = ""  # what was taken for the beginning of a call: text again if none follows
        self._heard: list[Heard] = []
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.num_calls = 0
        """Calls that have begun so far."""
        if not formats[0].begin:
            self._read = self._read_head

    def feed(self, text: str) -> list[Heard]:
        """Take the next text; return what it made sure of."""
        self._buffer += text
        self._read_on()
        return self._take()

    def finish(self) -> list[Heard]:
        """Return what was still waited for, once the answer has ended."""
        while self._read in (self._read_list, self._read_head):
            self._give_up()
            self._read_on()
        self._say(self._before(self._buffer))
        self._buffer = ""
        return self._take()

    def _read_on(self) -> None:
        while self._read():
            pass

    def _take(self) -> list[Heard]:
        heard, self._heard = self._heard, []
        return heard

    def _say(self, text: str) -> None:
        # Blanks between calls, and behind the last one, say nothing.
        if text and (not self.num_calls or text.strip()):
            self._heard.append(Said(text))

    def _read_text(self) -> bool:
        """Say what cannot be the beginning of a call; go on with a call where one begins."""
        found = [(at, one) for one in self._marked if (at := self._buffer.find(one.begin)) >= 0]
        if found:
            at, self._format = min(found, key=lambda pair: pair[0])
            said = self._before(self._buffer[:at])
            self._say(said)
            self._open(at + len(self._format.begin), since=len(said))
            self._read = self._read_list if self._format.is_list else self._read_head
            return True
        num_held = max((_overlap(self._buffer, one.begin) for one in self._marked), default=0)
        free = self._before(self._buffer[: len(self._buffer) - num_held])
        self._say(free)
        self._buffer = self._buffer[len(free) :]
        return False

    def _open(self, end: int, since: int = 0) -> None:
        """Take the buffer up to `end` for the beginning of a call, of which all since `since` is not said yet."""
        self._opened += self._buffer[since:end]
        self._buffer = self._buffer[end:]

    def _before(self, text: str) -> str:
        """Return what may be said of a text that a call, or the end, may follow."""
        return text.rstrip() if self.num_calls else text

    def _read_list(self) -> bool:
        opening = _OPENING.match(self._buffer)
        if opening is None:
            return self._give_up() if self._buffer.strip() else False
        self._open(opening.end())
        self._read = self._read_head
        return True

    def _read_head(self) -> bool:
        """Wait for a call's name, up to where its arguments begin, or for a whole call in another order."""
        head = _HEAD.match(self._buffer)
        if head is not None and (name := _string(head[1])) is not None:
            self._call(name)
            self._buffer = self._buffer[head.end() :]
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self._read = self._read_arguments
            return True
        value, end = _first_value(self._buffer)
        if end:
            return self._read_whole(value, end) or self._give_up()
        if self._format.end and self._format.end in self._buffer:
            return self._give_up()
        return self._give_up() if len(self._buffer) > MAX_HEAD_CHARS else False

    def _give_up(self) -> bool:
        """Take for text what looked like the beginning of a call; what follows it may hold another one."""
        self._say(self._opened)
        self._opened = ""
        self._read = self._read_text
        return True

    def _read_whole(self, call: object, end: int) -> bool:
        """Take a call whose members stand in another order, or that has no arguments; False if it is none."""
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        argued = arguments if isinstance(arguments, str) else json.dumps(arguments)
        if not is_object(argued):
            return False
        self._call(call["name"])
        self._argue(argued)
        self._buffer = self._buffer[end:]
        self._read = self._read_mark
        return True

    def _read_arguments(self) -> bool:
        """Pass the arguments on up to the end of their object."""
        for place, char in enumerate(self._buffer, start=1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if self._depth == 0:
                    self._argue(self._buffer[:place])
                    self._buffer = self._buffer[place:]
                    self._read = self._read_brace
                    return True
        self._argue(self._buffer)
        self._buffer = ""
        return False

    def _read_brace(self) -> bool:
        """Skip the brace that closes a call, if it is there."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == "}":
            self._buffer = rest[1:]
        self._read = self._read_mark
        return True

    def _read_mark(self) -> bool:
        """Skip the mark behind a call, if it is there; all else is text again, or the next call."""
        rest = self._buffer.lstrip()
        marks = (",", "]") if self._format.is_list else (self._format.end,) if self._format.end else ()
        mark = next((mark for mark in marks if rest.startswith(mark)), None)
        if mark is None and any(mark.startswith(rest) for mark in marks):
            return False
        if mark == ",":
            self._open(len(self._buffer) - len(rest) + len(mark))
            self._read = self._read_head
            return True
        if mark is not None:
            self._buffer = rest[len(mark) :]
        self._read = self._read_text
        return True

    def _call(self, name: str) -> None:
        self._opened = ""
        self._heard.append(Called(self.num_calls, name))
        self.num_calls += 1

    def _argue(self, text: str) -> None:
        if text:
            self._heard.append(Argued(self.num_calls - 1, text))


def _overlap(text: str, mark: str) -> int:
    """Return how many of the last characters may be the beginning of `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def is_object(text: str) -> bool:
    """Tell whether a text is a JSON object, as a call's arguments have to be."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):  # a model may nest as deeply as it likes
        return False


def _first_value(text: str) -> tuple[object, int]:
    """Return the JSON value that a text begins with, and where it ends; (None, 0) if there is no whole one."""
    try:
        return _DECODER.raw_decode(text, len(text) - len(text.lstrip()))
    except (ValueError, RecursionError):
        return None, 0


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
