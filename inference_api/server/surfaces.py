"""Choose how an error is told: each API has an error body of its own, and its clients match on it.

Runs in PROCESS 1. Inner code raises, the application's handlers ask here, by the path of the call. Knows no route
beyond the beginning of its path.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import Response

from inference_api.errors import InferenceApiError
from inference_api.server.anthropic.errors import anthropic_error_response
from inference_api.server.openai.errors import openai_error_response
from inference_api.server.openai_responses.errors import response_error_response
from inference_api.server.responses import error_response
from inference_api.server.tgi.errors import tgi_error_response

ErrorEncoder = Callable[[InferenceApiError], Response]

ENCODERS: tuple[tuple[str, ErrorEncoder], ...] = (
    ("/v1/requests/", error_response),
    ("/v1/responses/", response_error_response),
    ("/v1/messages", anthropic_error_response),
    ("/v1/", openai_error_response),
    *((path, openai_error_response) for path in ("/tokenize", "/detokenize", "/apply-template", "/slots", "/props")),
    ("/generate", tgi_error_response),
    ("/", error_response),
)
"""Beginnings of paths and what encodes the errors below; the first that fits counts.

The routes that vLLM and llama.cpp have outside of /v1 tell errors as OpenAI does, as those servers do.
"""

ROOT_ENCODER: ErrorEncoder = tgi_error_response
"""What encodes the errors of the path `/` itself: what is posted there is TGI's."""


def encode_error(path: str, error: InferenceApiError) -> Response:
    """Return the response that tells of `error` in the words of the API that `path` belongs to."""
    encode = next(encode for beginning, encode in ENCODERS if path.startswith(beginning))
    return ROOT_ENCODER(error) if path == "/" else encode(error)
