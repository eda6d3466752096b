"""Turn a parsed OpenAI body and its prompt's ids into a GenerationRequest.

Runs in PROCESS 1. Knows what the model can hold and what an absent member means; no Flask, no words of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import GenerationRequest, draw_seed, fit_max_tokens
from inference_api.server.openai.bodies import SamplingBody
from inference_api.server.openai.sampler_members import refuse_conflicts, sampler_options
from inference_api.server.openai.structured import grammar_of
from inference_api.server.validation import NativeLimits, distinct


def make_request(
    body: SamplingBody,
    token_ids: Sequence[int],
    limits: NativeLimits,
    *,
    max_tokens: int | None,
    num_choices: int = 1,
    logprobs: int | None = None,
) -> GenerationRequest:
    """Return what is to be generated after `token_ids`, which are ids of the vocabulary.

    `max_tokens` None: as long as the context lets it. Raises PromptTooLongError for what does not fit,
    InvalidRequestError for ids outside the vocabulary and for members that leave nothing to draw.
    """
    fitting = fit_max_tokens(max_tokens, None, len(token_ids), limits)
    min_tokens = body.min_tokens or 0
    if min_tokens > fitting:
        raise InvalidRequestError(f"min_tokens: {min_tokens} is over max_tokens, which is {fitting}.", "min_tokens")
    form = grammar_of(body)
    check_form(form, body)
    generation = GenerationRequest(
        token_ids,
        _sampling(body, limits, logprobs),
        fitting,
        stop_sequences=tuple(body.stop or ()),
        stop_ids=distinct(known_ids("stop_token_ids", body.stop_token_ids, limits)),
        min_tokens=min_tokens,
        ignore_eos=bool(body.ignore_eos),
        grammar=form,
        num_choices=num_choices,
        priority=body.priority or 0,
        deadline_seconds=body.deadline,
        keeps_stop=bool(body.include_stop_str_in_output),
    )
    refuse_conflicts(body, generation)
    _check_ids_left(generation, limits)
    return generation


def _check_ids_left(generation: GenerationRequest, limits: NativeLimits) -> None:
    """Raise InvalidRequestError if all that may be drawn would end an answer that must not end yet."""
    left = generation.ids_left(limits.vocab_size, limits.stop_ids)
    if not left.num_going_on:
        raise InvalidRequestError(
            f"min_tokens: {generation.min_tokens} is over 0, but all {left.num_drawable} ids that may be drawn end the"
            " answer.",
            "min_tokens",
        )


def check_form(grammar: Grammar | None, body: SamplingBody) -> None:
    """Raise InvalidRequestError for members that could keep an answer in a form, if there is one, from its end."""
    if grammar is not None:
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(body, name):
                message = f"{name}: cannot be combined with {grammar.field}: an answer in a form ends when it is whole."
                raise InvalidRequestError(message, name)


def known_ids(name: str, token_ids: Sequence[int] | None, limits: NativeLimits) -> Sequence[int]:
    """Return the ids; raises InvalidRequestError for the first one outside the vocabulary, by its place in `name`."""
    for place, token_id in enumerate(token_ids or ()):
        if token_id >= limits.vocab_size:
            raise _outside(name, place, token_id, limits)
    return token_ids or ()


def _sampling(body: SamplingBody, limits: NativeLimits, logprobs: int | None) -> SamplingParams:
    options: dict[str, Any] = {
        name: getattr(body, name)
        for name in ("min_p", "typical_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        if getattr(body, name) is not None
    }
    options |= sampler_options(body)
    if body.logit_bias:
        options["logit_bias"] = _biases(body.logit_bias, limits)
    if body.allowed_token_ids:
        options["allowed_ids"] = distinct(known_ids("allowed_token_ids", body.allowed_token_ids, limits))
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=min(max(body.top_k or 0, 0), limits.vocab_size),
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=draw_seed(body.seed),
        logprobs=logprobs,
        **options,
    )


def _biases(given: Mapping[str, float], limits: NativeLimits) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token_id = _bias_id(key, limits)
        if token_id in biases:
            raise InvalidRequestError(f"logit_bias[{token_id}]: is given more than once; send it once.", "logit_bias")
        biases[token_id] = bias
    return biases


def _bias_id(key: str, limits: NativeLimits) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= len(str(limits.vocab_size))):
        raise InvalidRequestError(f"logit_bias: {key[:64]!r} is not a token id.", "logit_bias")
    if int(key) >= limits.vocab_size:
        raise _outside("logit_bias", key, int(key), limits)
    return int(key)


def _outside(name: str, place: int | str, token_id: int, limits: NativeLimits) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}[{place}]: {token_id} is outside the vocabulary, whose last id is {limits.vocab_size - 1}.", name
    )
