"""Write OpenAI's answers, whole and in chunks, from what the running choices make; PROCESS 1.

One object a surface, `ChatWords` or `CompletionWords`, says how a choice looks; the rest, usage, ids, ends and errors,
is the same for both. Knows no prompts and no sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from inference_api.errors import InferenceApiError
from inference_api.messages import Finished, FinishReason
from inference_api.server.choices import Answer, ChoicePiece, count_cached_tokens
from inference_api.server.generation import Piece
from inference_api.server.openai.bodies import StreamOptions
from inference_api.server.openai.errors import error_object
from inference_api.server.openai.tokens import chat_logprobs
from inference_api.server.responses import PING, data_event
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.QUOTA: "length"}
DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    answer_id: str
    created: int
    model: str
    system_fingerprint: str

    def as_dict(self, kind: str) -> dict[str, object]:
        """Return the members, with the object's kind."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class Words(Protocol):
    """How one API words a choice."""

    kind: str
    chunk_kind: str

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        """Return a choice of a whole answer."""
        ...

    def opening(self, index: int) -> dict[str, object] | None:
        """Return a choice's first chunk, if it has one before its text."""
        ...

    def prompt(self, index: int, piece: Piece) -> dict[str, object] | None:
        """Return the chunk that tells of a choice's prompt, if it has one, when its first piece has come."""
        ...

    def text(self, index: int, text: str, tokens: Sequence[TokenText]) -> list[dict[str, object]]:
        """Return a chunk's choice with new text."""
        ...

    def ending(self, index: int, piece: Piece, reason: str) -> list[dict[str, object]]:
        """Return a choice's last chunks, with the text that came with the end."""
        ...


class ChatWords:
    """The words of chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        """Return a choice with its message."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._tokens(answer.tokens),
            "finish_reason": FINISH_REASONS[answer.finished.reason],
        }

    def opening(self, index: int) -> dict[str, object]:
        """Return the delta that names the role."""
        return self._chunk(index, {"role": "assistant", "content": None})

    def prompt(self, index: int, piece: Piece) -> None:
        """Return nothing: a chat's prompt is not streamed."""

    def text(self, index: int, text: str, tokens: Sequence[TokenText]) -> list[dict[str, object]]:
        """Return a delta with new content."""
        return [self._chunk(index, {"content": text}, self._tokens(tokens))]

    def ending(self, index: int, piece: Piece, reason: str) -> list[dict[str, object]]:
        """Return the last text, if there is any, and a delta without content that tells why it ended."""
        last = self.text(index, piece.text, piece.tokens) if piece.text or piece.tokens else []
        return [*last, self._chunk(index, {}, reason=reason)]

    def _tokens(self, tokens: Iterable[TokenText]) -> dict[str, object] | None:
        return chat_logprobs(tokens, self._tokenizer) if self._logprobs else None

    def _chunk(
        self,
        index: int,
        delta: dict[str, object],
        logprobs: dict[str, object] | None = None,
        reason: str | None = None,
    ) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def usage_object(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int = 0) -> dict[str, object]:
    """Return a `usage`; each prompt counts once, whatever the number of its answers."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def whole_answer(head: Head, words: Words, answers: Sequence[Answer], usage: dict[str, object]) -> dict[str, object]:
    """Return the body of an answer that was not streamed."""
    choices = [words.whole(index, answer) for index, answer in enumerate(answers)]
    return {**head.as_dict(words.kind), "choices": choices, "usage": usage}


class ChunkWriter:
    """Write a stream of chunks; see `EventWriter`."""

    def __init__(
        self,
        head: Head,
        words: Words,
        options: StreamOptions,
        *,
        num_choices: int,
        num_prompt_tokens: int,
        num_prompts: int = 1,
    ) -> None:
        self._head = head.as_dict(words.chunk_kind)
        self._words = words
        self._options = options
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._num_prompts = num_prompts
        self._num_tokens = [0] * num_choices
        self._ends: dict[int, Finished] = {}

    def begin(self) -> Iterator[bytes]:
        """Write what each choice opens with."""
        for index in range(self._num_choices):
            opening = self._words.opening(index)
            if opening is not None:
                yield self._chunk([opening])

    def piece(self, choice: ChoicePiece) -> Iterator[bytes]:
        """Write what is told of the prompt, if this is the first piece, new text, and the end if there is one."""
        piece = choice.piece
        self._num_tokens[choice.index] = choice.num_tokens
        prompt = self._words.prompt(choice.index, piece)
        if prompt is not None:
            yield self._chunk([prompt])
        if piece.finished is not None:
            self._ends[choice.index] = piece.finished
            self._num_tokens[choice.index] = piece.finished.num_completion_tokens
            for last in self._words.ending(choice.index, piece, FINISH_REASONS[piece.finished.reason]):
                yield self._chunk([last])
        elif piece.text or piece.tokens:
            for new in self._words.text(choice.index, piece.text, piece.tokens):
                yield self._chunk([new])

    def ping(self) -> bytes:
        """Write a comment, which every parser of events skips (WHATWG HTML, section 9.2.6)."""
        return PING

    def end(self) -> Iterator[bytes]:
        """Write the usage, if it was asked for, and the end of the stream."""
        if self._options.include_usage:
            yield data_event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE

    def error(self, error: InferenceApiError) -> Iterator[bytes]:
        """Write the error; no end follows."""
        yield data_event(error_object(error))

    def _chunk(self, choices: list[dict[str, object]]) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._options.include_usage or self._options.continuous_usage_stats:
            chunk["usage"] = self._usage() if self._options.continuous_usage_stats else None
        return data_event(chunk)

    def _usage(self) -> dict[str, object]:
        # How much of a prompt was cached is known once all its answers have ended; 0 until then.
        ends = [self._ends[index] for index in sorted(self._ends)] if len(self._ends) == self._num_choices else []
        num_cached_tokens = count_cached_tokens(ends, self._num_prompts) if ends else 0
        return usage_object(self._num_prompt_tokens, sum(self._num_tokens), num_cached_tokens)
