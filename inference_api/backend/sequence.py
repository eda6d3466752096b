"""Own the backend's state of one generation: its known ids, how far they are computed, its deadlines and its end.

Pure: time is an argument, in seconds of the monotonic clock. Only this module assigns a SequenceStatus. Knows nothing
of rows' contents, engines or connections; the scheduler decides, a Sequence remembers.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from inference_api.backend.byte_breakers import ByteBreakers
from inference_api.backend.mask_lanes import FormMask
from inference_api.backend.prompt_lookup import PromptLookup
from inference_api.backend.readers import Readers
from inference_api.messages import ErrorInfo, Finished, FinishReason, Submit, Timing
from inference_api.stop import StopMatcher


class SequenceStatus(enum.Enum):
    """WAITING for a row, PREFILLING its known ids, DECODING new ones, FINISHED.

    One that makes room for others goes back from PREFILLING or DECODING to WAITING.
    """

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class Sequence:
    """One generation. `token_ids` are the known ids; the first `num_computed_tokens` of them are in the KV cache."""

    def __init__(
        self,
        submit: Submit,
        worker: str,
        now: float,
        mask: FormMask | None = None,
        readers: Readers | None = None,
    ) -> None:
        """`readers` get what it makes, instead of its own session alone, if it has an idempotency key."""
        self.submit = submit
        self.worker = worker
        self.mask = mask
        self.readers = readers
        self.token_ids = list(submit.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self._num_once_computed = 0
        self.num_scored_tokens = 0
        """Prompt ids whose follower's logprobs have been sent: a sequence that computes them again sends none twice."""
        self.embedding: bytes | None = None
        self.mu = submit.mu
        """Mirostat's state after the last draw: like the ids it outlives a row."""
        self.breakers: ByteBreakers | None = None
        self.row = -1
        self.epoch = 0
        self.status = SequenceStatus.WAITING
        self.error: ErrorInfo | None = None
        self.arrived_at = now
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self.batch_size = 0
        self.finish_reason: FinishReason | None = None
        self.stop: bytes | None = None
        self.drafts = PromptLookup(self.token_ids)
        self._matcher = StopMatcher(submit.stop_sequences)

    @property
    def session_id(self) -> str:
        """The routing key of this generation's stream."""
        return self.submit.session_id

    @property
    def tenant(self) -> str:
        """Who pays for it, and alone may use again what it computed."""
        return self.submit.tenant

    @property
    def num_completion_tokens(self) -> int:
        """Ids made so far, those of earlier attempts included."""
        return len(self.token_ids) - self.submit.num_prompt_tokens

    @property
    def draws(self) -> bool:
        """Tell whether it asks for ids at all, and not only for what its prompt tells."""
        return self.submit.max_tokens > 0

    @property
    def num_unscored_tokens(self) -> int:
        """Prompt ids whose follower's logprobs are asked for and not sent yet."""
        return 0 if self.submit.prompt_logprobs is None else self.submit.num_prompt_tokens - 1 - self.num_scored_tokens

    @property
    def may_reuse(self) -> bool:
        """Tell whether ids that another row has computed need not be computed again: nothing else is asked of them."""
        return self.submit.pooling is None and not self.num_unscored_tokens

    @property
    def may_end(self) -> bool:
        """Tell whether the last id may be an end: min_tokens came before it."""
        return self.num_completion_tokens > self.submit.min_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known ids that the KV cache does not hold yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def deadline(self) -> float:
        """The time at which this sequence fails unless it moves on."""
        return self.arrived_at + self._next_limit[0]

    @property
    def deadline_text(self) -> str:
        """Name the limit that `deadline` stands for."""
        seconds, text = self._next_limit
        return f"{text} {seconds:g} seconds."

    @property
    def _next_limit(self) -> tuple[float, str]:
        """The limit that comes first, in seconds after arrival, and what to say when it is over."""
        submit = self.submit
        limits = [(submit.total_seconds, "The request took longer than")]
        if self.first_token_at is None and self.draws:
            limits.append((submit.first_token_seconds, "The first token took longer than"))
        if self.started_at is None:
            limits.append((submit.queue_seconds, "No row became free within"))
        return min(limits, key=lambda limit: limit[0])

    def recall(self, known_bytes: Iterable[bytes]) -> None:
        """Let the stop search see the output that an earlier attempt delivered: a stop may begin in it."""
        for count, token_bytes in enumerate(known_bytes, start=1):
            self._matcher.feed(token_bytes, may_end=count > self.submit.min_tokens)

    def start(self, row: int, epoch: int, now: float) -> None:
        """Take a row; nothing is computed there yet. The time of the first one counts."""
        self.row, self.epoch = row, epoch
        self.started_at = now if self.started_at is None else self.started_at
        self.num_computed_tokens = 0
        self.status = SequenceStatus.PREFILLING

    def reuse(self, num_tokens: int) -> None:
        """Note that the row begins with the KV of the first `num_tokens` known ids.

        Those of the prompt that it never computed itself, before it made room for others, are its cached ones.
        """
        num_own = max(self.num_computed_tokens, self._num_once_computed)
        self.num_cached_tokens += max(0, min(num_tokens, self.submit.num_prompt_tokens) - num_own)
        self.num_computed_tokens = num_tokens

    def preempt(self) -> None:
        """Leave the row to others and wait for another one; what is known stays known."""
        self._num_once_computed = max(self._num_once_computed, self.num_computed_tokens)
        self.status = SequenceStatus.WAITING

    def advance(self, num_tokens: int) -> None:
        """Note that `num_tokens` more known ids are in the KV cache."""
        self.num_computed_tokens += num_tokens
        if self.num_uncomputed_tokens == 0:
            self.status = SequenceStatus.DECODING

    def append(self, token_id: int, token_bytes: bytes, now: float) -> bool:
        """Add an id that was drawn; return True if it completes a stop sequence."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.token_ids.append(token_id)
        match = self._matcher.feed(token_bytes, may_end=self.may_end)
        if match is None:
            return False
        self.stop = match.stop
        return True

    def finish(self, reason: FinishReason, now: float, error: ErrorInfo | None = None) -> Finished:
        """End the sequence and return its terminal event. Called once, by the scheduler."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason, self.error, self.finished_at = reason, error, now
        is_stop = reason is FinishReason.STOP
        return Finished(
            reason,
            self.num_completion_tokens,
            self.timing(now),
            self.stop if is_stop else None,
            error,
            self.num_cached_tokens,
            self.embedding if is_stop else None,
        )

    def running_seconds(self, now: float) -> float:
        """Return how long ago the sequence got its first row."""
        return 0.0 if self.started_at is None else now - self.started_at

    def timing(self, now: float) -> Timing:
        """Return where the time went until `now`, or until the end."""
        end = self.finished_at if self.finished_at is not None else now
        started = self.started_at if self.started_at is not None else end
        first = self.first_token_at if self.first_token_at is not None else end
        first = max(first, started)
        return Timing(
            queue_seconds=started - self.arrived_at,
            prefill_seconds=first - started,
            decode_seconds=end - first,
            batch_size=self.batch_size,
            context_tokens=len(self.token_ids),
        )
