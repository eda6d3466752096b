"""Write TGI's answers, whole and event by event, from what the running choices make.

Runs in PROCESS 1. Every id is one token of the answer, one event of a stream; the last event also carries the end.
Nothing of a stop sequence or of the model's own end is ever text: their ids are reported with an empty one, so that
the tokens' texts joined are the answer. Knows no prompts and no sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from inference_api.errors import InferenceApiError
from inference_api.messages import Finished, FinishReason
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.responses import PING, data_event
from inference_api.server.tgi.errors import told
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What an answer tells beside its text. `prompt` stands before the text; the seed is None for a greedy answer."""

    prompt: str
    details: bool
    num_top_tokens: int
    prompt_ids: Sequence[int]
    seed: int | None
    shows_prompt_tokens: bool = False


class TokenWords:
    """Say ids as TGI does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def token(self, token: TokenText) -> dict[str, object]:
        """Return an id of the answer."""
        return self._token(token.token_id, token.text, token.logprobs.logprob)

    def end_token(self) -> dict[str, object]:
        """Return the token of an end that no id made; TGI's events have no shape without one."""
        return self._token(min(self._tokenizer.special_ids, default=0), "", None)

    def prompt_token(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, object]:
        """Return an id of the prompt; the first one follows nothing and has no logprob."""
        logprob = None if logprobs is None else logprobs.logprob
        return {"id": token_id, "text": self._tokenizer.piece_text(token_id), "logprob": logprob}

    def top_tokens(self, token: TokenText) -> list[dict[str, object]]:
        """Return the likeliest ids in the place of `token`."""
        top = token.logprobs.top
        return [self._token(token_id, self._tokenizer.piece_text(token_id), logprob) for token_id, logprob in top]

    def _token(self, token_id: int, text: str, logprob: float | None) -> dict[str, object]:
        special = token_id in self._tokenizer.special_ids
        return {"id": token_id, "text": text, "logprob": logprob, "special": special}


def whole_answer(answers: Sequence[Answer], report: Report, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the body of an answer that was not streamed; the first of `answers` is the one that is returned."""
    body: dict[str, object] = {"generated_text": report.prompt + answers[0].text}
    if report.details:
        words = TokenWords(tokenizer)
        details = _details(answers[0], report, words)
        if len(answers) > 1:
            details["best_of_sequences"] = [
                {"generated_text": report.prompt + answer.text, **_details(answer, report, words)}
                for answer in answers[1:]
            ]
        body["details"] = details
    return body


class TokenEvents:
    """Write a stream of tokens; see `EventWriter`."""

    def __init__(self, report: Report, tokenizer: Tokenizer) -> None:
        self._report = report
        self._words = TokenWords(tokenizer)
        self._text = report.prompt
        self._num_events = 0

    def begin(self) -> Iterable[bytes]:
        """Write nothing: the first event is the first token."""
        return ()

    def piece(self, choice: ChoicePiece) -> Iterator[bytes]:
        """Write an event a token; the last one tells the whole text, and the end if it was asked for."""
        piece = choice.piece
        self._text += piece.text
        tokens = [*piece.tokens, *piece.unsent]
        if piece.finished is None:
            for token in tokens:
                yield self._event(token)
            return
        for token in tokens[:-1]:
            yield self._event(token)
        yield self._event(tokens[-1] if tokens else None, piece.finished)

    def ping(self) -> bytes:
        """Write a comment."""
        return PING

    def end(self) -> Iterable[bytes]:
        """Write nothing: the last token has told the end."""
        return ()

    def error(self, error: InferenceApiError) -> Iterator[bytes]:
        """Write the error; no end follows."""
        yield data_event(told(error)[1])

    def _event(self, token: TokenText | None, finished: Finished | None = None) -> bytes:
        self._num_events += 1
        event: dict[str, object] = {
            "index": self._num_events,
            "token": self._words.end_token() if token is None else self._words.token(token),
            "generated_text": None if finished is None else self._text,
            "details": None,
        }
        if token is not None and self._report.num_top_tokens:
            event["top_tokens"] = self._words.top_tokens(token)
        if finished is not None and self._report.details:
            event["details"] = {**_end(finished, self._report), "input_length": len(self._report.prompt_ids)}
        return data_event(event)


def _details(answer: Answer, report: Report, words: TokenWords) -> dict[str, object]:
    tokens = [*answer.tokens, *answer.unsent]
    prefill = zip(report.prompt_ids, (None, *answer.prompt_logprobs), strict=True) if report.shows_prompt_tokens else ()
    details = {
        **_end(answer.finished, report),
        "prefill": [words.prompt_token(token_id, logprobs) for token_id, logprobs in prefill],
        "tokens": [words.token(token) for token in tokens],
    }
    if report.num_top_tokens:
        details["top_tokens"] = [words.top_tokens(token) for token in tokens]
    return details


def _end(finished: Finished, report: Report) -> dict[str, object]:
    return {
        "finish_reason": _finish_reason(finished),
        "generated_tokens": finished.num_completion_tokens,
        "seed": report.seed,
    }


def _finish_reason(finished: Finished) -> str:
    if finished.reason is not FinishReason.STOP:
        return "length"
    return "eos_token" if finished.stop is None else "stop_sequence"
