"""Check what a request with several sequences looks like: one view, from its first sequence to the last one's end."""

from __future__ import annotations

import pytest

from inference_api.backend import request_records
from inference_api.backend.request_records import RequestRecords
from inference_api.backend.sequence import Sequence
from inference_api.messages import ErrorInfo, FinishReason, RequestView
from tests.backend.factories import DIGITS, Rig, make_submit

TENANT = "alpha"


def make_sequence(choice: int, request_id: str = "req", prompt: bytes = b"hello") -> Sequence:
    submit = make_submit(f"{request_id}-{prompt!r}-{choice}", prompt, request_id=request_id, choice=choice)
    return Sequence(submit, "worker-1", 10.0)


def run(sequence: Sequence, row: int, num_tokens: int) -> None:
    sequence.start(row, 1, 11.0)
    sequence.advance(len(sequence.submit.token_ids))
    for _ in range(num_tokens):
        sequence.append(97, b"a", 12.0)


def end(records: RequestRecords, sequence: Sequence, reason: FinishReason, error: ErrorInfo | None = None) -> None:
    sequence.finish(reason, 20.0, error)
    records.end(sequence, 20.0)


@pytest.fixture
def records() -> RequestRecords:
    return RequestRecords()


@pytest.fixture
def three(records: RequestRecords) -> list[Sequence]:
    """Return three answers to one prompt: the first two run, with 2 and 3 tokens, the last waits."""
    sequences = [make_sequence(choice) for choice in range(3)]
    for sequence in sequences:
        records.add(sequence)
    run(sequences[0], 0, 2)
    run(sequences[1], 1, 3)
    return sequences


def view_of(records: RequestRecords, waiting: list[Sequence] | None = None, request_id: str = "req") -> RequestView:
    view = records.view(TENANT, request_id, 20.0, waiting or [])
    assert view is not None
    return view


def test_a_running_request_tells_the_tokens_of_all_its_answers_and_its_prompt_once(records, three) -> None:
    view = view_of(records, [three[2]])
    assert (view.state, view.num_prompt_tokens, view.num_completion_tokens) == ("decoding", 5, 5)
    assert (view.place, view.row, view.timing, view.finish_reason) == (None, None, None, None)


def test_a_request_runs_until_its_last_answer_ends_and_keeps_what_the_ended_ones_made(records, three) -> None:
    end(records, three[0], FinishReason.STOP)
    view = view_of(records, [three[2]])
    assert (view.state, view.num_completion_tokens, view.finish_reason) == ("decoding", 5, None)
    end(records, three[1], FinishReason.STOP)
    view = view_of(records, [three[2]])
    assert (view.state, view.place, view.num_completion_tokens, view.finish_reason) == ("waiting", 1, 5, None)
    run(three[2], 0, 1)
    end(records, three[2], FinishReason.LENGTH)
    view = view_of(records)
    assert (view.state, view.finish_reason, view.error) == ("finished", FinishReason.LENGTH, None)
    assert (view.num_prompt_tokens, view.num_completion_tokens) == (5, 6)
    assert (view.row, view.timing) == (None, None)


def test_each_prompt_of_a_request_counts_once_with_what_was_cached_of_it(records) -> None:
    for prompt in (b"hello", b"hi"):
        for choice in range(2):
            sequence = make_sequence(choice, prompt=prompt)
            records.add(sequence)
            sequence.start(0, 1, 11.0)
            sequence.reuse(1 + choice)
    view = view_of(records)
    assert (view.num_prompt_tokens, view.num_cached_tokens) == (7, 2)


def test_the_end_of_a_request_is_the_failure_of_the_answer_that_failed(records, three) -> None:
    error = ErrorInfo("generation_failed", "It broke.")
    end(records, three[1], FinishReason.ERROR, error)
    view = view_of(records, [three[2]])
    assert (view.state, view.finish_reason, view.error) == ("decoding", None, error)
    end(records, three[0], FinishReason.ABORT)
    end(records, three[2], FinishReason.ABORT)
    view = view_of(records)
    assert (view.state, view.finish_reason, view.error) == ("finished", FinishReason.ERROR, error)


def test_an_answer_that_comes_after_the_others_have_ended_goes_on_with_their_request(records) -> None:
    for choice in range(2):
        sequence = make_sequence(choice)
        records.add(sequence)
        assert records.open_sequences(TENANT, "req") == [sequence]
        run(sequence, 0, 2)
        assert view_of(records).state == "decoding"
        end(records, sequence, FinishReason.STOP)
    assert records.open_sequences(TENANT, "req") == []
    view = view_of(records)
    assert (view.state, view.num_prompt_tokens, view.num_completion_tokens) == ("finished", 5, 4)


def test_a_request_of_a_single_answer_keeps_its_row_and_its_timing(records) -> None:
    sequence = make_sequence(0)
    records.add(sequence)
    run(sequence, 4, 2)
    assert view_of(records).row == 4
    end(records, sequence, FinishReason.STOP)
    view = view_of(records)
    assert view.row == 4 and view.timing is not None and view.timing.decode_seconds == 8.0


def test_what_ended_answers_made_is_known_however_many_requests_end_meanwhile(
    records, three, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_records, "MAX_ENDED_REQUESTS", 2)
    end(records, three[0], FinishReason.STOP)
    for number in range(4):
        other = make_sequence(0, f"other-{number}")
        records.add(other)
        end(records, other, FinishReason.STOP)
    assert view_of(records, [three[2]]).num_completion_tokens == 5
    assert [records.view(TENANT, f"other-{number}", 20.0, []) is None for number in range(4)] == [True] * 2 + [
        False
    ] * 2


def test_another_tenants_request_of_the_same_name_is_another_one(records, three) -> None:
    assert records.view("beta", "req", 20.0, []) is None
    assert records.open_sequences("beta", "req") == []


def test_the_scheduler_tells_all_answers_of_a_call_as_one() -> None:
    rig = Rig(2, script=DIGITS)
    for choice in range(3):
        rig.submit(f"s{choice}", max_tokens=5, request_id="req-call", choice=choice)
    for _ in range(3):
        rig.step()
    view = rig.request("call")
    assert view is not None
    assert (view.state, view.num_completion_tokens) == ("decoding", sum(len(ids) for ids in rig.ids.values()))
    rig.run()
    view = rig.request("call")
    assert view is not None
    assert (view.state, view.num_prompt_tokens, view.num_completion_tokens) == ("finished", 5, 15)
