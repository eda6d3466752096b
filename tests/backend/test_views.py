"""Check what a tenant may see of rows and requests."""

from __future__ import annotations

from inference_api.backend.sequence import Sequence
from inference_api.backend.views import request_view, row_view
from inference_api.messages import FinishReason, RowView
from tests.backend.factories import make_submit


def _running() -> Sequence:
    sequence = Sequence(make_submit("s0"), "worker-1", 10.0)
    sequence.start(2, 1, 11.0)
    sequence.advance(5)
    sequence.append(97, b"a", 12.0)
    return sequence


def test_an_own_row_is_shown_with_its_counts() -> None:
    assert row_view(2, _running(), "alpha", 15.5) == RowView(2, "decoding", "alpha", "req-s0", 5, 1, 4.5)


def test_a_foreign_row_shows_that_it_is_taken_and_nothing_else() -> None:
    assert row_view(2, _running(), "beta", 15.5) == RowView(2, "other")
    assert row_view(2, _running(), "", 15.5) == RowView(2, "other")


def test_a_free_row_is_free_for_everybody() -> None:
    assert row_view(2, None, "alpha", 15.5) == RowView(2, "free")


def test_a_waiting_request_knows_its_place_and_has_no_row() -> None:
    queue = [Sequence(make_submit(f"s{number}"), "worker-1", 10.0) for number in range(3)]
    view = request_view(queue[1], 12.0, queue)
    assert (view.state, view.place, view.row, view.finish_reason) == ("waiting", 2, None, None)


def test_a_request_that_waits_again_has_no_row_and_keeps_its_counts() -> None:
    sequence = _running()
    sequence.preempt()
    view = request_view(sequence, 20.0, [sequence])
    assert (view.state, view.place, view.row, view.num_completion_tokens) == ("waiting", 1, None, 1)


def test_an_ended_request_keeps_its_row_reason_and_figures() -> None:
    sequence = _running()
    sequence.finish(FinishReason.LENGTH, 20.0)
    view = request_view(sequence, 99.0)
    assert (view.state, view.place, view.row, view.finish_reason) == ("finished", None, 2, FinishReason.LENGTH)
    assert view.timing is not None
    assert view.timing.decode_seconds == 8.0
