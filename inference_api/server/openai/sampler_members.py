"""Own the members of OpenAI's bodies that come from other servers' samplers: llama.cpp's rules and vLLM's lists.

Runs in PROCESS 1. Beside each member's type and bounds it says what it becomes in SamplingParams; what goes together is
sampler_rules.py's. Pure but for the tokenizer that it is given; knows no Flask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from inference_api.errors import InvalidRequestError
from inference_api.server.bodies import MAX_COUNT, StopText
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.openai.structured import StructuredBody
from inference_api.server.sampler_rules import MAX_BREAKER_CHARS, MAX_BREAKERS, breakers_as_bytes, find_conflict
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.validation import NativeLimits

MAX_BAD_WORDS = 128

_SAME_NAMES = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta"),
)


class SamplerBody(StructuredBody):
    """What chat and text completions take beside OpenAI's own ways to draw and to end; null is absent."""

    dry_multiplier: float | None = Field(None, ge=0, le=100, description="Loss of tokens that go on with a repetition.")
    dry_base: float | None = Field(None, ge=1, le=100, description="Times this for each further token; default 1.75.")
    dry_allowed_length: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="So many tokens may be repeated; default 2."
    )
    dry_penalty_last_n: int | None = Field(
        None, ge=-1, le=MAX_COUNT, description="Looks at so many last tokens; default -1: all."
    )
    dry_sequence_breakers: list[Annotated[str, Field(min_length=1, max_length=MAX_BREAKER_CHARS)]] | None = Field(
        None, max_length=MAX_BREAKERS, description="Texts over which no repetition goes on."
    )
    top_n_sigma: float | None = Field(
        None, ge=-1, le=100, description="Keeps logits so many standard deviations below the highest; 0 and below: all."
    )
    xtc_probability: float | None = Field(None, ge=0, le=1, description="How often the likeliest tokens are taken out.")
    xtc_threshold: float | None = Field(
        None, ge=0, le=1, description="Those of this share, but for the least likely of them; default 0.1."
    )
    mirostat: Literal[0, 1, 2] | None = Field(None, description="Keeps the surprise near mirostat_tau; its version.")
    mirostat_tau: float | None = Field(None, ge=0, le=100, description="That surprise in bits; default 5.")
    mirostat_eta: float | None = Field(None, ge=0, le=1, description="How fast it is held; default 0.1.")
    bad_words: list[StopText] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Texts whose tokens an answer does not hold."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Leaves the stop in the answer.")
    use_beam_search: bool | None = Field(None, description="Returns the n likeliest answers instead of drawing them.")
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Divides an answer's logprob by its length to this power; default 1."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="Whether a search ends with its first answers; default false."
    )


def sampler_options(body: SamplerBody) -> dict[str, Any]:
    """Return what the members become in SamplingParams; those of a rule that is off are left out."""
    options = {name: getattr(body, name) for name in _SAME_NAMES if getattr(body, name) is not None}
    if body.dry_multiplier:
        options["dry_sequence_breakers"] = breakers_as_bytes(body.dry_sequence_breakers)
    if body.top_n_sigma is not None and body.top_n_sigma > 0:
        options["top_n_sigma"] = body.top_n_sigma
    return options


def without_bad_words(
    generations: Sequence[GenerationRequest], words: Sequence[str], tokenizer: Tokenizer, limits: NativeLimits
) -> list[GenerationRequest]:
    """Return the requests with the words' tokens ruled out, at the beginning of a line and behind a blank.

    Raises InvalidRequestError if they leave nothing to draw.
    """
    runs = dict.fromkeys(run for word in words for run in _runs_of(word, tokenizer))
    banned_ids = tuple(run[0] for run in runs if len(run) == 1)
    bad_sequences = tuple(run for run in runs if len(run) > 1)
    found = []
    for generation in generations:
        sampling = msgspec.structs.replace(generation.sampling, banned_ids=banned_ids, bad_sequences=bad_sequences)
        found.append(dataclasses.replace(generation, sampling=sampling))
        if not found[-1].ids_left(limits.vocab_size, limits.stop_ids).num_going_on:
            raise InvalidRequestError("bad_words: they leave no token to draw.", "bad_words")
    return found


def _runs_of(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the ids that a word is written with; with a blank before it too, if that is another first id.

    As vLLM, vllm/sampling_params.py, `SamplingParams.update_from_tokenizer`.
    """
    plain, spaced = (_ids(text, tokenizer) for text in (word.lstrip() or word, f" {word.lstrip()}"))
    differs = spaced[:1] != plain[:1] and len(spaced) == len(plain)
    return [run for run in (plain, spaced if differs else ()) if run]


def _ids(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(span.token_id for span in tokenizer.encode_spans(text, field="bad_words", whole_prompt=False))


def refuse_conflicts(body: SamplerBody, generation: GenerationRequest) -> None:
    """Raise InvalidRequestError for a member that makes no sense beside the others."""
    for name in ("length_penalty", "early_stopping"):
        if getattr(body, name) is not None and not body.use_beam_search:
            raise InvalidRequestError(f"{name}: is allowed only with use_beam_search.", name)
    conflict = find_conflict(generation.sampling)
    if conflict is not None:
        raise InvalidRequestError(f"{conflict.name}: {conflict.reason}", conflict.name)
