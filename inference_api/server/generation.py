"""Turn one session's ids into text, in order, with nothing of a stop sequence and no half character.

Runs in PROCESS 1, in the request's own thread; while that waits in `relay`, the backend client's thread decodes and
sends in its stead, never both at once. A Generation frames the session: it watches the client's socket, aborts what is
left when the response is closed early, and says how it ended. Knows no HTTP status lines or event formats.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from inference_api.errors import (
    AbortedError,
    BackendLostError,
    ClientLeftError,
    DeadlineError,
    GenerationError,
    InferenceApiError,
    ReaderBehindError,
    UnavailableError,
)
from inference_api.messages import Finished, FinishReason, Submit
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.backend_client import BackendClient
from inference_api.server.chunk_sender import ChunkSender
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.output_router import Delivery, SessionStream
from inference_api.server.token_trail import TokenText, TokenTrail
from inference_api.server.tokenizer import IncrementalDecoder
from inference_api.stop import TextStop

_ERRORS: dict[str, type[UnavailableError]] = {
    error.code: error for error in (BackendLostError, DeadlineError, GenerationError)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """New text, maybe empty, and the end when it is reached; its ids one by one if logprobs were asked for.

    The prompt's logprobs, of all its ids but the first, come with the first piece, if they were asked for.
    """

    text: str
    finished: Finished | None
    tokens: tuple[TokenText, ...] = ()
    unsent: tuple[TokenText, ...] = ()
    """At the end, beside `tokens`: the ids of which nothing is sent, a stop sequence's and the model's own end."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class Generation:
    """One running generation. Close it exactly once; closing before the end aborts it."""

    def __init__(
        self, client: BackendClient, watcher: DisconnectWatcher, decoder: IncrementalDecoder, text_stop: TextStop
    ) -> None:
        self._client = client
        self._watcher = watcher
        self._decoder = decoder
        self._text_stop = text_stop
        self._submit: Submit | None = None
        self.submitted_at = 0.0
        """When it was submitted, in monotonic seconds of this process."""
        self._stream: SessionStream | None = None
        self._watch: int | None = None
        self._client_left = threading.Event()
        self._finished: Finished | None = None
        self._num_early_tokens = 0
        self._trail: TokenTrail | None = None
        self.repeated_created = 0
        """Unix time of the call that it repeats; 0: it repeats none."""
        self.abandoned = False
        """Whether nobody read it to its end: its client left, or its response was closed before."""

    def start(
        self, submit: Submit, client_socket: socket.socket | None, on_news: Callable[[], None] | None = None
    ) -> None:
        """Submit, and abort as soon as the client leaves; raises what BackendClient.submit raises.

        `on_news` is called by another thread when `next_piece` has something; it must not block.
        """
        self._submit = submit
        self.submitted_at = time.monotonic()
        self._trail = TokenTrail() if submit.sampling.logprobs is not None else None
        self._num_early_tokens = submit.min_tokens
        if client_socket is not None:
            self._watch = self._watcher.watch(client_socket, self._on_client_left)
        try:
            self._stream, accepted = self._client.submit(submit, on_news)
            self.repeated_created = accepted.created
            if self._client_left.is_set():
                # The first Abort may have overtaken the Submit, and then it ended nothing.
                self._abort()
        except BaseException:
            self._forget_client()
            raise

    def next_piece(self, timeout_seconds: float | None = None) -> Piece | None:
        """Block for new text or the end; None if neither came in time. Not to be called after the end.

        Raises ClientLeftError once the generation has ended because its client left.
        """
        if self._stream is None:
            raise RuntimeError("the generation has not been started")
        # Ids one by one make the same pieces however they came: the events of a repetition are those of the first call.
        is_keyed = self._submit is not None and self._submit.idempotency is not None
        delivery = self._stream.read(timeout_seconds, one_by_one=is_keyed)
        if delivery is None:
            return None
        text = self._text_of(delivery)
        if delivery.finished is not None:
            self._finished = delivery.finished
            if delivery.finished.reason is FinishReason.ABORT and self._client_left.is_set():
                self.abandoned = True
                raise ClientLeftError("The client left.")
            # What was cut inside a character ends before it: a replacement would be a text that nobody made.
            tail = "" if is_failure(delivery.finished) else self._decoder.flush()
            if self._trail is not None:
                self._trail.extend(tail)
            text += self._text_stop.feed(tail) + self._text_stop.flush()
        tokens = self._tokens_of(text, delivery.finished)
        unsent = self._trail.unsent() if self._trail is not None and delivery.finished is not None else ()
        return Piece(text, delivery.finished, tokens, tuple(unsent), delivery.prompt_logprobs)

    def relay(self, sender: ChunkSender) -> None:
        """Have new text sent as it comes, by the thread that it comes to; block until `next_piece` has something.

        For a response whose head has been sent. Raises OSError if the client is gone.
        """
        if self._stream is not None:
            self._stream.relay(lambda token_ids: self._send_text(token_ids, sender))
            sender.settle()

    def only_end(self) -> None:
        """Let nothing wake the request's thread from now on but the end: what has come until then is read at once."""
        if self._stream is not None:
            self._stream.only_end()

    def wait_finished(self, timeout_seconds: float) -> Finished | None:
        """Block for the terminal event; None if it does not come in time, or the backend never took the request."""
        return self._stream.wait_finished(timeout_seconds) if self._stream is not None else None

    @property
    def client_left(self) -> bool:
        """Whether the client whose socket it watches is gone."""
        return self._client_left.is_set()

    @property
    def row(self) -> int | None:
        """The row that it runs or ran in; None if it never had one."""
        return self._stream.row if self._stream is not None else None

    @property
    def generations(self) -> Sequence[Generation]:
        """Itself: what a call generates is one of these, or several."""
        return (self,)

    @property
    def submitted(self) -> Submit | None:
        """What was asked of the backend; None before `start`."""
        return self._submit

    @property
    def choice(self) -> int:
        """Which of its prompt's answers it is; 0 before `start`."""
        return self._submit.choice if self._submit is not None else 0

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt; 0 before `start`."""
        return self._submit.num_prompt_tokens if self._submit is not None else 0

    @property
    def num_delivered_tokens(self) -> int:
        """Ids that have come from the backend so far."""
        return 0 if self._stream is None else len(self._stream.token_ids)

    @property
    def num_read_tokens(self) -> int:
        """Ids that `next_piece` has taken in so far."""
        return 0 if self._stream is None else self._stream.num_read

    def pieces(self) -> Iterator[Piece]:
        """Yield pieces up to the end; raise the error that ended the generation, if one did, after its last text."""
        while True:
            piece = self.next_piece()
            if piece is None:
                continue
            if piece.finished is not None and is_failure(piece.finished):
                if piece.text:
                    yield Piece(piece.text, None)
                raise_if_failed(piece.finished)
            if piece.text or piece.finished is not None:
                yield piece
            if piece.finished is not None:
                return

    def close(self) -> None:
        """Forget the client's socket; abort the generation if it has not ended."""
        self._forget_client()
        if self._finished is None:
            self.abandoned = True
            self._abort()

    def _send_text(self, token_ids: Sequence[int], sender: ChunkSender) -> bool:
        text = self._text_of_ids(token_ids)
        return not text or sender.offer(text.encode())

    def _text_of(self, delivery: Delivery) -> str:
        if self._trail is None:
            return self._text_of_ids(delivery.token_ids)
        text = ""
        for token_id, logprobs in zip(delivery.token_ids, delivery.logprobs, strict=True):
            decoded = self._decoder.decode([token_id])
            self._trail.add(TokenText(token_id, decoded, logprobs))
            text += self._text_stop.feed(decoded, may_end=self._num_early_tokens == 0)
            self._num_early_tokens -= self._num_early_tokens > 0
        return text

    def _text_of_ids(self, token_ids: Sequence[int]) -> str:
        """Decode further ids; return what may be sent. A stop complete within the first min_tokens ids is none."""
        early = token_ids[: self._num_early_tokens]
        text = ""
        if early:
            self._num_early_tokens -= len(early)
            text = self._text_stop.feed(self._decoder.decode(early), may_end=False)
        return text + self._text_stop.feed(self._decoder.decode(token_ids[len(early) :]))

    def _tokens_of(self, text: str, finished: Finished | None) -> tuple[TokenText, ...]:
        if self._trail is None:
            return ()
        tokens = self._trail.release(len(text))
        return (*tokens, *self._trail.finish()) if finished is not None else tuple(tokens)

    def _on_client_left(self) -> None:
        self._client_left.set()
        self._abort()

    def _abort(self) -> None:
        if self._submit is not None:
            self._client.abort(self._submit.request_id, self._submit.tenant, self._submit.call_id)

    def _forget_client(self) -> None:
        if self._watch is not None:
            self._watcher.forget(self._watch)
            self._watch = None


def is_failure(finished: Finished) -> bool:
    """Tell whether a terminal event is something else than an honest end of the text."""
    return finished.error is not None or finished.reason is FinishReason.ABORT


def raise_if_failed(finished: Finished) -> None:
    """Raise the error that a terminal event stands for; return if it is an honest end of the text."""
    if finished.error is not None:
        if finished.error.code == ReaderBehindError.code:
            raise ReaderBehindError(finished.error.message)
        raise _ERRORS.get(finished.error.code, GenerationError)(finished.error.message, 1.0)
    if finished.reason is FinishReason.ABORT:
        raise AbortedError("The request was aborted.")


def is_retryable(error: InferenceApiError) -> bool:
    """Tell whether sending the same request again may help."""
    return isinstance(error, UnavailableError) and error.status != 500
