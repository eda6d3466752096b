"""Say what one call wants generated, whichever surface it came by, and turn it into what crosses to the backend.

Runs in PROCESS 1. Every surface's parser ends here: prompts are ids by now, bounds are checked, and what follows is
the same for all. Knows no surface and no HTTP.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Collection, Sequence

from inference_api.config import Settings
from inference_api.errors import InvalidRequestError, PromptTooLongError
from inference_api.messages import Grammar, SamplingParams, Submit
from inference_api.server.ids_left import IdsLeft, count_ids_left
from inference_api.server.validation import NativeLimits

MAX_CHOICES = 32
"""Generations of one call: as many as there are rows by default."""

SEED_BITS = 63
"""What keys the draws; a seed below 0 is taken modulo the number of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it, `num_choices` times; `max_tokens` fits the context."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    num_choices: int = 1

    def submits(self, request_id: str, tenant: str, settings: Settings) -> list[Submit]:
        """Return a Submit a choice; they differ in session and choice, which also keys the draws."""
        return [
            Submit(
                session_id=secrets.token_hex(16),
                request_id=request_id,
                tenant=tenant,
                token_ids=list(self.token_ids),
                num_prompt_tokens=len(self.token_ids),
                max_tokens=self.max_tokens,
                sampling=self.sampling,
                stop_sequences=[stop.encode() for stop in self.stop_sequences],
                queue_seconds=settings.queue_seconds,
                first_token_seconds=settings.first_token_seconds,
                total_seconds=settings.total_seconds,
                choice=choice,
                stop_ids=self.stop_ids,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                grammar=self.grammar,
            )
            for choice in range(self.num_choices)
        ]

    def in_form(self, form: Grammar) -> GenerationRequest:
        """Return the request with a form that its answer must have; InvalidRequestError if it has one already."""
        if self.grammar is not None:
            field = self.grammar.field
            message = f"{field}: cannot be combined with {form.field}: an answer has one form."
            raise InvalidRequestError(message, field)
        return dataclasses.replace(self, grammar=form)

    def ids_left(self, vocab_size: int, model_ends: Collection[int]) -> IdsLeft:
        """Count what may be drawn under its parameters; `model_ends` are the model's own ends."""
        ends = {*self.stop_ids, *(() if self.ignore_eos else model_ends)} if self.min_tokens else None
        sampling = self.sampling
        return count_ids_left(vocab_size, allowed=sampling.allowed_ids or None, banned=sampling.banned_ids, ends=ends)


def fit_max_tokens(
    max_tokens: int | None, default_max_tokens: int | None, num_prompt_tokens: int, limits: NativeLimits
) -> int:
    """Return how long an answer may be; raises PromptTooLongError if prompt and what is asked for do not fit."""
    room = limits.context_tokens - num_prompt_tokens
    asked = max_tokens if max_tokens is not None else min(default_max_tokens or room, max(1, room))
    if room < 1 or asked > room:
        asked = max(1, asked)
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.context_tokens} tokens. However, you requested"
            f" {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} for the completion)."
            " Please reduce the length of the messages."
        )
    return asked


def draw_seed(seed: int | None) -> int:
    """Return the seed of the draws: the caller's, or a random one."""
    return secrets.randbits(SEED_BITS) if seed is None else seed % 2**SEED_BITS
