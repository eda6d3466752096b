"""Which text each id of an answer stands for: text held back, cut off, or coming in the middle of a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inference_api.sampling_params import TokenLogprobs
from inference_api.server.token_trail import TokenText, TokenTrail


def token(token_id: int, text: str) -> TokenText:
    return TokenText(token_id, text, TokenLogprobs(-0.5 * token_id, []))


def texts(tokens: list[TokenText]) -> list[str]:
    return [found.text for found in tokens]


def test_an_id_waits_until_all_of_its_text_may_be_sent():
    trail = TokenTrail()
    trail.add(token(1, "Hel"))
    trail.add(token(2, "lo ST"))
    assert texts(trail.release(6)) == ["Hel"]
    assert texts(trail.release(2)) == ["lo ST"]
    assert trail.finish() == []


def test_an_id_without_text_comes_with_the_one_that_ends_its_character():
    trail = TokenTrail()
    trail.add(token(1, ""))
    trail.add(token(2, ""))
    assert trail.release(0) == []
    trail.add(token(3, "\U0001f642"))
    assert [found.token_id for found in trail.release(1)] == [1, 2, 3]


def test_what_a_stop_cuts_off_is_cut_off_and_what_follows_is_not_reported():
    trail = TokenTrail()
    for place, text in enumerate(("one", " tw", "o", " three")):
        trail.add(token(place, text))
    assert texts(trail.release(4)) == ["one"]
    assert texts(trail.finish()) == [" "]


def test_a_dangling_tail_belongs_to_the_last_id_and_an_end_without_text_is_left_out():
    trail = TokenTrail()
    trail.add(token(1, "a"))
    trail.add(token(2, ""))
    trail.extend("\ufffd")
    assert texts(trail.release(2)) == ["a", "\ufffd"]
    trail.add(token(3, ""))
    assert trail.release(0) == trail.finish() == []


def test_ids_of_which_nothing_is_sent_are_told_apart_without_their_text():
    trail = TokenTrail()
    for place, text in enumerate(("one", " ST", "OP", "")):
        trail.add(token(place, text))
    assert texts(trail.release(3)) == ["one"]
    assert texts(trail.finish()) == []
    unsent = trail.unsent()
    assert [(one.token_id, one.text, one.logprobs.logprob) for one in unsent] == [
        (1, "", -0.5),
        (2, "", -1.0),
        (3, "", -1.5),
    ]
    assert trail.unsent() == []


@given(st.lists(st.text("ab\U0001f642", max_size=3), max_size=12), st.data())
def test_texts_joined_are_what_was_released_however_it_was_released(pieces: list[str], data: st.DataObject) -> None:
    trail, whole = TokenTrail(), "".join(pieces)
    kept = data.draw(st.integers(0, len(whole)))
    found: list[TokenText] = []
    num_added = num_sent = 0
    for place, text in enumerate(pieces):
        trail.add(token(place, text))
        num_added += len(text)
        num_now = data.draw(st.integers(0, min(num_added, kept) - num_sent))
        num_sent += num_now
        found += trail.release(num_now)
    found += trail.release(kept - num_sent)
    found += trail.finish()
    assert "".join(texts(found)) == whole[:kept]
    assert [one.token_id for one in found + trail.unsent()] == list(range(len(pieces)))
