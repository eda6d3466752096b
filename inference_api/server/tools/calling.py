"""Turn a request into one whose answer may call functions, or must, and say in which formats it does; PROCESS 1, pure.

Knows no API's words for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from inference_api.server.generation_request import GenerationRequest
from inference_api.server.tools.definitions import FunctionDefinition, forced_call
from inference_api.server.tools.formats import FORCED, HERMES, CallFormat


def made_to_call(
    generation: GenerationRequest,
    functions: Sequence[FunctionDefinition],
    formats: Sequence[CallFormat],
    *,
    must_call: bool,
    one_call: bool,
) -> tuple[GenerationRequest, Sequence[CallFormat]]:
    """Return the request and the formats that its answer's calls come in, of which `formats` are the model's.

    With `must_call` the answer is one call; with `one_call` it ends after its first. Raises InvalidRequestError for
    a form that the answer must have beside a call.
    """
    if must_call:
        return generation.in_form(forced_call(functions)), (FORCED,)
    if one_call:
        stops = (*generation.stop_sequences, HERMES.end)
        generation = dataclasses.replace(generation, stop_sequences=stops)
    return generation, formats


def call_hex(request_id: str, answer: int, place: int) -> str:
    """Return 24 digits that name the call at `place` of an answer, the same in every repetition of the request."""
    return hashlib.sha256(f"{request_id} {answer} {place}".encode()).hexdigest()[:24]
