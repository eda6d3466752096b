"""Show ids with their logprobs as OpenAI's two APIs do; PROCESS 1. Knows no streams and no bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference_api.server.prompt_tokens import PromptToken, with_top
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer


def chat_logprobs(tokens: Iterable[TokenText], tokenizer: Tokenizer) -> dict[str, object]:
    """Return the `logprobs` of a chat choice; the joined `token` texts are the content."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprobs.logprob,
                "bytes": list(tokenizer.piece_bytes(token.token_id)),
                "top_logprobs": [
                    {
                        "token": tokenizer.piece_text(token_id),
                        "logprob": logprob,
                        "bytes": list(tokenizer.piece_bytes(token_id)),
                    }
                    for token_id, logprob in token.logprobs.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Sequence[TokenText | PromptToken], tokenizer: Tokenizer, *, first_offset: int
) -> dict[str, object]:
    """Return the `logprobs` of a text choice; the first text begins at `first_offset` in the choice's text.

    A prompt's first token has null in the place of its logprobs, as OpenAI's and vLLM's have.
    """
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprobs.logprob if token.logprobs is not None else None for token in tokens],
        "top_logprobs": [_top(token, tokenizer) for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[PromptToken], tokenizer: Tokenizer, num_top: int) -> list[object]:
    """Return vLLM's `prompt_logprobs`: for each token an object of the ids that could stand there, the first one null.

    The token itself stands first; its rank is null where it is not among the `num_top` likeliest.
    """
    return [_likelihoods(with_top(token, num_top), tokenizer) for token in tokens]


def _likelihoods(token: PromptToken, tokenizer: Tokenizer) -> dict[str, object] | None:
    if token.logprobs is None:
        return None
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.logprobs.top, start=1)}
    found = {token.token_id: token.logprobs.logprob, **dict(token.logprobs.top)}
    return {
        str(token_id): {
            "logprob": logprob,
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.piece_text(token_id),
        }
        for token_id, logprob in found.items()
    }


def _top(token: TokenText | PromptToken, tokenizer: Tokenizer) -> dict[str, float] | None:
    """Return the chosen token by its text, and the likeliest ones by theirs; of two with one text, the likelier."""
    if token.logprobs is None:
        return None
    found = {token.text: token.logprobs.logprob}
    for token_id, logprob in token.logprobs.top:
        if token_id != token.token_id:
            found.setdefault(tokenizer.piece_text(token_id), logprob)
    return found
