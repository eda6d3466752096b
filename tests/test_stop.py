"""Check both stop searches against naive ones over random texts, stops and splits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.stop import StopMatch, StopMatcher, TextStop

_unhurried = settings(deadline=None)  # a busy machine is slow, not wrong
_STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=5), max_size=4)
_PIECES = st.lists(st.text("ab🙂", max_size=6), max_size=8)


def _first_match(stream: bytes, stops: list[bytes]) -> StopMatch | None:
    """Search every end offset, then every stop from the longest: slow and plainly right."""
    for end in range(1, len(stream) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if stream[:end].endswith(stop):
                return StopMatch(stop=stop, start=end - len(stop), end=end)
    return None


def _claimable(stream: bytes | str, stops: list[bytes] | list[str]) -> int:
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    return max((size for size in range(1, len(stream) + 1) if stream[-size:] in prefixes), default=0)


@_unhurried
@given(_STOPS, st.lists(st.binary(max_size=4) | st.text("ab🙂", max_size=4).map(str.encode), max_size=8))
def test_matcher_agrees_with_a_naive_search_after_every_piece(texts: list[str], pieces: list[bytes]) -> None:
    stops = [text.encode() for text in texts]
    matcher = StopMatcher(stops)
    stream = b""
    for piece in pieces:
        stream += piece
        expected = _first_match(stream, stops)
        assert matcher.feed(piece) == expected
        assert matcher.held_bytes == (0 if expected else _claimable(stream, stops))


@_unhurried
@given(_STOPS, _PIECES)
def test_text_sent_in_any_split_is_the_text_before_the_first_stop(stops: list[str], pieces: list[str]) -> None:
    match = _first_match("".join(pieces).encode(), [stop.encode() for stop in stops])
    whole = "".join(pieces)
    expected = whole.encode()[: match.start].decode() if match else whole
    search = TextStop(stops)
    sent = "".join([search.feed(piece) for piece in pieces]) + search.flush()
    assert sent == expected
    assert search.matched == (match.stop.decode() if match else None)


@_unhurried
@given(_STOPS, _PIECES)
def test_held_text_is_the_longest_suffix_that_is_a_prefix_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    search, fed, sent = TextStop(stops), "", ""
    for piece in pieces:
        fed += piece
        sent += search.feed(piece)
        if search.matched is not None:
            assert search.flush() == ""
            break
        assert len(fed) - len(sent) == _claimable(fed, stops)


@_unhurried
@given(_STOPS, _PIECES)
def test_bytes_and_text_end_at_the_same_character(stops: list[str], pieces: list[str]) -> None:
    matcher, search = StopMatcher([stop.encode() for stop in stops]), TextStop(stops)
    for piece in pieces:
        search.feed(piece)
        match = matcher.feed(piece.encode())
        assert search.matched == (match.stop.decode() if match else None)


def test_the_stop_that_completes_first_wins_over_one_that_began_first() -> None:
    assert StopMatcher([b"abcd", b"c"]).feed(b"xabcd") == StopMatch(stop=b"c", start=3, end=4)


def test_of_stops_that_complete_together_the_longest_wins() -> None:
    assert StopMatcher([b"c", b"abc", b"bc"]).feed(b"xabc") == StopMatch(stop=b"abc", start=1, end=4)


def test_a_failed_attempt_falls_back_to_a_shorter_one_inside_it() -> None:
    assert StopMatcher([b"aab"]).feed(b"aaab") == StopMatch(stop=b"aab", start=1, end=4)


def test_a_stop_inside_one_character_is_found_in_bytes() -> None:
    assert StopMatcher([b"\x9f\x99"]).feed("🙂".encode()) == StopMatch(stop=b"\x9f\x99", start=1, end=3)


def test_a_match_stays_whatever_follows() -> None:
    matcher = StopMatcher([b"ab", b"xyz"])
    first = matcher.feed(b"ab")
    assert matcher.feed(b"xyz") == first == StopMatch(stop=b"ab", start=0, end=2)
    search = TextStop(["ab"])
    assert (search.feed("1ab2"), search.feed("3ab"), search.flush(), search.matched) == ("1", "", "", "ab")


def test_a_stop_that_is_complete_before_an_end_may_come_does_not_count() -> None:
    matcher = StopMatcher([b"ab"])
    assert matcher.feed(b"xabya", may_end=False) is None
    assert matcher.feed(b"b") == StopMatch(stop=b"ab", start=4, end=6)
    search = TextStop(["ab"])
    assert (search.feed("xabya", may_end=False), search.feed("b"), search.matched) == ("xaby", "", "ab")
    search = TextStop(["ab"])
    assert (search.feed("xab", may_end=False) + search.feed("c") + search.flush(), search.matched) == ("xabc", None)


@_unhurried
@given(_STOPS, _PIECES, _PIECES)
def test_text_before_an_end_may_come_is_never_lost(stops: list[str], early: list[str], late: list[str]) -> None:
    matcher, search = StopMatcher([stop.encode() for stop in stops]), TextStop(stops)
    sent = "".join(search.feed(piece, may_end=False) for piece in early)
    assert search.matched is None
    for piece in early:
        assert matcher.feed(piece.encode(), may_end=False) is None
    for piece in late:
        sent += search.feed(piece)
        match = matcher.feed(piece.encode())
        assert search.matched == (match.stop.decode() if match else None)
    whole = "".join(early + late)
    if search.matched is None:
        assert sent + search.flush() == whole
    else:
        assert whole.startswith(sent + search.matched)


@_unhurried
@given(_STOPS, _PIECES)
def test_a_stop_that_is_kept_ends_the_text_and_nothing_comes_after_it(stops: list[str], pieces: list[str]) -> None:
    cut, kept = TextStop(stops), TextStop(stops, keeps_stop=True)
    sent = ["".join(search.feed(piece) for piece in pieces) + search.flush() for search in (cut, kept)]
    assert kept.matched == cut.matched
    assert sent[1] == sent[0] + (cut.matched or "")


def test_a_stop_that_is_kept_is_held_back_until_it_is_complete() -> None:
    search = TextStop(["abc"], keeps_stop=True)
    assert [search.feed(piece) for piece in ("xa", "b", "cd", "e")] == ["x", "", "abc", ""]


def test_without_stops_all_text_passes_at_once() -> None:
    assert StopMatcher([]).feed(b"anything") is None
    assert StopMatcher([]).held_bytes == 0
    assert TextStop([]).feed("anything") == "anything"


def test_repeated_stops_count_once() -> None:
    assert StopMatcher([b"b", b"b"]).feed(b"ab") == StopMatch(stop=b"b", start=1, end=2)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher([b"a", b""])
    with pytest.raises(ValueError, match="must not be empty"):
        TextStop([""])


def test_the_worst_repetitive_input_costs_at_most_two_steps_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingDict(dict[int, int]):
        num_lookups = 0

        def __contains__(self, symbol: object) -> bool:
            CountingDict.num_lookups += 1
            return super().__contains__(symbol)

    matcher = StopMatcher([b"a" * 200 + b"b"])
    automaton = matcher._automaton
    assert automaton is not None
    automaton._next = [CountingDict(edges) for edges in automaton._next]
    assert matcher.feed((b"a" * 199 + b"c") * 20) is None
    assert CountingDict.num_lookups <= 2 * 4000 + 1
