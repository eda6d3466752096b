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
from inference_api.messages import Grammar, Pooling, Submit
from inference_api.sampling_params import SamplingParams
from inference_api.server.ids_left import IdsLeft, count_ids_left
from inference_api.server.validation import NativeLimits

MAX_CHOICES = 32
"""Generations of one call: as many as there are rows by default."""

MAX_LOGPROBS = 2**18
"""Of one call: 32 whole contexts with three of the likeliest ids each, or 6 with twenty. Each is an object in an answer
that is held whole, and costs its caller no more than a prompt."""

SEED_BITS = 63
"""What keys the draws; a seed below 0 is taken modulo the number of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it, `num_choices` times, or to embed it; `max_tokens` fits the context."""

    token_ids: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    stop_sequences: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    grammar: Grammar | None = None
    num_choices: int = 1
    prompt_logprobs: int | None = None
    """So many of the likeliest ids are reported beside each id of the prompt."""
    pooling: Pooling | None = None
    batches: bool = False
    """It may wait for others like it."""
    priority: int = 0
    deadline_seconds: float | None = None
    """The caller's own limit on the whole request, where there is one."""
    keeps_stop: bool = False
    """The stop sequence that ends an answer is part of it."""

    def submits(self, request_id: str, tenant: str, settings: Settings) -> list[Submit]:
        """Return a Submit a choice; they differ in session and choice, which also keys the draws.

        Raises InvalidRequestError for a deadline over the service's own.
        """
        total_seconds = self._total_seconds(settings.total_seconds)
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
                queue_seconds=min(settings.queue_seconds, total_seconds),
                first_token_seconds=min(settings.first_token_seconds, total_seconds),
                total_seconds=total_seconds,
                choice=choice,
                stop_ids=self.stop_ids,
                min_tokens=self.min_tokens,
                ignore_eos=self.ignore_eos,
                grammar=self.grammar,
                prompt_logprobs=self.prompt_logprobs,
                pooling=self.pooling,
                batches=self.batches,
                priority=self.priority,
            )
            for choice in range(self.num_choices)
        ]

    def _total_seconds(self, limit_seconds: float) -> float:
        if self.deadline_seconds is None:
            return limit_seconds
        if self.deadline_seconds > limit_seconds:
            message = f"deadline: {self.deadline_seconds:g} seconds are over the limit of {limit_seconds:g} seconds."
            raise InvalidRequestError(message, "deadline")
        return self.deadline_seconds

    def scoring_prompt(self, num_top: int | None) -> GenerationRequest:
        """Return the request with its prompt's logprobs, `num_top` of the likeliest ids beside each; None: as it is."""
        return self if num_top is None else dataclasses.replace(self, prompt_logprobs=num_top)

    @property
    def num_logprobs(self) -> int:
        """The most that one answer to it may tell: of its prompt's tokens, and of its own."""
        asked = ((len(self.token_ids), self.prompt_logprobs), (self.max_tokens, self.sampling.logprobs))
        return sum(num_tokens * (num_top + 1) for num_tokens, num_top in asked if num_top is not None)

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


def check_logprobs(requests: Sequence[GenerationRequest]) -> None:
    """Raise InvalidRequestError if one call may come to more logprobs, of prompts and answers, than it is told."""
    num_logprobs = sum(one.num_choices * one.num_logprobs for one in requests)
    if num_logprobs > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"logprobs: a call of so many prompts, answers and max_tokens comes to {num_logprobs}, at most"
            f" {MAX_LOGPROBS} are told.",
            "logprobs",
        )


def fit_max_tokens(
    max_tokens: int | None, default_max_tokens: int | None, num_prompt_tokens: int, limits: NativeLimits
) -> int:
    """Return how long an answer may be; raises PromptTooLongError if prompt and what is asked for do not fit.

    Where nothing is to be generated, `max_tokens` 0, the prompt may fill the context.
    """
    room = limits.context_tokens - num_prompt_tokens
    asked = max_tokens if max_tokens is not None else min(default_max_tokens or room, max(1, room))
    if asked > room or (room < 1 and max_tokens != 0):
        asked = max(1, asked) if max_tokens != 0 else 0
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.context_tokens} tokens. However, you requested"
            f" {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} for the completion)."
            " Please reduce the length of the messages."
        )
    return asked


def draw_seed(seed: int | None) -> int:
    """Return the seed of the draws: the caller's, or a random one."""
    return secrets.randbits(SEED_BITS) if seed is None else seed % 2**SEED_BITS
