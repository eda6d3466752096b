"""Say which text each id of a prompt stands for, and how likely the model found it: what a scored prompt is told with.

Runs in PROCESS 1. The first id follows nothing, so that it has no logprob. Knows no API's words and no answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inference_api.sampling_params import TokenLogprobs
from inference_api.server.tokenizer import IncrementalDecoder, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class PromptToken:
    """One id and the text that it brings, empty inside a character; texts joined are the prompt as it is decoded."""

    token_id: int
    text: str
    logprobs: TokenLogprobs | None
    """None for the first one."""


def prompt_tokens(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[PromptToken]:
    """Return the prompt's ids one by one; `logprobs` are those of all but the first. Raises ValueError if they are not.

    A character that the prompt's end cuts belongs to its last id.
    """
    decoder = IncrementalDecoder(tokenizer, ())
    texts = [decoder.decode([token_id]) for token_id in token_ids]
    texts[-1] += decoder.flush()
    return [
        PromptToken(token_id, text, likelihood)
        for token_id, text, likelihood in zip(token_ids, texts, (None, *logprobs), strict=True)
    ]


def with_top(token: PromptToken, num_top: int) -> PromptToken:
    """Return the token with at most `num_top` of the likeliest ids: two members may ask for different numbers."""
    if token.logprobs is None or len(token.logprobs.top) <= num_top:
        return token
    return dataclasses.replace(token, logprobs=TokenLogprobs(token.logprobs.logprob, token.logprobs.top[:num_top]))
