"""Run the generations of one call side by side and read them in one thread, in the order in which they have news.

Runs in PROCESS 1, in the request's own thread. One call may ask for several prompts and several answers to each; they
share its request id, its client and its end: when one cannot be started or fails, the others are aborted. Knows no
surface's words.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import queue
import socket
import time
from collections.abc import Iterator, Sequence

from inference_api.errors import ClientLeftError
from inference_api.messages import NO_TIMING, Finished, FinishReason, Submit
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.generation import Generation, Piece, is_failure, raise_if_failed
from inference_api.server.token_trail import TokenText


@dataclasses.dataclass(frozen=True, slots=True)
class ChoicePiece:
    """A piece of the answer number `index`, which has `num_tokens` ids by now."""

    index: int
    piece: Piece
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; its ids one by one if logprobs were asked for, also those at its end that have no text."""

    text: str
    finished: Finished
    tokens: tuple[TokenText, ...]
    unsent: tuple[TokenText, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of all ids of its prompt but the first, if they were asked for."""


class Choices:
    """The running generations of one call. Close it exactly once; closing before the end aborts them."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running = set(range(len(generations)))
        self._failed: Finished | None = None

    def start(self, submits: Sequence[Submit], client_socket: socket.socket | None) -> None:
        """Submit them in order, with none left behind if one is refused.

        Raises what the first refusal raises; ClientLeftError, with no more of them submitted, once the client has left.
        """
        num_started = 0
        try:
            for index, (generation, submit) in enumerate(zip(self._generations, submits, strict=True)):
                if num_started:
                    self._raise_if_left()
                # One watch a socket: an abort ends every session of the request.
                watched = client_socket if index == 0 else None
                generation.start(submit, watched, functools.partial(self._news.put, index))
                num_started += 1
            # The abort of a client that has left may have overtaken the last one, and then it ended the others only.
            self._raise_if_left()
        except BaseException:
            for generation in self._generations[:num_started]:
                generation.close()
            raise

    @property
    def num_choices(self) -> int:
        """Answers of the call."""
        return len(self._generations)

    @property
    def repeated_created(self) -> int:
        """Unix time of the call that these repeat; 0: they repeat none."""
        return self._generations[0].repeated_created

    @property
    def is_running(self) -> bool:
        """Whether an end is still to come."""
        return bool(self._running)

    def next_piece(self, timeout_seconds: float | None = None) -> ChoicePiece | None:
        """Block for news of any answer; None if there was none in time. Not to be called once none runs.

        Raises the error that ended an answer, if one did, after its last text was returned; ClientLeftError once the
        client is gone.
        """
        if self._failed is not None:
            raise_if_failed(self._failed)
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                index = self._news.get(timeout=left)
            except queue.Empty:
                return None
            if index not in self._running:
                continue
            piece = self._generations[index].next_piece(0.0)
            if piece is not None:
                return self._take(index, piece)

    def pieces(self) -> Iterator[ChoicePiece]:
        """Yield the pieces of all answers up to the last end; raises as `next_piece` does."""
        while self._running:
            piece = self.next_piece()
            if piece is not None:
                yield piece

    def answers(self) -> list[Answer]:
        """Block for the whole answers, in their order; raises as `next_piece` does."""
        texts: list[list[str]] = [[] for _ in self._generations]
        tokens: list[list[TokenText]] = [[] for _ in self._generations]
        scores: list[tuple[TokenLogprobs, ...]] = [() for _ in self._generations]
        ends: dict[int, tuple[Finished, tuple[TokenText, ...]]] = {}
        for generation in self._generations:
            generation.only_end()
        for choice in self.pieces():
            texts[choice.index].append(choice.piece.text)
            tokens[choice.index] += choice.piece.tokens
            scores[choice.index] += choice.piece.prompt_logprobs
            if choice.piece.finished is not None:
                ends[choice.index] = choice.piece.finished, choice.piece.unsent
        return [
            Answer("".join(texts[index]), ends[index][0], tuple(tokens[index]), ends[index][1], scores[index])
            for index in range(len(self._generations))
        ]

    def close(self) -> None:
        """Forget the client's socket; abort what has not ended."""
        for generation in self._generations:
            generation.close()

    def _take(self, index: int, piece: Piece) -> ChoicePiece:
        finished = piece.finished
        if finished is None:
            self._news.put(index)  # the first id comes alone, whatever came with it
            return self._choice(index, piece)
        if finished.reason is FinishReason.ABORT:
            self._raise_if_left()
            finished = self._cause_of(finished)
        if is_failure(finished):
            self._failed = finished
            if not piece.text:
                raise_if_failed(finished)
            return self._choice(index, dataclasses.replace(piece, finished=None))
        self._running.discard(index)
        return self._choice(index, piece)

    def _cause_of(self, abort: Finished) -> Finished:
        """Return the end of the answer for whose fault all others were aborted; `abort` itself if there is none."""
        ends = (generation.wait_finished(0.0) for generation in self._generations)
        return next((end for end in ends if end is not None and end.error is not None), abort)

    def _raise_if_left(self) -> None:
        if self._generations[0].client_left:
            raise ClientLeftError("The client left.")

    def _choice(self, index: int, piece: Piece) -> ChoicePiece:
        return ChoicePiece(index, piece, self._generations[index].num_read_tokens)

    # What a log line of the call tells, as a single generation does.

    @property
    def generations(self) -> Sequence[Generation]:
        """All of them, in the order of their answers."""
        return self._generations

    @property
    def abandoned(self) -> bool:
        """Whether nobody read them to their ends; not if one failed, which ends the others too."""
        return self._failed is None and any(generation.abandoned for generation in self._generations)

    @property
    def row(self) -> int | None:
        """The row of the only one; None for several."""
        return self._generations[0].row if len(self._generations) == 1 else None

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together; each counts once, whatever the number of its answers."""
        return sum(generation.num_prompt_tokens for generation in self._generations if generation.choice == 0)

    @property
    def num_delivered_tokens(self) -> int:
        """Ids that have come from the backend so far."""
        return sum(generation.num_delivered_tokens for generation in self._generations)

    def wait_finished(self, timeout_seconds: float) -> Finished | None:
        """Block for all ends; return the last one's with the ids of all, None if one does not come in time."""
        deadline = time.monotonic() + timeout_seconds
        ends = [generation.wait_finished(max(0.0, deadline - time.monotonic())) for generation in self._generations]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends) or not known:
            return None
        failed = [end for end in known if end.error is not None]
        last = (failed or known)[-1]
        timing = last.timing if len(known) == 1 else NO_TIMING
        num_tokens = sum(end.num_completion_tokens for end in known)
        num_prompts = sum(generation.choice == 0 for generation in self._generations)
        num_cached_tokens = count_cached_tokens(known, num_prompts)
        return Finished(last.reason, num_tokens, timing, last.stop, last.error, num_cached_tokens)


def count_cached_tokens(ends: Sequence[Finished], num_prompts: int) -> int:
    """Count the prompt ids that none of their prompt's answers computed; the ends are in order, as many a prompt."""
    num_answers = len(ends) // num_prompts
    firsts = range(0, len(ends), num_answers)
    return sum(min(end.num_cached_tokens for end in ends[first : first + num_answers]) for first in firsts)


def likeliest(answers: Sequence[Answer], num_made: int, num_kept: int) -> list[Answer]:
    """Return of each `num_made` neighbours the `num_kept` with the highest mean logprob a token, the end's too."""
    kept: list[Answer] = []
    for first in range(0, len(answers), num_made):
        kept += sorted(answers[first : first + num_made], key=_mean_logprob, reverse=True)[:num_kept]
    return kept


def _mean_logprob(answer: Answer) -> float:
    # Without the end's own, an answer that says nothing would be the likeliest of all.
    logprobs = [token.logprobs.logprob for token in (*answer.tokens, *answer.unsent)]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
