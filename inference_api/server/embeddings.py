"""Own `POST /v1/embeddings`, OpenAI's: its body, its bounds, and how an embedding is normalised and written.

Runs in PROCESS 1. The backend pools a prompt's hidden states into numbers of single precision; here they get the length
1, computed in double precision, so that an embedding depends on its own input alone. Knows no engine.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from flask import Blueprint, Response, request
from pydantic import Field, field_validator

from inference_api.errors import GenerationError, InvalidRequestError, WarmingError
from inference_api.messages import Pooling, Ready
from inference_api.sampling_params import SamplingParams
from inference_api.server.bodies import StrictModel, TokenIds, parse_body, refuse_too_many
from inference_api.server.choices import Answer
from inference_api.server.context import ServerContext, check_model, start_choices
from inference_api.server.generation_request import GenerationRequest, fit_max_tokens
from inference_api.server.openai.prompts import ids_of_each
from inference_api.server.responses import large_json_response
from inference_api.server.validation import NativeLimits

MAX_INPUTS = 256
"""Of one call. Each costs a few bytes to ask for, and kilobytes to answer."""

_NOT_DRAWN = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_NO_EMBEDDING = "The model made no embedding of an input."


class EmbeddingsBody(StrictModel):
    """The body of `POST /v1/embeddings`."""

    NO_EFFECT: ClassVar[tuple[str, ...]] = ("user",)
    """Members that are accepted and cannot change an answer."""

    model: str = Field(description="One of the served models' names.")
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=MAX_INPUTS)]
    ) = Field(description="What is embedded: texts, or their token ids.", examples=["Once upon a time"])
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of little-endian numbers of single precision; default float."
    )
    dimensions: int | None = Field(None, ge=1, description="Refused unless it is the model's own number.")
    pooling: Literal["mean", "last"] | None = Field(
        None, description="The mean of all tokens' hidden states, or the last one's; default mean."
    )
    normalize: bool | None = Field(None, description="Gives every embedding the length 1; default true.")
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _refuse_too_many(cls, given: object) -> object:
        return refuse_too_many(given, MAX_INPUTS)


def make_embeddings_blueprint(context: ServerContext) -> Blueprint:
    """Return the route."""
    blueprint = Blueprint("embeddings", __name__, url_prefix="/v1")
    route = EmbeddingsRoute(context)
    blueprint.add_url_rule("/embeddings", "embed", route.embed, methods=["POST"])
    return blueprint


class EmbeddingsRoute:
    """The view function over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def embed(self) -> Response:
        """Embed one or several texts."""
        body = parse_body(EmbeddingsBody, request.get_data(cache=False), request.headers.get("Content-Type"))
        check_model(body.model, self._context)
        ready = self._ready()
        _check_dimensions(body, ready)
        limits = self._context.limits
        prompts = ids_of_each("input", body.input, self._context.tokenizer, limits)
        wanted = [_request(token_ids, Pooling(body.pooling or "mean"), limits) for token_ids in prompts]
        # Half of the rows: whatever one call asks for, other calls find a row.
        choices = start_choices(wanted, self._context, max_open=max(1, ready.num_rows // 2))
        try:
            answers = choices.answers()
        finally:
            choices.close()
        data = [
            {"object": "embedding", "index": index, "embedding": _written(answer, body)}
            for index, answer in enumerate(answers)
        ]
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return large_json_response(200, {"object": "list", "data": data, "model": body.model, "usage": usage})

    def _ready(self) -> Ready:
        ready = self._context.client.ready
        if ready is None:
            raise WarmingError("The model is not ready yet, try again later.", 1.0)
        if not ready.embedding_size:
            raise InvalidRequestError(f"model: the engine {ready.engine} makes no embeddings.", "model")
        return ready


def _request(token_ids: Sequence[int], pooling: Pooling, limits: NativeLimits) -> GenerationRequest:
    """Return what asks for one embedding; raises PromptTooLongError."""
    max_tokens = fit_max_tokens(0, None, len(token_ids), limits)
    return GenerationRequest(token_ids, _NOT_DRAWN, max_tokens, pooling=pooling, batches=True)


def _check_dimensions(body: EmbeddingsBody, ready: Ready) -> None:
    if body.dimensions is not None and body.dimensions != ready.embedding_size:
        raise InvalidRequestError(
            f"dimensions: is {body.dimensions}, but an embedding of this model has {ready.embedding_size} numbers;"
            " leave it out.",
            "dimensions",
        )


def _written(answer: Answer, body: EmbeddingsBody) -> str | list[float]:
    """Return an answer's embedding as the body wants it; raises GenerationError for one that is none."""
    pooled = answer.finished.embedding
    if pooled is None or not all(map(math.isfinite, _unpacked(pooled))):
        raise GenerationError(_NO_EMBEDDING)
    packed = pooled if body.normalize is False else normalised(pooled)
    return base64.b64encode(packed).decode() if body.encoding_format == "base64" else list(_unpacked(packed))


def normalised(embedding: bytes) -> bytes:
    """Return the embedding, little-endian fp32 as it comes, with the length 1; raises GenerationError if it has none.

    The sum is exact before it is rounded, and one rounding to fp32 comes at the end: the length is off by 1e-7 at most.
    """
    numbers = _unpacked(embedding)
    length = math.sqrt(math.fsum(number * number for number in numbers))
    if not length:
        raise GenerationError(_NO_EMBEDDING)
    return struct.pack(f"<{len(numbers)}f", *(number / length for number in numbers))


def _unpacked(embedding: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(embedding) // 4}f", embedding)
