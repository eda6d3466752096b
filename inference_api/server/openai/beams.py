"""Answer an OpenAI call by beam search: what it may ask for beside, and how what was found becomes its choices.

Runs in PROCESS 1, in the request's own thread. The members are vLLM's; the search is beam.py's, and its rounds are
asked for by beam_rounds.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from flask import request

from inference_api.errors import InvalidRequestError
from inference_api.messages import NO_TIMING, Finished, FinishReason
from inference_api.sampling_params import SamplingParams
from inference_api.server.beam import Beam, BeamOptions
from inference_api.server.beam_rounds import BeamRounds, Caller
from inference_api.server.choices import Answer
from inference_api.server.context import ServerContext, current_call
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.idempotency import KEY_HEADER
from inference_api.server.openai.bodies import SamplingBody
from inference_api.server.tokenizer import IncrementalDecoder

_MEMBER_OF = {"allowed_ids": "allowed_token_ids", "banned_ids": "bad_words", "bad_sequences": "bad_words"}
"""The members that SamplingParams calls otherwise."""

_GREEDY = SamplingParams(0.0, 0, 1.0, 0)


def search_beams(
    body: SamplingBody, generations: Sequence[GenerationRequest], num_kept: int | None, context: ServerContext
) -> tuple[list[Answer], BeamRounds]:
    """Block for the `num_kept` best continuations of each prompt, or all that were looked for, best first.

    `generations` ask for as many choices as the search is wide. Raises InvalidRequestError for members that a search
    has no use for, and what `BeamRounds.search` raises.
    """
    call, options = current_call(), []
    if call.key is not None:
        raise InvalidRequestError(f"{KEY_HEADER}: cannot go with use_beam_search.", KEY_HEADER)
    for generation in generations:
        refuse_beside_beams(body, generation)
        ends = frozenset(() if generation.ignore_eos else context.limits.stop_ids) | frozenset(generation.stop_ids)
        options.append(
            BeamOptions(
                generation.num_choices,
                generation.max_tokens,
                ends,
                1.0 if body.length_penalty is None else body.length_penalty,
                body.early_stopping or False,
            )
        )
    ready = context.client.ready
    # Before it is ready the first request is refused.
    max_open = ready.num_rows if ready is not None else 1
    rounds = BeamRounds(generations, options, context.settings, lambda ids: context.make_generation(ids, ()), max_open)
    call.generation = rounds
    searches = rounds.search(Caller(call.request_id, call.claims.tenant, request.environ.get("gunicorn.socket")))
    answers = [
        _answer(generation, beam, one.end_ids, context)
        for generation, search, one in zip(generations, searches, options, strict=True)
        for beam in search.final[: num_kept or one.width]
    ]
    return answers, rounds


def refuse_beside_beams(body: SamplingBody, generation: GenerationRequest) -> None:
    """Raise InvalidRequestError for a member that would have no effect on a search, or none that could be told."""
    if body.temperature:
        raise InvalidRequestError("temperature: must be 0 with use_beam_search: nothing is drawn.", "temperature")
    for name in SamplingParams.__struct_fields__:
        is_free = name in ("temperature", "seed", "logprobs")
        if not is_free and getattr(generation.sampling, name) != getattr(_GREEDY, name):
            _refuse(_MEMBER_OF.get(name, name))
    asked = [name for name in ("stream", "stop", "min_tokens", "tools") if getattr(body, name, None)]
    for name in ("logprobs", "prompt_logprobs"):
        given = getattr(body, name, None)
        if given is not None and given is not False:  # a number 0 asks for something too
            asked.append(name)
    if asked:
        _refuse(asked[0])
    if generation.grammar is not None:
        _refuse(generation.grammar.field)
    if generation.max_tokens < 1:
        _refuse("max_tokens")


def _refuse(name: str) -> None:
    raise InvalidRequestError(f"{name}: cannot go with use_beam_search.", name)


def _answer(generation: GenerationRequest, beam: Beam, end_ids: frozenset[int], context: ServerContext) -> Answer:
    decoder = IncrementalDecoder(context.tokenizer, generation.token_ids)
    text = decoder.decode(beam.token_ids) + decoder.flush()
    reason = FinishReason.STOP if beam.token_ids[-1] in end_ids else FinishReason.LENGTH
    return Answer(text, Finished(reason, len(beam.token_ids), NO_TIMING), ())
