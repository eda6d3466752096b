"""Check the chunks of an answer on their way through: whole ones unchanged, faults found, at any split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.chunks import ChunkFault, ChunkRelay

LAST_CHUNK = b"0\r\n\r\n"


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def payload(framed: bytes) -> bytes:
    """Take chunks apart again, by their sizes alone."""
    joined = b""
    while framed:
        size_line, _, rest = framed.partition(b"\r\n")
        size = int(size_line, 16)
        assert size > 0 and rest[size : size + 2] == b"\r\n"
        joined, framed = joined + rest[:size], rest[size + 2 :]
    return joined


def test_chunks_that_arrive_together_leave_together_each_as_it_was() -> None:
    relay = ChunkRelay()
    assert relay.feed(b"1\r\na\r\n002\r\nbc\r\n") == b"1\r\na\r\n002\r\nbc\r\n"
    assert not relay.ended


def test_the_part_of_a_chunk_that_has_come_leaves_as_a_chunk() -> None:
    relay = ChunkRelay()
    assert relay.feed(b"a\r\n01234") == b"5\r\n01234\r\n"
    assert relay.feed(b"56789") == b""
    assert relay.feed(b"\r\n") == b"5\r\n56789\r\n"


def test_the_last_chunk_ends_it_and_is_kept_back() -> None:
    relay = ChunkRelay()
    assert relay.feed(frame(b"a") + LAST_CHUNK) == frame(b"a")
    assert relay.ended


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 12), max_size=60))
def test_any_split_gives_the_same_bytes_in_whole_chunks(parts: list[bytes], cuts: list[int]) -> None:
    relay, data, out = ChunkRelay(), b"".join(map(frame, parts)) + LAST_CHUNK, b""
    for cut in cuts:
        if data:
            out += payload(relay.feed(data[:cut]))
            data = data[cut:]
    if data:
        out += payload(relay.feed(data))
    assert out == b"".join(parts)
    assert relay.ended


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"x\r\na\r\n",
        b"-1\r\na\r\n",
        b"1;a=b\r\na\r\n",
        b"1 \r\na\r\n",
        b"123456789\r\n",
        b"no size at all",
        b"1\r\nab\r\n",
        b"2\r\na\r\n\r\n",
        b"0\r\nTrailer: 1\r\n\r\n",
        LAST_CHUNK + b"HTTP/1.1 200 OK",
    ],
)
def test_what_is_no_chunk_is_a_fault(data: bytes) -> None:
    with pytest.raises(ChunkFault):
        ChunkRelay().feed(data)


def test_bytes_after_the_last_chunk_are_a_fault_in_a_later_read_too() -> None:
    relay = ChunkRelay()
    relay.feed(LAST_CHUNK)
    with pytest.raises(ChunkFault, match="after the last chunk"):
        relay.feed(b"1")
