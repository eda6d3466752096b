"""Choose how an error is told: each API has an error body of its own, and its clients match on it.

Runs in PROCESS 1. Inner code raises, the application's handlers ask here, by the path of the call, and of `/` by what
it sends. Knows no route beyond the beginning of its path.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import Response

from inference_api.errors import InferenceApiError
from inference_api.server.anthropic.errors import anthropic_error_response
from inference_api.server.openai.errors import openai_error_response
from inference_api.server.responses import error_response
from inference_api.server.tgi.errors import tgi_error_response

ErrorEncoder = Callable[[InferenceApiError], Response]

ENCODERS: tuple[tuple[str, ErrorEncoder], ...] = (
    ("/v1/requests/", error_response),
    ("/v1/messages", anthropic_error_response),
    ("/v1/", openai_error_response),
    *((path, openai_error_response) for path in ("/tokenize", "/detokenize", "/apply-template", "/slots", "/props")),
    ("/generate", tgi_error_response),
    ("/", error_response),
)
"""Beginnings of paths and what encodes the errors below; the first that fits counts.

The routes that vLLM and llama.cpp have outside of /v1 tell errors as OpenAI does, as those servers do.
"""


def encode_error(path: str, error: InferenceApiError, media_type: str = "") -> Response:
    """Return the response that tells of `error` in the words of the API that `path` belongs to.

    JSON that is posted to `/` itself is TGI's; whatever else is, the native error tells.
    """
    if path == "/" and media_type == "application/json":
        return tgi_error_response(error)
    encode = next(encode for beginning, encode in ENCODERS if path.startswith(beginning))
    return encode(error)
