"""Own the reading of a settings file in JSON: strict, and every fault names its line and its member.

Pure; it takes bytes and knows no file, no setting and no meaning. Duplicate member names, a byte order mark, numbers
that are not finite, lone surrogates and deep nesting are refused: two readers of such a text could disagree. No message
repeats a value, which may be a key.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any

MemberPath = tuple[str | int, ...]

_MAX_DEPTH = 16
_MAX_NUMBER_CHARACTERS = 32
# Used for strings alone: it knows where they end and what an escape means.
_DECODER = JSONDecoder(strict=True)
_BLANK = re.compile(r"[ \t\r\n]*")
# RFC 8259 section 6, and the three literal names of section 3.
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?P<fraction>(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_LITERALS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_SHOWN_NAME = re.compile(r"[\x21-\x7e]{1,64}")


class MemberFault(ValueError):
    """Refuse a member of a settings file: where it is, and what is wrong with it, never its value."""

    def __init__(self, what: str, path: MemberPath = ()) -> None:
        super().__init__(f"{dotted(path)}: {what}" if path else what)
        self.path = path


class FileFault(ValueError):
    """Refuse a settings file; the message is `file:line: member: what`."""


@dataclass(frozen=True, slots=True)
class LocatedJson:
    """Hold a parsed value and the line on which each of its members begins."""

    value: Any
    lines: Mapping[MemberPath, int]

    def line_of(self, path: MemberPath) -> int:
        """Return the line of a member, or of the nearest one around it for a member that is missing."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def fault(self, file: str, fault: MemberFault) -> FileFault:
        """Say in one line where in the file a member is wrong, and how."""
        return FileFault(f"{file}:{self.line_of(fault.path)}: {fault}")


def parse_located(raw: bytes, file: str) -> LocatedJson:
    """Parse one JSON text (RFC 8259); raise FileFault, which begins with the name of the file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise FileFault(f"{file}:{line}: is not UTF-8") from None
    scanner = _Scanner(text)
    try:
        value, end = scanner.scan(0, ())
        scanner.expect_end(end)
    except _SyntaxFault as fault:
        raise FileFault(f"{file}:{scanner.line_at(fault.position)}: {fault.fault}") from None
    return LocatedJson(value, scanner.lines)


def dotted(path: MemberPath) -> str:
    """Write a path as one word, such as `keys.a.alg` or `keys[0].kid`; a name that is no plain word becomes `?`."""
    shown = ""
    for part in path:
        if isinstance(part, int):
            shown += f"[{part}]"
        else:
            shown += ("." if shown else "") + (part if _SHOWN_NAME.fullmatch(part) else "?")
    return shown


class _SyntaxFault(Exception):
    def __init__(self, what: str, position: int, path: MemberPath) -> None:
        super().__init__(what)
        self.fault = MemberFault(what, path)
        self.position = position


class _Scanner:
    """Read one text from left to right; the positions of members become lines."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line_ends = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[MemberPath, int] = {}

    def line_at(self, position: int) -> int:
        return bisect.bisect_left(self._line_ends, position) + 1

    def scan(self, at: int, path: MemberPath) -> tuple[Any, int]:
        at = self._skip_blank(at)
        self.lines.setdefault(path, self.line_at(at))
        if len(path) > _MAX_DEPTH:
            raise _SyntaxFault("is nested too deep", at, path)
        first = self._text[at : at + 1]
        if first == "{":
            return self._scan_object(at + 1, path)
        if first == "[":
            return self._scan_list(at + 1, path)
        if first == '"':
            return self._scan_string(at, path)
        return self._scan_scalar(at, path)

    def expect_end(self, at: int) -> None:
        at = self._skip_blank(at)
        if at != len(self._text):
            raise _SyntaxFault("something follows the end of the JSON text", at, ())

    def _scan_object(self, at: int, path: MemberPath) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = self._skip_blank(at)
        if self._text[at : at + 1] == "}":
            return members, at + 1
        while True:
            at = self._skip_blank(at)
            if self._text[at : at + 1] != '"':
                raise _SyntaxFault("a member name in double quotes is expected", at, path)
            began = at
            name, at = self._scan_string(at, path)
            place = (*path, name)
            if name in members:
                raise _SyntaxFault("stands here a second time", began, place)
            self.lines[place] = self.line_at(began)
            at = self._expect(":", at, place)
            members[name], at = self.scan(at, place)
            at = self._skip_blank(at)
            if self._text[at : at + 1] == "}":
                return members, at + 1
            at = self._expect(",", at, place)

    def _scan_list(self, at: int, path: MemberPath) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self._skip_blank(at)
        if self._text[at : at + 1] == "]":
            return items, at + 1
        while True:
            place = (*path, len(items))
            item, at = self.scan(at, place)
            items.append(item)
            at = self._skip_blank(at)
            if self._text[at : at + 1] == "]":
                return items, at + 1
            at = self._expect(",", at, place)

    def _scan_string(self, at: int, path: MemberPath) -> tuple[str, int]:
        try:
            value, end = _DECODER.raw_decode(self._text, at)
            value.encode("utf-8")
        except ValueError:
            raise _SyntaxFault("is not a JSON string", at, path) from None
        return value, end

    def _scan_scalar(self, at: int, path: MemberPath) -> tuple[Any, int]:
        match = _SCALAR.match(self._text, at)
        if match is None or match.end() - at > _MAX_NUMBER_CHARACTERS:
            raise _SyntaxFault("a JSON value is expected", at, path)
        text = match.group()
        if text in _LITERALS:
            return _LITERALS[text], match.end()
        if not match.group("fraction"):
            return int(text), match.end()
        number = float(text)
        if not math.isfinite(number):
            raise _SyntaxFault("is not a finite number", at, path)
        return number, match.end()

    def _expect(self, mark: str, at: int, path: MemberPath) -> int:
        at = self._skip_blank(at)
        if self._text[at : at + 1] != mark:
            raise _SyntaxFault(f"{mark!r} is expected", at, path)
        return at + 1

    def _skip_blank(self, at: int) -> int:
        match = _BLANK.match(self._text, at)
        return match.end() if match is not None else at
