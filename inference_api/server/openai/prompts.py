"""Turn what OpenAI's bodies may hold as a prompt, one text or several, or their token ids, into ids.

Runs in PROCESS 1. A text is a caller's: nothing in it becomes a control id. Ids are taken as they are. Pure; knows no
Flask and no body.
"""

from __future__ import annotations

from inference_api.errors import InvalidRequestError
from inference_api.server.openai.requests import known_ids
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.validation import NativeLimits


def ids_of_each(name: str, given: object, tokenizer: Tokenizer, limits: NativeLimits) -> list[list[int]]:
    """Return the ids of each prompt that the member `name` holds.

    Raises InvalidRequestError for an empty prompt, and for ids outside the vocabulary, by their place.
    """
    if isinstance(given, list) and not isinstance(given[0], int):
        return [_ids_of(f"{name}[{place}]", prompt, tokenizer, limits) for place, prompt in enumerate(given)]
    return [_ids_of(name, given, tokenizer, limits)]


def _ids_of(name: str, prompt: object, tokenizer: Tokenizer, limits: NativeLimits) -> list[int]:
    token_ids = tokenizer.encode(prompt, field=name) if isinstance(prompt, str) else prompt
    if not isinstance(token_ids, list) or not token_ids:
        raise InvalidRequestError(f"{name}: is empty; at least one token is needed.", name)
    known_ids(name, token_ids, limits)
    return token_ids
