"""Check how much of a call's prompts counts as cached, over several prompts and several answers to each."""

from __future__ import annotations

import pytest

from inference_api.messages import NO_TIMING, Finished, FinishReason
from inference_api.server.choices import count_cached_tokens


def end(num_cached_tokens: int) -> Finished:
    """Return the end of a generation that found so much of its prompt."""
    return Finished(FinishReason.STOP, 3, NO_TIMING, num_cached_tokens=num_cached_tokens)


@pytest.mark.parametrize(
    ("cached", "num_prompts", "expected"),
    [
        ([7], 1, 7),
        ([0, 9, 9], 1, 0),
        ([4, 9, 9], 1, 4),
        ([5, 6], 2, 11),
        ([0, 9, 3, 2], 2, 2),
    ],
)
def test_of_each_prompt_counts_what_none_of_its_answers_computed(
    cached: list[int], num_prompts: int, expected: int
) -> None:
    assert count_cached_tokens([end(number) for number in cached], num_prompts) == expected
