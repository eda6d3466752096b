"""Show ids with their logprobs as OpenAI's two APIs do; PROCESS 1. Knows no streams and no bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def completion_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer, *, first_offset: int) -> dict[str, object]:
    """Return the `logprobs` of a text choice; the first text begins at `first_offset` in the choice's text."""
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprobs.logprob for token in tokens],
        "top_logprobs": [_top(token, tokenizer) for token in tokens],
    }


def _top(token: TokenText, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the chosen token by its text, and the likeliest ones by theirs; of two with one text, the likelier."""
    found = {token.text: token.logprobs.logprob}
    for token_id, logprob in token.logprobs.top:
        if token_id != token.token_id:
            found.setdefault(tokenizer.piece_text(token_id), logprob)
    return found
