"""Check how a revocation list is read, and that a wrong one is refused with its line."""

from __future__ import annotations

import contextlib
import string

import pytest

from proxy.located_json import FileFault
from proxy.revocation import MAX_REVOKED, parse_revocations


def test_a_list_has_one_id_a_line_with_remarks_and_gaps() -> None:
    raw = b"# team-a left\nj-1\r\n\n  a.b_c:d-1 \nj-1\n"
    assert parse_revocations(raw, "f") == {"j-1", "a.b_c:d-1"}
    assert parse_revocations(b"", "f") == frozenset()


def test_an_id_is_made_of_letters_digits_and_four_marks() -> None:
    read: set[str] = set()
    for code in range(256):
        with contextlib.suppress(FileFault):
            read |= parse_revocations(b"a%ca" % code, "f")
            read |= parse_revocations(b"%c" % code, "f")
    characters = set(string.ascii_letters + string.digits + "._:-")
    # A line end in the middle makes two lines of it.
    assert read == characters | {f"a{character}a" for character in characters}


@pytest.mark.parametrize("line", [b"a b", b"a,b", b'"a"', b"\xe9", b"a" * 129, b"a#b", b"a\x00"])
def test_a_line_that_can_be_no_id_is_refused_with_its_number(line: bytes) -> None:
    with pytest.raises(FileFault, match=r"^revoked:3: an id is 1 to 128 characters of"):
        parse_revocations(b"# list\nj-1\n" + line + b"\nj-2", "revoked")


def test_a_list_is_bounded() -> None:
    lines = [b"%d" % number for number in range(MAX_REVOKED)]
    assert len(parse_revocations(b"\n".join(lines), "f")) == MAX_REVOKED
    with pytest.raises(FileFault, match=r"^f:100001: more than 100000 ids"):
        parse_revocations(b"\n".join([*lines, b"one"]), "f")


def test_the_longest_id_is_taken() -> None:
    assert parse_revocations(b"a" * 128, "f") == {"a" * 128}


def test_a_list_that_was_read_does_not_change() -> None:
    assert isinstance(parse_revocations(b"j-1", "f"), frozenset)
