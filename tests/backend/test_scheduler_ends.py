"""Check what ends a sequence besides its length: the model's ends, the request's ids, and min_tokens before them."""

from __future__ import annotations

import pytest

from inference_api.backend.engines.base import SampleSpec
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import FinishReason
from inference_api.sampling_params import SamplingParams
from tests.backend.factories import DIGITS, ECHO, EOS_ID, Rig

MODEL_ENDS = frozenset({EOS_ID, 258})


def specs_of(rig: Rig) -> list[SampleSpec]:
    """Return the specs of all steps."""
    return [row.sample for plan in rig.plans for row in plan.rows if row.sample is not None]


def ended(rig: Rig, session_id: str = "a") -> tuple[FinishReason, int, bytes | None]:
    """Run to the end; return why a session ended, the count of its ids and its stop."""
    rig.run()
    end = rig.ends[session_id]
    assert end.num_completion_tokens == len(rig.ids[session_id])
    return end.reason, end.num_completion_tokens, end.stop


def test_a_stop_id_ends_with_stop_and_is_counted() -> None:
    rig = Rig(script=DIGITS)
    rig.submit("a", b"12345", max_tokens=50, stop_ids=(ord("8"), 7))
    assert ended(rig) == (FinishReason.STOP, 4, None)
    assert rig.text("a") == b"5678"


def test_ignored_model_ends_are_ids_like_any_other() -> None:
    rig = Rig(script=ECHO)
    rig.submit("a", b"hi", max_tokens=6, ignore_eos=True)
    rig.submit("b", b"hi", max_tokens=6)
    assert ended(rig) == (FinishReason.LENGTH, 6, None)
    assert rig.ids["a"] == [*b"hi", EOS_ID, EOS_ID, EOS_ID, EOS_ID]
    assert ended(rig, "b") == (FinishReason.STOP, 3, None)


def test_a_stop_id_ends_even_if_the_models_ends_are_ignored() -> None:
    rig = Rig(script=ECHO)
    rig.submit("a", b"hi", max_tokens=6, ignore_eos=True, stop_ids=(EOS_ID,))
    assert ended(rig) == (FinishReason.STOP, 3, None)


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 3), (2, 3), (3, 4), (5, 6)])
def test_an_end_before_min_tokens_is_none(min_tokens: int, num_tokens: int) -> None:
    rig = Rig(script=ECHO)
    rig.submit("a", b"hi", max_tokens=9, min_tokens=min_tokens)
    assert ended(rig) == (FinishReason.STOP, num_tokens, None)


def test_min_tokens_equal_to_max_tokens_end_with_length() -> None:
    rig = Rig(script=ECHO)
    rig.submit("a", b"hi", max_tokens=5, min_tokens=5)
    assert ended(rig) == (FinishReason.LENGTH, 5, None)


def test_ids_that_end_are_barred_until_min_tokens_and_no_longer() -> None:
    rig = Rig(script=DIGITS)
    rig.submit("a", b"12345", max_tokens=5, min_tokens=2, stop_ids=(7,))
    rig.run()
    assert [spec.barred_ids for spec in specs_of(rig)] == [MODEL_ENDS | {7}] * 2 + [frozenset()] * 3


def test_only_ids_that_would_end_are_barred() -> None:
    rig = Rig(script=DIGITS)
    rig.submit("a", b"12345", max_tokens=1, min_tokens=1, ignore_eos=True, stop_ids=(7,))
    rig.run()
    assert [spec.barred_ids for spec in specs_of(rig)] == [frozenset({7})]


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, b"567"), (1, b"567"), (2, b"567"), (3, b"5678901234567"), (13, b"567890123456789012345")],
)
def test_a_stop_sequence_counts_once_an_id_after_min_tokens_completes_it(min_tokens: int, text: bytes) -> None:
    rig = Rig(script=DIGITS)
    # "67" begins with the second id and is complete with the third, and again ten ids later.
    rig.submit("a", b"12345", max_tokens=21, min_tokens=min_tokens, stop_sequences=[b"67"])
    reason, _, stop = ended(rig)
    assert rig.text("a") == text
    assert (reason, stop) == ((FinishReason.STOP, b"67") if len(text) < 21 else (FinishReason.LENGTH, None))


def test_min_tokens_count_what_an_earlier_attempt_delivered() -> None:
    rig = Rig(script=DIGITS)
    submit = {"max_tokens": 21, "min_tokens": 3, "stop_sequences": [b"67"], "num_prompt_tokens": 5}
    rig.submit("a", b"12345" + b"567", **submit)
    rig.run()
    assert rig.ends["a"].reason is FinishReason.STOP
    assert rig.text("a") == b"8901234567"


def test_a_row_knows_its_ids_only_where_its_penalties_read_them() -> None:
    rig = Rig(script=DIGITS)
    rig.submit("a", b"12", max_tokens=3)
    rig.run()
    assert [spec.known_ids for spec in specs_of(rig)] == [()] * 3
    penalized = Rig(script=DIGITS)
    params = SamplingParams(1.0, 40, 0.9, 7, presence_penalty=0.5)
    penalized.submit("a", b"12", max_tokens=3, sampling=params)
    penalized.run()
    assert [bytes(spec.known_ids) for spec in specs_of(penalized)] == [b"12", b"122", b"1223"]
    assert [spec.num_prompt_tokens for spec in specs_of(penalized)] == [2] * 3


def test_a_row_below_min_tokens_has_no_drafts() -> None:
    rig = Rig(script=DIGITS, options=SchedulerOptions(draft_tokens=4))
    rig.submit("a", b"0123456789" * 4, max_tokens=40, min_tokens=12)
    rig.run()
    drafted = [row for plan in rig.plans for row in plan.rows if row.draft_ids]
    assert drafted and all(row.sample is not None and not row.sample.barred_ids for row in drafted)
    assert rig.text("a") == b"0123456789" * 4
