"""Continue a prompt that is a request's whole body, and answer as a text-generation pipeline's web server does.

Runs in PROCESS 1. The body is the prompt byte for byte, and there is nowhere to put a parameter: the answer is greedy,
of a fixed length at most, and begins with the prompt. Errors are the native ones. Knows no other kind of body.
"""

from __future__ import annotations

from flask import Response, request

from inference_api.errors import InvalidRequestError
from inference_api.sampling_params import SamplingParams
from inference_api.server.context import ServerContext, start_choices
from inference_api.server.generation_request import GenerationRequest
from inference_api.server.responses import json_response

MAX_NEW_TOKENS = 128
"""The default of the raw route `/inference`; less where the context has no room for it."""

MASK_TEXT = "[MASK]"
"""What a masked model fills in, as BERT's tokenizer spells it; a model that continues texts has no use for it."""

_GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0)
_CHARSETS = ("utf-8", "utf8", "us-ascii")


class RawBodyRoute:
    """The view function over one ServerContext."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def answer(self) -> Response:
        """Return the prompt with its continuation, in a list of one."""
        prompt = _prompt()
        token_ids = self._context.tokenizer.encode(prompt, field="The body")
        max_tokens = self._context.limits.fit_max_tokens(MAX_NEW_TOKENS, len(token_ids))
        wanted = GenerationRequest(token_ids, _GREEDY, max_tokens, batches=True)
        choices = start_choices([wanted], self._context)
        try:
            [answer] = choices.answers()
        finally:
            choices.close()
        return json_response(200, [{"generated_text": prompt + answer.text}])


def _prompt() -> str:
    """Return the body as text; raises InvalidRequestError for one that is empty, no UTF-8, or asks for a mask."""
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in _CHARSETS:
        raise InvalidRequestError(f"The body must be UTF-8; it is declared as {charset[:64]!r}.")
    try:
        # The bytes as they came: a form would be taken apart, and its percent signs decoded.
        prompt = request.get_data().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"The body must be UTF-8; byte {error.start} is not.") from None
    if not prompt:
        raise InvalidRequestError("The body is empty; it is the prompt.")
    if MASK_TEXT in prompt:
        raise InvalidRequestError(
            f"The body holds {MASK_TEXT}, but the model continues texts and fills no masks; the task fill-mask is not"
            " served here."
        )
    return prompt
