"""Word text completions: a choice's text, perhaps behind its prompt, and the tokens of both; PROCESS 1.

A prompt that is told with logprobs comes with the first news of its answer, for the backend scores it first; without
them it opens the stream. Knows no sampling and no chats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer
from inference_api.server.generation import Piece
from inference_api.server.openai.answers import FINISH_REASONS
from inference_api.server.openai.tokens import completion_logprobs, prompt_logprobs
from inference_api.server.prompt_tokens import PromptToken, prompt_tokens, with_top
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What a choice tells beside its answer: its prompt, and the likelihoods of tokens, so many beside each."""

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """vLLM's member of the same name."""

    @property
    def scores_echo(self) -> bool:
        """Whether the prompt is told with its tokens' logprobs."""
        return self.echo and self.logprobs is not None

    @property
    def num_prompt_top(self) -> int | None:
        """How many of the likeliest ids are needed beside each of the prompt's; None: no logprob of it is."""
        asked = [self.logprobs if self.echo else None, self.prompt_logprobs]
        return max((number for number in asked if number is not None), default=None)


class CompletionWords:
    """The words of text completions. `prompts` are the choices' prompts in ids, one a choice."""

    kind = chunk_kind = "text_completion"

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], told: Told) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._told = told
        self._offsets = [0] * len(prompts)
        self._has_begun = [False] * len(prompts)

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        """Return a choice with its text."""
        text = (self._echo(index) if self._told.echo else "") + answer.text
        echoed = self._scored(index, answer.prompt_logprobs) if self._told.scores_echo else []
        choice = self._choice(index, text, [*echoed, *answer.tokens], FINISH_REASONS[answer.finished.reason])
        if self._told.prompt_logprobs is not None:
            tokens = prompt_tokens(self._prompts[index], answer.prompt_logprobs, self._tokenizer)
            choice["prompt_logprobs"] = prompt_logprobs(tokens, self._tokenizer, self._told.prompt_logprobs)
        return choice

    def opening(self, index: int) -> dict[str, object] | None:
        """Return the prompt, if it is echoed as a mere text."""
        if not self._told.echo or self._told.scores_echo:
            return None
        echo = self._echo(index)
        return self._choice(index, echo, (), None) if echo else None

    def prompt(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return the prompt with its tokens, once, if that is how it is echoed."""
        if self._has_begun[index] or not self._told.scores_echo:
            return None
        self._has_begun[index] = True
        return self._choice(index, self._echo(index), self._scored(index, piece.prompt_logprobs), None)

    def text(self, index: int, text: str, tokens: Sequence[TokenText]) -> list[dict[str, object]]:
        """Return a chunk with new text."""
        return [self._choice(index, text, tokens, None)]

    def ending(self, index: int, piece: Piece, reason: str) -> list[dict[str, object]]:
        """Return one chunk with the last text that tells why it ended."""
        return [self._choice(index, piece.text, piece.tokens, reason)]

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._prompts[index])

    def _scored(self, index: int, logprobs: Sequence[TokenLogprobs]) -> list[PromptToken]:
        tokens = prompt_tokens(self._prompts[index], logprobs, self._tokenizer)
        return [with_top(token, self._told.logprobs or 0) for token in tokens]

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText | PromptToken], reason: str | None
    ) -> dict[str, object]:
        logprobs = None
        if self._told.logprobs is not None:
            offset = self._offsets[index]
            logprobs = completion_logprobs(tokens, self._tokenizer, first_offset=offset)
            self._offsets[index] += sum(len(token.text) for token in tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
