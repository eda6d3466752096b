"""Plan what each row computes in a step: which known ids, how its next id is drawn, and what it guesses ahead.

Pure, for the scheduler of PROCESS 2, which decides who runs and when it ends; here nothing starts and nothing ends.
Knows no queue, no workers and no time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

from inference_api.backend.byte_breakers import ByteBreakers
from inference_api.backend.engines.base import EngineInfo, PoolSpec, RowPlan, SampleSpec, ScoreSpec, StepPlan
from inference_api.backend.kv_cache import RowPool
from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.messages import Submit

MAX_DRAFTED_STEP_TOKENS = 8
"""Rows guess ahead only in steps of so few tokens, guesses included: there a token more costs next to nothing."""

SCORED_TOKEN_COST = 2
"""A prompt id counts so often while it is scored: its logits, and the most likely ids, cost half of computing it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRules:
    """What the scheduler must know of the vocabulary: the bytes of every id, and the ids that end a sequence."""

    token_bytes: Several[bytes]
    stop_ids: frozenset[int]

    def end_ids(self, submit: Submit) -> frozenset[int]:
        """Return the ids that end a sequence: the model's own ends unless they are ignored, and the request's."""
        model: frozenset[int] = frozenset() if submit.ignore_eos else self.stop_ids
        return model.union(submit.stop_ids) if submit.stop_ids else model


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the rows may share and save; prefixes and drafts as far as the engine can do it.

    `kv_tokens` bounds the known ids of all running rows together and is no less than the context (0: no bound);
    `prefix_reuse` lets a prompt begin with what a row of its tenant holds; `draft_tokens` are guessed a row and step.
    Requests that batch wait `batch_window_seconds` for others (0: not at all), at most `batch_max_requests` together.
    """

    kv_tokens: int = 0
    prefix_reuse: bool = False
    draft_tokens: int = 0
    batch_window_seconds: float = 0.0
    batch_max_requests: int = 32


class StepPlanner:
    """Plan steps over the rows that run."""

    def __init__(
        self,
        info: EngineInfo,
        rules: TokenRules,
        rows: RowPool,
        options: SchedulerOptions,
        counts: collections.Counter[str],
    ) -> None:
        """`rows` says what a row already holds; `counts` are the service's counters of prefixes and drafts."""
        self._context_tokens = info.context_tokens
        self._rules = rules
        self._rows = rows
        self._max_kv_tokens = options.kv_tokens or math.inf
        self._max_draft_tokens = min(options.draft_tokens, info.max_draft_tokens)
        self._counts = counts

    def plan(self, running: Iterable[Sequence], budget: int, num_known_tokens: int) -> StepPlan:
        """Plan every decoding row, and prompts in the order of `running` as far as `budget` prompt tokens go.

        A row sits the step out if its mask is late. Others' masks, where they are likely to be needed, are found from
        now on, beside the forward pass. `num_known_tokens` are the slots that all running rows need: guesses take none
        that are not left.
        """
        self._rows.open_plan()
        rows: dict[int, RowPlan] = {}
        owners = {sequence.row: sequence for sequence in running}
        for sequence in owners.values():
            num_tokens = sequence.num_uncomputed_tokens
            if sequence.mask is not None and sequence.mask.is_late(sequence.token_ids):
                continue
            if num_tokens == 1 or budget:
                row = self._row_plan(sequence, budget)
                cost = len(row.token_ids) * (1 if row.score is None else SCORED_TOKEN_COST)
                budget -= min(budget, cost) if num_tokens > 1 else 0
                rows[row.row] = row
        ordered = [rows[row] for row in sorted(rows)]
        drafted = self._with_drafts(ordered, owners, num_known_tokens)
        for row in drafted:
            mask = owners[row.row].mask
            if row.sample is not None and mask is not None:
                mask.expect(row.sample.known_ids, row.draft_ids, surely=not row.sample.tries_before_mask)
        return StepPlan(tuple(drafted))

    def num_left(self, sequence: Sequence) -> int:
        """Count the ids that may still come before max_tokens is reached or the next id would have no slot."""
        return min(
            sequence.submit.max_tokens - sequence.num_completion_tokens,
            self._context_tokens - len(sequence.token_ids),
        )

    def _row_plan(self, sequence: Sequence, budget: int) -> RowPlan:
        """Plan the next known ids of a sequence, one of them or as many as `budget` allows."""
        prefix = None
        if sequence.status is not SequenceStatus.DECODING:
            prefix = self._rows.begin(sequence, may_reuse=sequence.may_reuse)
        if prefix is not None:
            self._counts["prefix_hits"] += 1
            self._counts["prefix_tokens"] += prefix.num_tokens - sequence.num_computed_tokens
            sequence.reuse(prefix.num_tokens)
        start = sequence.num_computed_tokens
        end = min(len(sequence.token_ids), self._chunk_end(sequence, budget))
        is_last = end == len(sequence.token_ids)
        pooling = sequence.submit.pooling
        return RowPlan(
            sequence.row,
            start,
            tuple(sequence.token_ids[start:end]),
            self._sample_spec(sequence) if is_last and sequence.draws else None,
            prefix,
            pool=PoolSpec(pooling, is_last) if pooling is not None else None,
            score=_score_spec(sequence, start, end),
        )

    def _chunk_end(self, sequence: Sequence, budget: int) -> int:
        """Return where a chunk of `budget` ids ends: one that is scored is shorter, and none is scored twice."""
        start = sequence.num_computed_tokens
        if not sequence.num_unscored_tokens:
            return start + max(1, budget)
        if start < sequence.num_scored_tokens:
            return min(start + max(1, budget), sequence.num_scored_tokens)
        return start + max(1, budget // SCORED_TOKEN_COST)

    def _sample_spec(self, sequence: Sequence) -> SampleSpec:
        """Say how to draw the id after the known ones."""
        submit = sequence.submit
        may_end = sequence.num_completion_tokens >= submit.min_tokens
        params = submit.sampling
        reads_known_ids = params.reads_known_ids or sequence.mask is not None
        return SampleSpec(
            params,
            submit.choice,
            len(sequence.token_ids),
            submit.num_prompt_tokens,
            known_ids=tuple(sequence.token_ids) if reads_known_ids else (),
            barred_ids=frozenset() if may_end else self._rules.end_ids(submit),
            mask=sequence.mask,
            breakers=self._breakers(sequence),
            mu=sequence.mu,
        )

    def _breakers(self, sequence: Sequence) -> ByteBreakers | None:
        """Return what a sequence's repetitions do not reach over, as far as its ids are known; None for nothing."""
        params = sequence.submit.sampling
        if not params.dry_multiplier or not params.dry_sequence_breakers:
            return None
        if sequence.breakers is None:
            sequence.breakers = ByteBreakers(self._rules.token_bytes, params.dry_sequence_breakers)
        sequence.breakers.follow(sequence.token_ids)
        return sequence.breakers

    def _with_drafts(self, rows: list[RowPlan], running: Mapping[int, Sequence], num_known: int) -> list[RowPlan]:
        """Let the rows that sample guess ahead, each its share of what makes a step small."""
        sampling = [
            row for row in rows if row.sample and not (row.sample.barred_ids or row.sample.params.mirostat or row.score)
        ]
        room = MAX_DRAFTED_STEP_TOKENS - sum(len(row.token_ids) for row in rows)
        room = int(min(room, self._max_kv_tokens - num_known))
        if not self._max_draft_tokens or room < 1 or not sampling:
            return rows
        drafted: dict[int, RowPlan] = {}
        for num_done, row in enumerate(sampling):
            share = min(self._max_draft_tokens, room // (len(sampling) - num_done))
            sequence = running[row.row]
            share = min(share, self.num_left(sequence) - 1)
            draft_ids = sequence.drafts.propose(share)
            if sequence.mask is not None and share > 0:
                draft_ids = sequence.mask.guess(sequence.token_ids, draft_ids, share)
            room -= len(draft_ids)
            drafted[row.row] = dataclasses.replace(row, draft_ids=draft_ids)
            self._counts["draft_tokens"] += len(draft_ids)
        return [drafted.get(row.row, row) for row in rows]


def _score_spec(sequence: Sequence, start: int, end: int) -> ScoreSpec | None:
    """Ask for the logprobs of the prompt ids after those in [start, end), as far as they have not been sent yet."""
    num_top, num_prompt_tokens = sequence.submit.prompt_logprobs, sequence.submit.num_prompt_tokens
    next_ids = tuple(sequence.token_ids[start + 1 : min(end + 1, num_prompt_tokens)])
    if num_top is None or start < sequence.num_scored_tokens or not next_ids:
        return None
    return ScoreSpec(next_ids, num_top)
