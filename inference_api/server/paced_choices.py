"""Run the generations of one call a few at a time: as one ends, the next is submitted, until all have ended.

Runs in PROCESS 1, in the request's own thread. For calls of many inputs, such as embeddings: they need neither a row
nor a place in the queue each, so that other callers find both. Knows no surface's words.
"""

from __future__ import annotations

import collections
import functools
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from inference_api.errors import DeadlineError, OverloadedError
from inference_api.messages import Submit
from inference_api.server.choices import ChoicePiece, Choices
from inference_api.server.generation import Generation, Piece


class PacedChoices(Choices):
    """Choices of which at most `max_open` wait or run at a time; started in their order, ending in any.

    The deadline is the call's: what is submitted later has the less time left.
    """

    def __init__(
        self, generations: Sequence[Generation], max_open: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        """`now` gives monotonic seconds."""
        super().__init__(generations)
        self._max_open = max_open
        self._now = now
        self._unstarted: collections.deque[tuple[int, Submit]] = collections.deque()
        self._num_open = 0
        self._began_at = 0.0

    def start(self, submits: Sequence[Submit], client_socket: socket.socket | None) -> None:
        """Submit the first ones; raises what the very first one's refusal raises, and ClientLeftError."""
        self._began_at = self._now()
        self._unstarted.extend(enumerate(submits))
        try:
            self._start_more(client_socket)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forget the client's socket; abort what runs and has not ended, and start no more."""
        for generation in self._generations[: len(self._generations) - len(self._unstarted)]:
            generation.close()
        self._unstarted.clear()

    def _take(self, index: int, piece: Piece) -> ChoicePiece:
        choice = super()._take(index, piece)
        if choice.piece.finished is not None:
            self._num_open -= 1
            self._start_more()
        return choice

    def _start_more(self, client_socket: socket.socket | None = None) -> None:
        """Submit as many as may be open; a queue that is full leaves the rest to the next end of what is open."""
        while self._unstarted and self._num_open < self._max_open:
            index, submit = self._unstarted[0]
            try:
                # One watch a socket, the first one's: an abort ends every session of the request.
                on_news = functools.partial(self._news.put, index)
                self._generations[index].start(self._in_time(submit), client_socket if index == 0 else None, on_news)
            except OverloadedError:
                if not self._num_open:
                    raise
                return
            self._unstarted.popleft()
            self._num_open += 1
            # The abort of a client that has left may have come before this one was there to be ended.
            self._raise_if_left()

    def _in_time(self, submit: Submit) -> Submit:
        seconds_left = submit.total_seconds - (self._now() - self._began_at)
        if seconds_left <= 0:
            raise DeadlineError(f"The request took longer than {submit.total_seconds:g} seconds.", 1.0)
        return msgspec.structs.replace(submit, total_seconds=seconds_left)
