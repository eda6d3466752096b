"""Check the mock engine: what it answers in each mode, its faults, its rate, and that rows are on their own."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.engines.base import MaskError, PrefixCopy, RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.mock import BLOCK_TOKENS, MockEngine, MockScript
from inference_api.errors import SettingError
from inference_api.sampling_params import SamplingParams
from tests.backend.factories import DIGITS, ECHO, EOS_ID, NOISE, make_image


def _engine(script: MockScript, num_rows: int = 4) -> MockEngine:
    return MockEngine(make_image(), num_rows, 256, script)


def _plan(
    row: int, start: int, ids: Sequence[int], *, num_prompt_tokens: int, seed: int = 1, choice: int = 0
) -> RowPlan:
    params = SamplingParams(1.0, 40, 0.9, seed)
    return RowPlan(row, start, tuple(ids), SampleSpec(params, choice, start + len(ids), num_prompt_tokens))


def _generate(engine: MockEngine, row: int, prompt: bytes, num_tokens: int, **options: int) -> list[int]:
    made: list[int] = []
    start, ids = 0, list(prompt)
    for _ in range(num_tokens):
        plan = _plan(row, start, ids, num_prompt_tokens=len(prompt), **options)
        made.append(engine.execute(StepPlan((plan,))).rows[0].token_ids[0])
        start, ids = start + len(ids), made[-1:]
    return made


def test_digits_are_the_position_modulo_ten() -> None:
    assert bytes(_generate(_engine(DIGITS), 0, b"hello", 12)) == b"567890123456"


def test_echo_repeats_the_prompt_and_ends_it() -> None:
    assert _generate(_engine(ECHO), 0, b"hello", 6) == [*b"hello", EOS_ID]


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 3), st.binary(min_size=1, max_size=20))
def test_noise_is_a_function_of_prompt_seed_and_choice_in_every_row(seed: int, choice: int, prompt: bytes) -> None:
    first = _generate(_engine(NOISE), 0, prompt, 8, seed=seed, choice=choice)
    assert _generate(_engine(NOISE), 3, prompt, 8, seed=seed, choice=choice) == first


def test_noise_differs_by_seed_choice_and_prompt() -> None:
    made = [
        _generate(_engine(NOISE), 0, prompt, 12, seed=seed, choice=choice)
        for prompt, seed, choice in ((b"hello", 1, 0), (b"hello", 2, 0), (b"hello", 1, 1), (b"hallo", 1, 0))
    ]
    assert len({tuple(ids) for ids in made}) == 4


class OnlyMask:
    """Allow the ids of `allowed_ids`, or end the form if there are none."""

    def __init__(self, *allowed_ids: int) -> None:
        self.allowed_ids = allowed_ids
        self.seen: list[tuple[int, ...]] = []

    def allowed(self, ids: Sequence[int]) -> bytes:
        self.seen.append(tuple(ids))
        if not self.allowed_ids:
            raise MaskError("it is over.")
        return sum(1 << token_id for token_id in self.allowed_ids).to_bytes(33, "little")


@pytest.mark.parametrize(
    ("allowed_ids", "drawn"),
    [((ord("5"), 1), ord("5")), ((7, 9), 7), (b" \nx", ord("x")), (b" \n", ord("\n")), ((EOS_ID,), EOS_ID)],
    ids=str,
)
def test_a_mask_lets_the_script_speak_where_it_may_and_takes_the_lowest_id_else(
    allowed_ids: tuple[int, ...], drawn: int
) -> None:
    mask = OnlyMask(*allowed_ids)
    for engine in (_engine(DIGITS), _engine(MockScript.parse("digits", 0.0, ""))):
        plan = _plan(0, 0, b"hello", num_prompt_tokens=5)
        sample = dataclasses.replace(plan.sample, known_ids=tuple(b"hello"), mask=mask)
        (result,) = engine.execute(StepPlan((dataclasses.replace(plan, sample=sample),))).rows
        assert result.token_ids == (drawn,)
    assert mask.seen == [tuple(b"hello")] * 2


@pytest.mark.parametrize(("prompt", "drawn"), [(b"hell", ord('"')), (b"hello", ord("5"))])
def test_every_fourth_position_of_a_form_ends_what_it_can(prompt: bytes, drawn: int) -> None:
    plan = _plan(0, 0, prompt, num_prompt_tokens=len(prompt))
    sample = dataclasses.replace(plan.sample, mask=OnlyMask(*b'"}45'))
    (result,) = _engine(DIGITS).execute(StepPlan((dataclasses.replace(plan, sample=sample),))).rows
    assert result.token_ids == (drawn,)


def test_a_form_that_ends_fails_its_row_alone() -> None:
    plan = _plan(0, 0, b"hello", num_prompt_tokens=5)
    sample = dataclasses.replace(plan.sample, mask=OnlyMask())
    rows = (dataclasses.replace(plan, sample=sample), _plan(1, 0, b"hello", num_prompt_tokens=5))
    first, second = _engine(DIGITS).execute(StepPlan(rows)).rows
    assert first.error is not None and "it is over." in first.error.message
    assert second.token_ids == (ord("5"),)


def test_a_row_without_a_sample_makes_nothing() -> None:
    engine = _engine(DIGITS)
    assert engine.execute(StepPlan((RowPlan(0, 0, (1, 2, 3), None),))).rows == ()


def test_a_plan_that_does_not_continue_where_the_row_stands_is_a_defect_and_told() -> None:
    engine = _engine(DIGITS)
    _generate(engine, 1, b"hello", 1)
    with pytest.raises(RuntimeError, match="row 1 holds 5 ids, the plan starts at 0"):
        engine.execute(StepPlan((_plan(1, 0, b"x", num_prompt_tokens=1),)))
    engine.release(1)
    engine.execute(StepPlan((_plan(1, 0, b"x", num_prompt_tokens=1),)))
    with pytest.raises(RuntimeError, match="row 1 holds 1 ids, the plan starts at 3"):
        engine.execute(StepPlan((_plan(1, 3, b"x", num_prompt_tokens=1),)))


def test_a_released_row_still_holds_its_ids_and_another_may_copy_them() -> None:
    engine = _engine(NOISE)
    expected = _generate(_engine(NOISE), 0, b"hello you", 1)
    _generate(engine, 1, b"hello", 1)
    engine.release(1)
    for row in (2, 1):
        plan = dataclasses.replace(_plan(row, 5, b" you", num_prompt_tokens=9), prefix=PrefixCopy(1, 5))
        assert engine.execute(StepPlan((plan,))).rows[0].token_ids == tuple(expected)


@pytest.mark.parametrize("rows", [(0, 2), (1, 2)], ids=["too few ids", "a source that begins itself"])
def test_a_prefix_that_its_source_does_not_hold_is_a_defect_and_told(rows: tuple[int, int]) -> None:
    engine = _engine(NOISE)
    _generate(engine, 1, b"hello", 1)
    engine.release(1)
    copying = dataclasses.replace(_plan(2, 5, b"you", num_prompt_tokens=8), prefix=PrefixCopy(rows[0], 5))
    with pytest.raises(RuntimeError, match=f"row {rows[0]} does not hold the 5 ids that row 2 copies"):
        engine.execute(StepPlan((_plan(1, 0, b"new", num_prompt_tokens=3), copying)))


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_drafts_are_kept_as_far_as_the_draws_agree_and_the_row_holds_no_more(num_right: int) -> None:
    expected = _generate(_engine(NOISE), 0, b"hello", 6)
    engine = _engine(NOISE)
    wrong = [b"!"[0]] * (3 - num_right)
    plan = dataclasses.replace(_plan(0, 0, b"hello", num_prompt_tokens=5), draft_ids=(*expected[:num_right], *wrong))
    drawn = engine.execute(StepPlan((plan,))).rows[0].token_ids
    assert drawn == tuple(expected[: num_right + 1])
    follow_up = _plan(0, 5 + num_right, [drawn[-1]], num_prompt_tokens=5)
    assert engine.execute(StepPlan((follow_up,))).rows[0].token_ids == (expected[num_right + 1],)


def test_a_script_that_says_what_a_step_does_takes_no_drafts() -> None:
    scripts = [
        DIGITS,
        MockScript("digits", 10.0),
        MockScript.parse("digits", 0.0, ""),
        MockScript("echo", faults={b"x": "nan"}),
    ]
    assert [_engine(script).info.max_draft_tokens for script in scripts] == [8, 0, 0, 0]


@pytest.mark.parametrize("kind", ["nan", "memory", "error"])
def test_a_scripted_row_fault_concerns_the_row_with_its_text_only(kind: str) -> None:
    engine = _engine(MockScript.parse("digits", 0.0, f"{kind}:BAD"))
    plan = StepPlan((_plan(0, 0, b"BAD", num_prompt_tokens=3), _plan(1, 0, b"good", num_prompt_tokens=4)))
    sick, well = engine.execute(plan).rows
    assert sick.error is not None and sick.error.code == "generation_failed"
    assert (well.error, well.token_ids) == (None, (ord("4"),))


def test_a_scripted_crash_fails_the_whole_step() -> None:
    engine = _engine(MockScript.parse("digits", 0.0, "crash:BOOM,nan:other"))
    with pytest.raises(RuntimeError, match="scripted crash"):
        engine.execute(StepPlan((_plan(0, 0, b"a BOOM", num_prompt_tokens=6),)))


def test_a_scripted_hang_never_returns() -> None:
    engine = _engine(MockScript.parse("digits", 0.0, "hang:STUCK"))
    step = threading.Thread(target=engine.execute, args=(StepPlan((_plan(0, 0, b"STUCK", num_prompt_tokens=5),)),))
    step.start()
    step.join(0.05)
    assert step.is_alive()
    engine._done.set()
    step.join()


@pytest.mark.parametrize("faults", ["boom:X", "nan", "nan:", ":X", "nan:A,oops:B"])
def test_an_unknown_fault_stops_the_start_and_names_the_setting(faults: str) -> None:
    with pytest.raises(SettingError, match="INFERENCE_API_MOCK_FAULTS"):
        MockScript.parse("digits", 0.0, faults)


def test_the_rate_counts_ids_over_all_rows() -> None:
    engine = _engine(MockScript("digits", 100.0))
    plan = StepPlan(tuple(_plan(row, 0, b"a", num_prompt_tokens=1) for row in range(4)))
    began = time.monotonic()
    engine.execute(plan)
    assert 0.035 < time.monotonic() - began < 1.0


def test_the_description_promises_independent_rows_and_names_the_numeric_path() -> None:
    info = _engine(NOISE).info
    assert info.row_independent
    assert info.digest.startswith("mock-noise-")
    assert info.digest != _engine(DIGITS).info.digest
    assert MockEngine(make_image(100), 1, 256, DIGITS).info.context_tokens == 100


def test_digits_without_a_rate_come_in_blocks_that_are_the_same_digits() -> None:
    engine = _engine(MockScript.parse("digits", 0.0, ""))
    made: list[int] = []
    start, ids = 0, list(b"hello")
    for _ in range(3):
        plan = _plan(0, start, ids, num_prompt_tokens=5)
        drawn = engine.execute(StepPlan((plan,))).rows[0].token_ids
        assert len(drawn) == BLOCK_TOKENS
        start, ids = start + len(ids), list(drawn)
        made += drawn
    assert bytes(made) == bytes(ord("0") + position % 10 for position in range(5, 5 + 3 * BLOCK_TOKENS))


@pytest.mark.parametrize("script", [("digits", 1e6, ""), ("echo", 0.0, ""), ("digits", 0.0, "nan:BAD")])
def test_a_rate_another_mode_or_a_fault_means_one_id_a_step(script: tuple[str, float, str]) -> None:
    engine = _engine(MockScript.parse(*script))
    result = engine.execute(StepPlan((_plan(0, 0, b"hello", num_prompt_tokens=5),)))
    assert len(result.rows[0].token_ids) == 1


def test_every_row_may_take_its_block_in_one_step() -> None:
    info = _engine(MockScript.parse("digits", 0.0, "")).info
    assert info.prefill_budget is not None
    assert info.prefill_budget.beside_tokens == 512 + info.num_rows * BLOCK_TOKENS
