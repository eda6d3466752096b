"""What prompts may take of a step: a share each beside decoding rows, never more than alone."""

from __future__ import annotations

import pytest

from inference_api.backend.engines.base import PrefillBudget
from inference_api.backend.prefill_budget import MAX_SHARES, prompt_tokens

BUDGET = PrefillBudget(beside_tokens=32, alone_tokens=512)


@pytest.mark.parametrize(
    ("num_decoding", "num_prompts", "expected"),
    [
        (0, 1, 512),  # nobody is held up
        (0, 32, 512),
        (31, 1, 32),  # a full batch keeps its pace beside one prompt
        (32, 0, 0),
        (16, 1, 32 + 15),  # fifteen rows leave their tokens
        (1, 31, 32 * MAX_SHARES + 30),
        (16, 16, 32 * MAX_SHARES + 15),
        (29, 3, 3 * 32 + 2),
    ],
)
def test_each_prompt_brings_a_share_and_each_idle_row_a_token(num_decoding, num_prompts, expected):
    assert prompt_tokens(BUDGET, num_rows=32, num_decoding=num_decoding, num_prompts=num_prompts) == expected


def test_prompts_beside_rows_never_get_more_than_alone():
    for num_decoding in range(1, 32):
        found = prompt_tokens(
            PrefillBudget(48, 64), num_rows=32, num_decoding=num_decoding, num_prompts=32 - num_decoding
        )
        assert 48 <= found <= 64


def test_one_number_for_both_is_that_number_whoever_decodes():
    budgets = {
        prompt_tokens(PrefillBudget(7, 7), num_rows=4, num_decoding=decoding, num_prompts=4 - decoding)
        for decoding in range(4)
    }
    assert budgets == {7}
