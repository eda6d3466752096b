"""Define THE WIRE: every message that crosses between gunicorn workers, the decode backend and the supervisor.

Tagged msgspec structs; unknown fields are refused, so that two versions never half-understand each other. Golden frames
in tests/data/frames.json pin the bytes. Prompts and answers cross as token ids, stop sequences as bytes; never as text.
Clocks do not cross processes: times are durations in seconds. Knows nothing of sockets (queues.py), HTTP or grammars.
"""

from __future__ import annotations

import enum

import msgspec

from inference_api.sampling_params import SamplingParams, TokenLogprobs

WIRE_VERSION = 4
"""Raised with every incompatible change; it is the byte in front of each frame."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended: one enum, mapped once to each API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    QUOTA = "quota"
    ERROR = "error"


class RefusalReason(enum.StrEnum):
    """Why the intake took no place for a Submit."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    TOO_LONG = "too_long"
    WARMING = "warming"
    BAD_GRAMMAR = "bad_grammar"
    KEY_REUSED = "key_reused"
    """The idempotency key stands for another call."""
    NO_EMBEDDINGS = "no_embeddings"
    """The engine makes none."""


class GrammarKind(enum.StrEnum):
    """How a Grammar's text is read."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


class Pooling(enum.StrEnum):
    """How the hidden states of a prompt become one embedding: their mean, or the last one."""

    MEAN = "mean"
    LAST = "last"


class QueryKind(enum.StrEnum):
    """What a Query asks for."""

    ROWS = "rows"
    REQUEST = "request"
    METRICS = "metrics"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", omit_defaults=True):
    """Base of every tagged message."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form that a whole completion must keep to.

    `text` is a JSON schema, a regular expression of the whole, a JSON list of texts to choose from, or a Lark grammar;
    empty for any JSON object.
    """

    kind: GrammarKind
    text: str = ""
    field: str = ""
    """The request's member that it came from: a refusal names it."""


class IdempotencyKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant's name for a call, and the SHA-256 of what it asks for: one name, one call."""

    key: str
    digest: bytes
    part: int = 0
    """Which one it is of the call's generations."""


class ErrorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stable code of errors.py and a text that is safe to show."""

    code: str
    message: str


# Worker to backend


class Hello(Message, frozen=True, tag="hello"):
    """Open a connection: the worker's name and the wire version that it speaks."""

    worker: str
    version: int


class Submit(Message, frozen=True, tag="submit"):
    """Ask for one generation. `token_ids` beyond `num_prompt_tokens` are output that an earlier attempt delivered."""

    session_id: str
    request_id: str
    tenant: str
    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_sequences: list[bytes]
    queue_seconds: float
    first_token_seconds: float
    total_seconds: float
    choice: int = 0
    attempt: int = 0
    stop_ids: tuple[int, ...] = ()
    """Ids that end the completion beside the model's own ends."""
    min_tokens: int = 0
    """So many ids come before an end: until then no id that ends is drawn, and no stop sequence counts."""
    ignore_eos: bool = False
    """The model's own ends are ids like any other; `stop_ids` still end."""
    grammar: Grammar | None = None
    """Beside neither `min_tokens` nor `ignore_eos`: what has its form must be able to end."""
    priority: int = 0
    """The lowest comes first among the tenant's own requests that wait; other tenants' places it does not touch."""
    pooling: Pooling | None = None
    """Ask for the prompt's embedding and no completion: `max_tokens` is 0."""
    prompt_logprobs: int | None = None
    """So many of the most likely ids are reported beside each prompt id but the first; `max_tokens` may then be 0."""
    batches: bool = False
    """It may wait for others like it within the batch window, where there is one."""
    idempotency: IdempotencyKey | None = None
    created: int = 0
    """The call's own Unix time in seconds, which every repetition of it is told again; 0: of no interest."""
    call_id: str = ""
    """Tells this call from others that repeat it and share its request id."""
    mu: float | None = None
    """Mirostat's state after the ids that an earlier attempt delivered, as their last SequenceOutput told it."""


class Abort(Message, frozen=True, tag="abort"):
    """End every session of a tenant's request, or of one call that shares it with others; unknown ones are ignored."""

    request_id: str
    tenant: str
    call_id: str = ""


class Ping(Message, frozen=True, tag="ping"):
    """Ask the intake for a Pong at once."""

    ping_id: int


class Dropped(Message, frozen=True, tag="dropped"):
    """Report ids that belonged to no open session since the last report; the backend adds the workers' counts up."""

    late_tokens: int
    foreign_tokens: int


class Query(Message, frozen=True, tag="query"):
    """Ask the decode thread for a Snapshot. `tenant` sees its own requests and only counts of the others."""

    query_id: int
    kind: QueryKind
    tenant: str = ""
    request_id: str = ""


# Backend to worker


class Ready(Message, frozen=True, tag="ready"):
    """Greet a worker: which backend this is and what it can hold. Sent once a connection, after warm-up."""

    incarnation: str
    digest: str
    model: str
    engine: str
    device: str
    num_rows: int
    context_tokens: int
    row_independent: bool
    embedding_size: int = 0
    """Numbers of an embedding; 0: the engine makes none."""
    variant: str = ""
    """A development variant of the model in words, such as `layers 2, random weights`."""


class Accepted(Message, frozen=True, tag="accepted"):
    """Confirm a Submit: its place in the queue (0: a row is free) and a rough wait."""

    session_id: str
    place: int
    eta_seconds: float
    created: int = 0
    """Set if the session repeats an earlier call with its idempotency key: that one's `created`."""


class Refused(Message, frozen=True, tag="refused"):
    """Refuse a Submit at once; nothing of it is kept."""

    session_id: str
    reason: RefusalReason
    retry_after_seconds: float
    message: str = ""
    """What is wrong with the grammar; safe to show."""


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a sequence's time went inside the backend, in seconds, with the batch it ran in."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    batch_size: int
    context_tokens: int


NO_TIMING = Timing(0.0, 0.0, 0.0, 0, 0)
"""For an end that a worker makes itself, without the backend's figures."""


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of a sequence: the one terminal event that a backend sends for it."""

    reason: FinishReason
    num_completion_tokens: int
    timing: Timing
    stop: bytes | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0
    """Prompt ids that were not computed for it: a row of its tenant held them already."""
    embedding: bytes | None = None
    """The pooled hidden states as little-endian fp32, not normalised; set with `pooling`."""


class SequenceOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step made for one session. `row` is -1 for a sequence that never had one.

    `epoch` numbers the row's owner in this backend, the same in every row that it gets; `index` is the position of
    `token_ids[0]` in the completion.
    """

    session_id: str
    row: int
    epoch: int
    index: int
    token_ids: list[int]
    finished: Finished | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt ids that this step computed, in order; over all outputs one for each but the first id."""
    mu: float | None = None
    """Mirostat's state after the last of `token_ids`: beside the ids all that going on elsewhere needs."""


class StepOutput(Message, frozen=True, tag="step"):
    """Everything that one step made for one worker: one message, never one a row."""

    outputs: list[SequenceOutput]


class Failed(Message, frozen=True, tag="failed"):
    """Say that the whole engine failed; the backend exits after it."""

    error: ErrorInfo


class RowView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user row as its tenant may see it; a foreign row has an empty `request_id` and no counts."""

    row: int
    state: str
    tenant: str = ""
    request_id: str = ""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    running_seconds: float = 0.0


class RequestView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request's state: running ones from the scheduler, ended ones from a bounded record."""

    request_id: str
    state: str
    num_prompt_tokens: int
    num_completion_tokens: int
    place: int | None = None
    row: int | None = None
    finish_reason: FinishReason | None = None
    timing: Timing | None = None
    error: ErrorInfo | None = None
    num_cached_tokens: int = 0


class HistogramView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a histogram has seen: `counts[i]` values of at most `bounds[i]` and over the bound before it.

    The last count is of the values over every bound; `total` is the sum of all values.
    """

    bounds: list[float]
    counts: list[int]
    total: float


class Snapshot(Message, frozen=True, tag="snapshot"):
    """Answer a Query. Counters are plain numbers by name; `kv_usage` is the share of the KV cache that is in use."""

    query_id: int
    num_waiting: int
    num_rows: int
    num_rows_in_use: int
    rows: list[RowView] = []
    request: RequestView | None = None
    metrics: dict[str, float] = {}
    kv_usage: float = 0.0
    histograms: dict[str, HistogramView] = {}


class Pong(Message, frozen=True, tag="pong"):
    """Answer a Ping from the intake; `heartbeat_seconds` is the age of the decode thread's last step."""

    ping_id: int
    heartbeat_seconds: float
    draining: bool
    num_waiting: int
    num_rows_in_use: int


# Supervisor to backend, and back


class Drain(Message, frozen=True, tag="drain"):
    """Refuse new work from now on and say Drained when the last sequence has ended."""


class Stop(Message, frozen=True, tag="stop"):
    """End the process now."""


class Loading(Message, frozen=True, tag="loading"):
    """Report the stage of the start that begins now, and the seconds since the first."""

    stage: str
    seconds: float


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Report that the decode thread has finished a step."""


class Drained(Message, frozen=True, tag="drained"):
    """Report that no sequence is left after a Drain."""


class Fatal(Message, frozen=True, tag="fatal"):
    """Report a cause for which a restart is useless."""

    error: ErrorInfo


WorkerMessage = Hello | Submit | Abort | Ping | Query | Dropped
BackendMessage = Ready | Accepted | Refused | StepOutput | Failed | Snapshot | Pong
SupervisorMessage = Drain | Stop
StatusMessage = Loading | Ready | Heartbeat | Drained | Fatal
AnyMessage = WorkerMessage | BackendMessage | SupervisorMessage | StatusMessage
