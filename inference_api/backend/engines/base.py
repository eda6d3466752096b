"""Fix the contract between the decode loop and an engine, in PROCESS 2.

An engine executes plans on a device. It does not know tenants, sessions, queues, text or HTTP, and it never decides
when a sequence ends. Every engine obeys the shape contract in `Engine.execute`. Pure: imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from inference_api.messages import Pooling
from inference_api.sampling_params import SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillBudget:
    """Prompt tokens a step may carry: beside decoding rows in all others, and alone."""

    beside_tokens: int
    alone_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineInfo:
    """Describe an engine that is loaded: what it can hold and which numeric path it took."""

    engine: str
    model: str
    device: str
    num_rows: int
    context_tokens: int
    vocab_size: int
    row_independent: bool
    """True only if what a row produces is bit-identical whatever its neighbours, row index and chunking are."""
    digest: str
    """Names the weights and the numeric path; equal digests make equal ids for equal requests."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    prefill_budget: PrefillBudget | None = None
    """Set by an engine whose steps cost the same whatever they carry: there is nothing to warm up or to measure."""
    copies_prefixes: bool = False
    """True if a RowPlan may carry a `prefix`."""
    max_draft_tokens: int = 0
    """So many `draft_ids` a RowPlan may carry."""
    embedding_size: int = 0
    """Numbers of a hidden state; 0: no RowPlan may carry a `pool`."""


LEAST_TEMPERATURE = 1e-6
"""Below it weights are made by division in fp64: the inverse of a temperature may be infinite in fp32."""


class MaskError(Exception):
    """Say why a form allows no further id; the text is safe to show."""


class TokenMask(Protocol):
    """Say which ids a row may draw next, for an answer that must keep to a form. The decode thread asks."""

    def forced_id(self, ids: Sequence[int]) -> int | None:
        """Return the only id that may follow the known `ids`, if that is known for little; None says nothing.

        Raises MaskError, or returns anything, where `allowed` raises it.
        """
        ...

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        """Tell whether an id may follow the known `ids`, as `allowed` does; mostly at a hundredth of its price.

        Raises MaskError, or tells anything, where `allowed` raises it.
        """
        ...

    def allowed(self, ids: Sequence[int]) -> bytes:
        """Return one bit an id of the vocabulary, lowest bit first, for the id that follows the known `ids`.

        At least one bit is set. May wait for bits that are being found beside the forward pass; raises MaskError, which
        ends this row alone.
        """
        ...


class RepeatBreakers(Protocol):
    """Say over which ids no repetition goes on, for the penalty of repetitions."""

    def num_after(self, ids: Sequence[int]) -> int:
        """Return how many of the last `ids` come after the last breaker in them; all if there is none.

        Those are all known ids, and maybe guesses after them.
        """
        ...

    def is_in(self, token_id: int) -> bool:
        """Tell whether an id holds a whole breaker."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class SampleSpec:
    """How to draw one row's next id: `params` plus the counter that keys its random number."""

    params: SamplingParams
    choice: int
    position: int
    """Absolute position of the id to draw: prompt ids and completion ids before it."""
    num_prompt_tokens: int = 0
    known_ids: Sequence[int] = ()
    """The sequence's ids up to `position`, to be read only; set where `params` or `mask` need them."""
    barred_ids: frozenset[int] = frozenset()
    """Ids that may not be drawn here: those that would end the sequence before its min_tokens."""
    mask: TokenMask | None = None
    breakers: RepeatBreakers | None = None
    """Set where `params` have any."""
    mu: float | None = None
    """Mirostat's state after the draw before; None: there was none."""

    @property
    def changes_logits(self) -> bool:
        """Tell whether the row has an option beside its mask that works on the logits themselves."""
        params = self.params
        return bool(
            self.barred_ids
            or params.allowed_ids
            or params.banned_ids
            or params.logit_bias
            or params.reads_known_ids
            or params.top_n_sigma > 0
        )

    @property
    def tries_before_mask(self) -> bool:
        """Tell whether an id is drawn as if there were no mask first, which then says whether it takes that one."""
        if self.mask is None or self.changes_logits:
            return False
        return self.params.is_greedy or (self.params.draws_from_all and self.params.temperature >= LEAST_TEMPERATURE)


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixCopy:
    """The first `num_tokens` positions of `source_row`, whose ids the row's sequence begins with."""

    source_row: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSpec:
    """Pool the hidden states of a row's ids, after the model's last norm. The row keeps what it has pooled so far.

    Every plan of the row's sequence has one, from position 0 on and without a `prefix`, a `sample` or a `score`.
    """

    pooling: Pooling
    is_last: bool
    """These ids are the last ones: the result carries the embedding."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreSpec:
    """Report the model's logprobs of known ids, beside no drafts."""

    next_ids: tuple[int, ...]
    """Each follows the plan's id of the same index; there are fewer where those after the last are of no interest."""
    num_top: int


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """One row's share of a step: compute `token_ids` at positions `start`, `start + 1`, … of that row.

    Invariant: the KV cache of `row` holds the positions below `start`. `start` 0 begins a new sequence, and so does a
    `prefix`, which ends at `start` and is copied before anything is computed; the row itself may be its source, another
    row that begins a sequence in the same plan may not.
    """

    row: int
    start: int
    token_ids: tuple[int, ...]
    sample: SampleSpec | None
    """Set if these ids are the last known ones, so that the next id must be drawn."""
    prefix: PrefixCopy | None = None
    draft_ids: tuple[int, ...] = ()
    """Guesses of the ids after the known ones, beside a `sample`: computed too, and kept as far as the draws agree."""
    pool: PoolSpec | None = None
    score: ScoreSpec | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decided for one step; rows ascend and none appears twice."""

    rows: tuple[RowPlan, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RowError:
    """A fault that concerns one row only: NaN logits, an exception in sampling."""

    code: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class RowResult:
    """What a step made for one row: the drawn ids, or an error.

    Beside k drafts that the draws agreed with come k + 1 ids, and the row's KV then holds the k drafts too.
    """

    row: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of `token_ids`, where the params ask for them."""
    error: RowError | None = None
    scores: tuple[TokenLogprobs, ...] = ()
    """One for each of the plan's `next_ids`."""
    embedding: bytes | None = None
    """Little-endian fp32, `embedding_size` of them, not normalised; the same however the prompt was cut up."""
    mu: float | None = None
    """Mirostat's state after the draw, where the params ask for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What the engine made of a plan: one RowResult for each row that samples, scores, embeds, or that failed."""

    rows: tuple[RowResult, ...]


EMPTY_RESULT = StepResult(rows=())


class Engine(Protocol):
    """Execute plans on a device. Called by the decode thread alone; methods may block for one step."""

    @property
    def info(self) -> EngineInfo:
        """Describe this engine; constant while the process lives."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one forward pass for the rows of `plan` and draw an id, or several, for each row that has a `sample`.

        A fault of one row comes back as a RowError; an exception means that the whole step is lost.
        """
        ...

    def release(self, row: int) -> None:
        """Take note that a row's sequence has left it. With `copies_prefixes` its KV stays until it begins another."""
        ...

    def scrub(self, row: int) -> None:
        """Zero all that the row's KV cache has held since the last time; no plan has begun with it, or ever will."""
        ...
