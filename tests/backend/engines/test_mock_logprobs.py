"""Check the logprobs that the mock tells: as many as were asked for, in order, the drawn id certain."""

from __future__ import annotations

import dataclasses

import pytest

from inference_api.backend.engines.base import RowPlan, SampleSpec, StepPlan
from inference_api.backend.engines.mock import BLOCK_TOKENS, IMPOSSIBLE, MockEngine, MockScript
from inference_api.sampling_params import SamplingParams, TokenLogprobs
from tests.backend.factories import DIGITS, ECHO, NOISE, make_image

BLOCKS = MockScript.parse("digits", 0.0, "")


def _plan(row: int, prompt: bytes, logprobs: int | None) -> RowPlan:
    params = SamplingParams(1.0, 40, 0.9, 1, logprobs=logprobs)
    return RowPlan(row, 0, tuple(prompt), SampleSpec(params, 0, len(prompt), len(prompt)))


@pytest.mark.parametrize("script", [DIGITS, ECHO, NOISE, BLOCKS], ids=["digits", "echo", "noise", "blocks"])
@pytest.mark.parametrize("num_top", [0, 1, 2, 20])
def test_each_drawn_id_is_certain_and_stands_before_the_others(script: MockScript, num_top: int) -> None:
    (result,) = MockEngine(make_image(), 1, 256, script).execute(StepPlan((_plan(0, b"hello", num_top),))).rows
    assert len(result.logprobs) == len(result.token_ids) == script.block_tokens
    for drawn, told in zip(result.token_ids, result.logprobs, strict=True):
        assert told.logprob == 0.0 and len(told.top) == num_top
        assert told.top[:1] == [(drawn, 0.0)][:num_top]
        assert {logprob for _, logprob in told.top[1:]} <= {IMPOSSIBLE}
        assert len({token_id for token_id, _ in told.top}) == num_top


def test_the_likeliest_descend_and_equal_ones_ascend_by_id() -> None:
    (result,) = MockEngine(make_image(), 1, 256, ECHO).execute(StepPlan((_plan(0, b"\x01bc", 4),))).rows
    assert result.logprobs == (TokenLogprobs(0.0, [(1, 0.0), (0, IMPOSSIBLE), (2, IMPOSSIBLE), (3, IMPOSSIBLE)]),)


def test_nobody_who_did_not_ask_is_told_any_beside_one_who_did() -> None:
    asked, silent = (
        MockEngine(make_image(), 2, 256, BLOCKS).execute(StepPlan((_plan(0, b"a", 0), _plan(1, b"b", None)))).rows
    )
    assert len(asked.logprobs) == BLOCK_TOKENS
    assert not silent.logprobs


def test_logprobs_change_no_id() -> None:
    def drawn(logprobs: int | None) -> tuple[int, ...]:
        engine = MockEngine(make_image(), 1, 256, NOISE)
        return engine.execute(StepPlan((_plan(0, b"hello", logprobs),))).rows[0].token_ids

    assert drawn(5) == drawn(None)


def test_every_draft_that_holds_has_logprobs_too() -> None:
    engine = MockEngine(make_image(), 1, 256, ECHO)
    plan = dataclasses.replace(_plan(0, b"hello", 1), draft_ids=tuple(b"hel"))
    (result,) = engine.execute(StepPlan((plan,))).rows
    assert bytes(result.token_ids) == b"hell"
    assert [told.top for told in result.logprobs] == [[(letter, 0.0)] for letter in b"hell"]
