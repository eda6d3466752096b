"""Own every sequence of the backend: who waits, who has a row, what each step computes, and when each one ends.

Pure and single-threaded: the decode thread calls `apply`, `schedule`, `update` in turn, and time is an argument.
There is no prefill phase and no decode phase, only sequences whose computed ids catch up with their known ids under a
budget of prompt tokens a step; one that makes room for others catches up again later. `_finish` is the one owner of
the end. Knows nothing of engines, sockets or text.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Sequence as Several

import msgspec

from inference_api.backend.admission import Admission
from inference_api.backend.engines.base import (
    EngineInfo,
    PrefillBudget,
    RowPlan,
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenMask,
)
from inference_api.backend.figures import Figures
from inference_api.backend.inbox_messages import InboxMessage, MaskedSubmit, WorkerGone
from inference_api.backend.kv_cache import RowPool
from inference_api.backend.prefill_budget import prompt_tokens
from inference_api.backend.request_records import RequestRecords
from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.backend.views import row_view
from inference_api.errors import GenerationError
from inference_api.messages import (
    Abort,
    Dropped,
    ErrorInfo,
    FinishReason,
    Query,
    QueryKind,
    SequenceOutput,
    Snapshot,
    StepOutput,
    Submit,
)

MAX_IDLE_SECONDS = 1.0
"""An idle loop still steps so often: its heartbeat stays fresh."""

_NOTHING = RowResult(-1)

_NO_RESULT = ErrorInfo(GenerationError.code, "The engine drew no token.")

MAX_DRAFTED_STEP_TOKENS = 8
"""Rows guess ahead only in steps of so few tokens, guesses included: there a token more costs next to nothing."""

GROWTH_TOKENS = 8
"""Slots that must be free for every running row before another one starts: else it would soon make room again."""


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
    """What the rows may share and save; the last two as far as the engine can do it.

    `kv_tokens` bounds the known ids of all running rows together and is no less than the context (0: no bound);
    `prefix_reuse` lets a prompt begin with what a row of its tenant holds; `draft_tokens` are guessed a row and step.
    """

    kv_tokens: int = 0
    prefix_reuse: bool = False
    draft_tokens: int = 0


class Scheduler:
    """Decide each step under a budget of prompt tokens.

    Invariant: whoever runs came before whoever waits, and `_running` is in the order of arrival.
    """

    def __init__(
        self,
        info: EngineInfo,
        rules: TokenRules,
        admission: Admission,
        budget: PrefillBudget,
        options: SchedulerOptions | None = None,
    ) -> None:
        self._info = info
        self._rules = rules
        self._admission = admission
        self._budget = budget
        options = options or SchedulerOptions()
        self._max_kv_tokens = options.kv_tokens or math.inf
        self._max_draft_tokens = min(options.draft_tokens, info.max_draft_tokens)
        self._rows = RowPool(info.num_rows, remembers=options.prefix_reuse and info.copies_prefixes)
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[int, Sequence] = {}
        self._records = RequestRecords()
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._snapshots: list[tuple[str, Snapshot]] = []
        self._released: list[int] = []
        self._figures = Figures(info.context_tokens)
        self._metrics = self._figures.counts

    @property
    def is_empty(self) -> bool:
        """Tell whether no sequence waits or runs and no event is left to send."""
        return not self._waiting and not self._running and not self._outputs

    def next_wake(self, now: float) -> float:
        """Return how many seconds the loop may wait for a message: none while there is work, at most 1."""
        if self._running or self._outputs or self._snapshots:
            return 0.0
        deadlines = [sequence.deadline - now for sequence in self._waiting]
        return max(0.0, min([MAX_IDLE_SECONDS, *deadlines]))

    def apply(self, messages: Iterable[tuple[str, InboxMessage]], now: float) -> None:
        """Take in messages as (worker, message), and end what is over its deadline."""
        for worker, message in messages:
            match message:
                case Submit():
                    self._submit(worker, message, now)
                case MaskedSubmit():
                    self._submit(worker, message.submit, now, message.mask)
                case Abort():
                    for sequence in self._records.open_sequences(message.tenant, message.request_id):
                        self._finish(sequence, FinishReason.ABORT, now)
                case WorkerGone():
                    for sequence in [s for s in self._sequences() if s.worker == message.worker]:
                        self._finish(sequence, FinishReason.ABORT, now)
                    self._outputs.pop(message.worker, None)
                case Dropped():
                    self._metrics["late_tokens"] += message.late_tokens
                    self._metrics["foreign_tokens"] += message.foreign_tokens
                case Query():
                    self._snapshots.append((worker, self._snapshot(message, now)))
        for sequence in [s for s in self._sequences() if s.deadline <= now]:
            error = ErrorInfo("deadline_exceeded", sequence.deadline_text)
            self._finish(sequence, FinishReason.ERROR, now, error)

    def schedule(self, now: float) -> StepPlan:
        """Give rows to those who fit, then plan the step: every decoding row, and prompts under the budget."""
        self._make_room()
        self._start_waiting(now)
        self._rows.open_plan()
        budget = self._prompt_tokens()
        rows: list[RowPlan] = []
        for sequence in self._running.values():
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens == 1 or budget:
                row = self._row_plan(sequence, budget)
                budget -= len(row.token_ids) if num_tokens > 1 else 0
                rows.append(row)
        rows.sort(key=lambda plan: plan.row)
        self._metrics["steps"] += bool(rows)
        self._metrics["scheduled_tokens"] += sum(len(plan.token_ids) for plan in rows)
        return StepPlan(tuple(self._with_drafts(rows)))

    def _prompt_tokens(self) -> int:
        num_rows, num_running = self._info.num_rows, len(self._running)
        num_decoding = sum(sequence.num_uncomputed_tokens == 1 for sequence in self._running.values())
        num_prompts = num_running - num_decoding
        return prompt_tokens(self._budget, num_rows=num_rows, num_decoding=num_decoding, num_prompts=num_prompts)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[str, StepOutput]:
        """Take in what the engine made of `plan`; return one message for each worker that has news."""
        results = {row_result.row: row_result for row_result in result.rows}
        num_sampled = sum(row_plan.sample is not None for row_plan in plan.rows)
        for row_plan in plan.rows:
            sequence = self._running[row_plan.row]
            sequence.batch_size = max(sequence.batch_size, num_sampled)
            sequence.advance(len(row_plan.token_ids))
            row_result = results.get(row_plan.row, _NOTHING)
            if row_result.error is not None:
                self._fail(sequence, ErrorInfo(GenerationError.code, row_result.error.message), now)
            elif row_result.token_ids:
                self._take_result(sequence, row_plan, row_result, now)
            elif row_plan.sample is not None:
                self._fail(sequence, _NO_RESULT, now)
        outputs, self._outputs = self._outputs, {}
        return {worker: StepOutput(items) for worker, items in outputs.items()}

    def take_snapshots(self) -> list[tuple[str, Snapshot]]:
        """Return the answers to queries since the last call, as (worker, snapshot)."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def take_released(self) -> list[int]:
        """Return the rows given back since the last call, for the engine to know."""
        released, self._released = self._released, []
        return released

    def borrow_row(self) -> int:
        """Return a free row that the caller may run anything in before the next `schedule`; none must run or wait."""
        return self._rows.forget_least()

    def _sequences(self) -> list[Sequence]:
        return [*self._waiting, *self._running.values()]

    def _submit(self, worker: str, submit: Submit, now: float, mask: TokenMask | None = None) -> None:
        sequence = Sequence(submit, worker, now, mask)
        sequence.recall(self._rules.token_bytes[token_id] for token_id in submit.token_ids[submit.num_prompt_tokens :])
        self._waiting.append(sequence)
        self._records.add(sequence)
        self._metrics["requests"] += 1
        self._metrics["prompt_tokens"] += submit.num_prompt_tokens

    @property
    def _num_known_tokens(self) -> int:
        """Slots that the running rows need once everything known is computed."""
        return sum(len(sequence.token_ids) for sequence in self._running.values())

    def _make_room(self) -> None:
        """Take rows back, the latest arrival's first, until the KV cache holds what is known; one sequence always fits.

        Invariant: the oldest keeps its row, so that something always comes to its end.
        """
        while len(self._running) > 1 and self._num_known_tokens > self._max_kv_tokens:
            row, sequence = self._running.popitem()
            sequence.preempt()
            self._give_back(row)
            self._waiting.appendleft(sequence)
            self._admission.wait_again(len(sequence.submit.token_ids))
            self._metrics["preemptions"] += 1

    def _start_waiting(self, now: float) -> None:
        """Give free rows to those who wait, in their order, as far as the KV cache has room for them to grow."""
        while self._waiting and self._rows.num_free:
            sequence = self._waiting[0]
            num_tokens = self._num_known_tokens + len(sequence.token_ids) + GROWTH_TOKENS * (len(self._running) + 1)
            if self._running and num_tokens > self._max_kv_tokens:
                break
            self._waiting.popleft()
            row, epoch = self._rows.allocate(sequence)
            sequence.start(row, epoch, now)
            self._running[row] = sequence
            self._metrics["prefix_queried_tokens"] += len(sequence.token_ids) if self._rows.remembers else 0
            self._admission.start(len(sequence.submit.token_ids))

    def _row_plan(self, sequence: Sequence, budget: int) -> RowPlan:
        """Plan the next known ids of a sequence, one of them or as many as `budget` allows."""
        prefix = None if sequence.status is SequenceStatus.DECODING else self._rows.begin(sequence)
        if prefix is not None:
            self._metrics["prefix_hits"] += 1
            self._metrics["prefix_tokens"] += prefix.num_tokens - sequence.num_computed_tokens
            sequence.reuse(prefix.num_tokens)
        start = sequence.num_computed_tokens
        end = min(len(sequence.token_ids), start + max(1, budget))
        sample = None
        if end == len(sequence.token_ids):
            sample = self._sample_spec(sequence)
        return RowPlan(sequence.row, start, tuple(sequence.token_ids[start:end]), sample, prefix)

    def _sample_spec(self, sequence: Sequence) -> SampleSpec:
        """Say how to draw the id after the known ones."""
        submit = sequence.submit
        may_end = sequence.num_completion_tokens >= submit.min_tokens
        reads_known_ids = submit.sampling.reads_known_ids or sequence.mask is not None
        return SampleSpec(
            submit.sampling,
            submit.choice,
            len(sequence.token_ids),
            submit.num_prompt_tokens,
            known_ids=tuple(sequence.token_ids) if reads_known_ids else (),
            barred_ids=frozenset() if may_end else self._rules.end_ids(submit),
            mask=sequence.mask,
        )

    def _with_drafts(self, rows: list[RowPlan]) -> list[RowPlan]:
        """Let the rows that sample guess ahead, each its share of what makes a step small."""
        sampling = [row for row in rows if row.sample and not (row.sample.mask or row.sample.barred_ids)]
        room = MAX_DRAFTED_STEP_TOKENS - sum(len(row.token_ids) for row in rows)
        room = int(min(room, self._max_kv_tokens - self._num_known_tokens))
        if not self._max_draft_tokens or room < 1 or not sampling:
            return rows
        drafted: dict[int, RowPlan] = {}
        for num_done, row in enumerate(sampling):
            share = min(self._max_draft_tokens, room // (len(sampling) - num_done))
            sequence = self._running[row.row]
            draft_ids = sequence.drafts.propose(min(share, self._num_left(sequence) - 1))
            room -= len(draft_ids)
            drafted[row.row] = dataclasses.replace(row, draft_ids=draft_ids)
            self._metrics["draft_tokens"] += len(draft_ids)
        return [drafted.get(row.row, row) for row in rows]

    def _take_result(self, sequence: Sequence, plan: RowPlan, result: RowResult, now: float) -> None:
        """Append the drawn ids up to the one that ends the sequence; queue them for the worker."""
        self._figures.take_draw(sequence, now)
        index = sequence.num_completion_tokens
        end_ids = self._rules.end_ids(sequence.submit)
        reason: FinishReason | None = None
        for token_id in result.token_ids:
            stopped = sequence.append(token_id, self._rules.token_bytes[token_id], now)
            if stopped or (token_id in end_ids and sequence.may_end):
                reason = FinishReason.STOP
            elif self._num_left(sequence) < 1:
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        token_ids = sequence.token_ids[sequence.submit.num_prompt_tokens + index :]
        self._metrics["completion_tokens"] += len(token_ids)
        self._metrics["discarded_tokens"] += len(result.token_ids) - len(token_ids)
        if plan.draft_ids:
            num_accepted = len(result.token_ids) - 1
            self._metrics["accepted_draft_tokens"] += num_accepted
            sequence.drafts.settle(len(plan.draft_ids), num_accepted)
            sequence.advance(min(num_accepted, len(token_ids)))
        logprobs = None if result.logprobs is None else list(result.logprobs[: len(token_ids)])
        output = SequenceOutput(sequence.session_id, sequence.row, sequence.epoch, index, token_ids, logprobs=logprobs)
        if reason is not None:
            self._finish(sequence, reason, now, output=output)
        else:
            self._send(sequence, output)

    def _num_left(self, sequence: Sequence) -> int:
        """Count the ids that may still come before max_tokens is reached or the next id would have no slot."""
        return min(
            sequence.submit.max_tokens - sequence.num_completion_tokens,
            self._info.context_tokens - len(sequence.token_ids),
        )

    def _fail(self, sequence: Sequence, error: ErrorInfo, now: float) -> None:
        """End a sequence that the engine failed on; what its row holds is not used again."""
        self._rows.spoil(sequence.row)
        self._finish(sequence, FinishReason.ERROR, now, error)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        error: ErrorInfo | None = None,
        output: SequenceOutput | None = None,
    ) -> None:
        """End a sequence: free its row and its place, record it, queue its one terminal event, with its last `output`.

        Invariant: every end comes through here, and the row is free for the next `schedule`.
        """
        was_waiting = sequence.status is SequenceStatus.WAITING
        finished = sequence.finish(reason, now, error)
        if was_waiting:
            self._waiting.remove(sequence)
            self._admission.start(len(sequence.submit.token_ids))
        else:
            del self._running[sequence.row]
            self._give_back(sequence.row)
        self._admission.release(None if sequence.started_at is None else sequence.running_seconds(now))
        self._records.end(sequence, now)
        self._figures.take_end(sequence, finished)
        if output is None:
            index = sequence.num_completion_tokens
            output = SequenceOutput(sequence.session_id, sequence.row, sequence.epoch, index, [])
        self._send(sequence, msgspec.structs.replace(output, finished=finished))

    def _give_back(self, row: int) -> None:
        self._rows.free(row)
        self._released.append(row)

    def _send(self, sequence: Sequence, output: SequenceOutput) -> None:
        self._outputs.setdefault(sequence.worker, []).append(output)

    def _snapshot(self, query: Query, now: float) -> Snapshot:
        num_rows = self._info.num_rows
        snapshot = Snapshot(query.query_id, len(self._waiting), num_rows, len(self._running))
        parts: dict[str, object] = {}
        if query.kind is QueryKind.ROWS:
            parts["rows"] = [row_view(row, self._running.get(row), query.tenant, now) for row in range(num_rows)]
        elif query.kind is QueryKind.REQUEST:
            parts["request"] = self._records.view(query.tenant, query.request_id, now, self._waiting)
        else:
            parts["metrics"] = {**self._metrics, "refused": self._admission.num_refused}
            parts["kv_usage"] = self._num_known_tokens / min(self._max_kv_tokens, num_rows * self._info.context_tokens)
            parts["histograms"] = self._figures.histograms()
        return msgspec.structs.replace(snapshot, **parts)
