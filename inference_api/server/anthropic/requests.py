"""Turn a parsed Messages body and its prompt's ids into a GenerationRequest.

Runs in PROCESS 1. Knows what the model can hold, and the sentences by which Anthropic's clients find out that it is too
little; no Flask, no words of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from inference_api.errors import PromptTooLongError
from inference_api.sampling_params import SamplingParams
from inference_api.server.anthropic.bodies import MessagesBody
from inference_api.server.generation_request import GenerationRequest, draw_seed
from inference_api.server.validation import NativeLimits


def make_request(
    body: MessagesBody, token_ids: Sequence[int], limits: NativeLimits, *, seed: int | None = None
) -> GenerationRequest:
    """Return what is to be generated after `token_ids`; raises PromptTooLongError for what does not fit.

    Without a seed one is drawn.
    """
    _check_room(len(token_ids), body.max_tokens, limits.context_tokens)
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(body.top_k or 0, limits.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=draw_seed(seed),
    )
    return GenerationRequest(token_ids, sampling, body.max_tokens, stop_sequences=tuple(body.stop_sequences or ()))


def _check_room(num_prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
    """Raise PromptTooLongError in Anthropic's words, which clients match on to shorten one or the other.

    Quoted in github.com/anthropics/claude-code, issues 12186 (the prompt) and 4951 (both together).
    """
    if num_prompt_tokens >= context_tokens:
        raise PromptTooLongError(f"prompt is too long: {num_prompt_tokens} tokens > {context_tokens - 1} maximum")
    if num_prompt_tokens + max_tokens > context_tokens:
        raise PromptTooLongError(
            f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + {max_tokens} >"
            f" {context_tokens}, decrease input length or `max_tokens` and try again"
        )
