"""Turn a parsed body of the Responses API and its prompt's ids into a GenerationRequest.

Runs in PROCESS 1. Knows what an absent member means; no Flask, no words of answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from inference_api.errors import InvalidRequestError
from inference_api.messages import Grammar, GrammarKind
from inference_api.sampling_params import SamplingParams
from inference_api.server.generation_request import GenerationRequest, draw_seed, fit_max_tokens
from inference_api.server.openai_responses.bodies import LOGPROBS, ResponsesBody, TextFormat
from inference_api.server.tools.definitions import FunctionDefinition, callable_now
from inference_api.server.validation import NativeLimits

_FORMAT = "text.format"


def make_request(
    body: ResponsesBody, token_ids: Sequence[int], limits: NativeLimits, *, seed: int | None = None
) -> GenerationRequest:
    """Return what is to be generated after `token_ids`; without a seed one is drawn.

    Raises PromptTooLongError for what does not fit, InvalidRequestError for a form that is none.
    """
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0,
        top_p=1.0 if body.top_p is None else body.top_p,
        seed=draw_seed(seed),
        logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )
    max_tokens = fit_max_tokens(body.max_output_tokens, None, len(token_ids), limits)
    form = _form(body.text.format) if body.text is not None and body.text.format is not None else None
    return GenerationRequest(
        token_ids,
        sampling,
        max_tokens,
        grammar=form,
        priority=body.priority or 0,
        deadline_seconds=body.deadline,
    )


def functions_of(body: ResponsesBody) -> list[FunctionDefinition]:
    """Return the functions that the model may call now.

    Raises InvalidRequestError for tools and a choice that do not fit each other, and for logprobs beside functions.
    """
    functions = callable_now(body.tools or (), body.tool_choice, "name")
    if functions and body.wants_logprobs:
        raise InvalidRequestError(
            f"include: {LOGPROBS} cannot go with tools: a call is no text of its tokens.", "include"
        )
    return functions


def must_call(body: ResponsesBody) -> bool:
    """Tell whether the answer has to be a call."""
    return body.tool_choice not in (None, "none", "auto")


def _form(given: TextFormat) -> Grammar | None:
    if given.type != "json_schema":
        for member, value in given.model_dump(by_alias=True, exclude={"type"}).items():
            if value is not None:
                name = f"{_FORMAT}.{member}"
                message = f"{name}: is allowed only when {_FORMAT}.type is json_schema; it is {given.type}."
                raise InvalidRequestError(message, name)
        return Grammar(GrammarKind.JSON_OBJECT, field=_FORMAT) if given.type == "json_object" else None
    for member, value in (("name", given.name), ("schema", given.schema_)):
        if value is None:
            raise InvalidRequestError(f"Missing required parameter: {_FORMAT}.{member}.", f"{_FORMAT}.{member}")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(given.schema_), f"{_FORMAT}.schema")
