"""Turn a parsed TGI body and its prompt's ids into a GenerationRequest, and refuse what does not go together.

Runs in PROCESS 1. Knows what an absent member means; no Flask, no words of answers.
"""

from __future__ import annotations

import json
from typing import Any

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import GenerationRequest, draw_seed, fit_max_tokens
from inference_api.server.tgi.bodies import GenerateParameters, GrammarParameter
from inference_api.server.validation import NativeLimits

DEFAULT_NEW_TOKENS = 100
"""TGI's documented default of `max_new_tokens`, docs/openapi.json; less where the context has no room for it."""

_SHARED_OPTIONS = ("typical_p", "frequency_penalty", "repetition_penalty")


def check_together(parameters: GenerateParameters, *, streams: bool) -> None:
    """Raise InvalidRequestError for members that are fine alone and not together, as TGI does."""
    best_of = parameters.best_of or 1
    if best_of > 1 and not parameters.draws:
        raise _refused("best_of", f"{best_of} greedy answers are all alike; it needs do_sample or a temperature.")
    if best_of > 1 and streams:
        raise _refused("best_of", f"{best_of} answers cannot be streamed; use /generate, or 1.")
    if parameters.decoder_input_details and streams:
        raise _refused("decoder_input_details", "the prompt's tokens are not streamed; use /generate.")


def make_request(
    parameters: GenerateParameters, token_ids: list[int], limits: NativeLimits, *, reports_tokens: bool
) -> GenerationRequest:
    """Return what is to be generated after `token_ids`, of which `truncate` keeps the last ones.

    With `reports_tokens` each id comes with its logprob. Raises PromptTooLongError for what does not fit.
    """
    if parameters.truncate is not None:
        token_ids = token_ids[-parameters.truncate :]
    best_of = parameters.best_of or 1
    wants_logprobs = reports_tokens or best_of > 1
    return GenerationRequest(
        token_ids,
        _sampling(parameters, limits, logprobs=(parameters.top_n_tokens or 0) if wants_logprobs else None),
        fit_max_tokens(parameters.max_new_tokens, DEFAULT_NEW_TOKENS, len(token_ids), limits),
        stop_sequences=tuple(parameters.stop or ()),
        num_choices=best_of,
        grammar=_form(parameters.grammar) if parameters.grammar is not None else None,
    )


def _form(given: GrammarParameter) -> Grammar:
    """Return the form; raises InvalidRequestError for a value that is none of its type."""
    name, value = "grammar.value", given.value
    if given.type == "regex":
        if not isinstance(value, str):
            raise _refused(name, "a regular expression is a string; it is an object.")
        return Grammar(GrammarKind.REGEX, value, f"parameters.{name}")
    if given.type == "json_schema":
        if not isinstance(value, dict):
            raise _refused(name, "must be an object with the member schema; it is a string.")
        for member in value:
            if member not in ("name", "schema"):
                raise _refused(f"{name}.{member[:64]}", "is unknown; the members are name and schema.")
        name, schema = f"{name}.schema", value.get("schema")
        if not isinstance(schema, dict):
            raise _refused(name, "must be a JSON schema, which is an object.")
        value = schema
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar(GrammarKind.JSON_SCHEMA, text, f"parameters.{name}")


def _sampling(parameters: GenerateParameters, limits: NativeLimits, *, logprobs: int | None) -> SamplingParams:
    options: dict[str, Any] = {
        name: getattr(parameters, name) for name in _SHARED_OPTIONS if getattr(parameters, name) is not None
    }
    drawn_at = 1.0 if parameters.temperature is None else parameters.temperature
    return SamplingParams(
        temperature=drawn_at if parameters.draws else 0.0,
        top_k=min(parameters.top_k or 0, limits.vocab_size),
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        seed=draw_seed(parameters.seed),
        logprobs=logprobs,
        **options,
    )


def _refused(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"parameters.{name}: {why}", f"parameters.{name}")
