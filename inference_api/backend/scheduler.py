"""Own every sequence of the backend: who waits, who has a row, what each step computes, and when each one ends.

Pure and single-threaded: the decode thread calls `apply`, `schedule`, `update` in turn, and time is an argument.
There is no prefill phase and no decode phase, only sequences whose computed ids catch up with their known ids under a
budget of prompt tokens a step; one that makes room for others catches up again later. `_finish` is the one owner of
the end. Knows nothing of engines, sockets or text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from inference_api.backend.admission import Admission
from inference_api.backend.batch_window import BatchWindow
from inference_api.backend.engines.base import (
    EngineInfo,
    PrefillBudget,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
)
from inference_api.backend.figures import Figures
from inference_api.backend.inbox_messages import InboxMessage, KeyedSubmit, MaskedSubmit, MaskReady, WorkerGone
from inference_api.backend.kv_cache import RowPool
from inference_api.backend.prefill_budget import prompt_tokens
from inference_api.backend.readers import Leaves
from inference_api.backend.request_records import RequestRecords
from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.backend.step_planning import SchedulerOptions, StepPlanner, TokenRules
from inference_api.backend.views import row_view
from inference_api.backend.waiting_line import WaitingLine
from inference_api.errors import GenerationError
from inference_api.messages import (
    Abort,
    Dropped,
    ErrorInfo,
    Finished,
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

_NO_RESULT = ErrorInfo(GenerationError.code, "The engine made nothing of this request.")

GROWTH_TOKENS = 8
"""Slots that must be free for every running row before another one starts: else it would soon make room again."""


class Scheduler:
    """Decide each step under a budget of prompt tokens.

    Invariant: `_running` is in the order in which rows were first taken, and so are those who made room; they come
    before all others that wait, whose tenants keep the order of arrival.
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
        self._rows = RowPool(info.num_rows, remembers=options.prefix_reuse and info.copies_prefixes)
        self._window = BatchWindow(options.batch_window_seconds, options.batch_max_requests)
        self._waiting = WaitingLine()
        self._running: dict[int, Sequence] = {}
        self._records = RequestRecords()
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._snapshots: list[tuple[str, Snapshot]] = []
        self._released: list[int] = []
        self._figures = Figures(info.context_tokens)
        self._metrics = self._figures.counts
        self._sits_out = False
        self._planner = StepPlanner(info, rules, self._rows, options, self._metrics)

    @property
    def is_empty(self) -> bool:
        """Tell whether no sequence waits or runs and no event is left to send."""
        return not self._window and not self._waiting and not self._running and not self._outputs

    def next_wake(self, now: float) -> float:
        """Return how many seconds the loop may wait for a message: none while a row can go on, at most 1."""
        if (self._running and not self._sits_out) or self._outputs or self._snapshots:
            return 0.0
        events = [self._window.ends_at, *(sequence.deadline for sequence in self._sequences())]
        return max(0.0, min(MAX_IDLE_SECONDS, *(at - now for at in events)))

    def apply(self, messages: Iterable[tuple[str, InboxMessage]], now: float) -> None:
        """Take in messages as (worker, message), and end what is over its deadline."""
        for worker, message in messages:
            match message:
                case Submit():
                    self._submit(Sequence(message, worker, now))
                case MaskedSubmit():
                    self._submit(Sequence(message.submit, worker, now, message.mask))
                case KeyedSubmit(follows=True):
                    self._follow(message)
                case KeyedSubmit():
                    self._submit(Sequence(message.submit, worker, now, message.mask, message.readers))
                case Abort():
                    self._abort(message, now)
                case WorkerGone():
                    self._lose(message.worker, now)
                case Dropped():
                    self._metrics["late_tokens"] += message.late_tokens
                    self._metrics["foreign_tokens"] += message.foreign_tokens
                case MaskReady():
                    self._sits_out = False
                case Query():
                    self._snapshots.append((worker, self._snapshot(message, now)))
        for sequence in [s for s in self._sequences() if s.deadline <= now]:
            error = ErrorInfo("deadline_exceeded", sequence.deadline_text)
            self._finish(sequence, FinishReason.ERROR, now, error)

    def schedule(self, now: float) -> StepPlan:
        """Give rows to those who fit, then plan the step: every decoding row, and prompts under the budget."""
        for sequence in self._window.take(now, at_once=self._admission.draining):
            self._waiting.append(sequence)
        self._make_room()
        self._start_waiting(now)
        plan = self._planner.plan(self._running.values(), self._prompt_tokens(), self._num_known_tokens)
        self._sits_out = not plan.rows  # those that run, if any, wait for their masks
        self._metrics["steps"] += bool(plan.rows)
        self._metrics["scheduled_tokens"] += sum(len(row.token_ids) for row in plan.rows)
        return plan

    def _prompt_tokens(self) -> int:
        num_rows, num_running = self._info.num_rows, len(self._running)
        num_decoding = sum(sequence.num_uncomputed_tokens == 1 for sequence in self._running.values())
        num_prompts = num_running - num_decoding
        return prompt_tokens(self._budget, num_rows=num_rows, num_decoding=num_decoding, num_prompts=num_prompts)

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[str, StepOutput]:
        """Take in what the engine made of `plan`; return one message for each worker that has news."""
        results = {row_result.row: row_result for row_result in result.rows}
        num_answered = sum(row.sample is not None or row.pool is not None or row.score is not None for row in plan.rows)
        for row_plan in plan.rows:
            sequence = self._running[row_plan.row]
            sequence.batch_size = max(sequence.batch_size, num_answered)
            sequence.advance(len(row_plan.token_ids))
            row_result = results.get(row_plan.row, _NOTHING)
            if row_result.error is not None:
                self._fail(sequence, ErrorInfo(GenerationError.code, row_result.error.message), now)
            elif not _is_answered(row_plan, row_result):
                self._fail(sequence, _NO_RESULT, now)
            elif row_result.token_ids:
                self._take_result(sequence, row_plan, row_result, now)
            else:
                self._take_prompt(sequence, row_result, now)
        for sequence in self._running.values():
            if sequence.readers is not None:
                self._queue(sequence.readers.catch_up(sequence.row, sequence.epoch))
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

    def take_unclean(self) -> list[int]:
        """Return the rows whose content nobody may use any more, for the engine to zero before the next step."""
        return self._rows.take_unclean()

    def borrow_row(self) -> int:
        """Return a free row that the caller may run anything in before the next `schedule`; none must run or wait."""
        return self._rows.forget_least()

    def _sequences(self) -> list[Sequence]:
        return [*self._waiting, *self._window, *self._running.values()]

    def _submit(self, sequence: Sequence) -> None:
        submit = sequence.submit
        sequence.recall(self._rules.token_bytes[token_id] for token_id in submit.token_ids[submit.num_prompt_tokens :])
        if not (submit.batches and self._window.hold(sequence, sequence.arrived_at)):
            self._waiting.append(sequence)
        self._records.add(sequence)
        self._metrics["requests"] += 1
        self._metrics["prompt_tokens"] += submit.num_prompt_tokens

    def _follow(self, message: KeyedSubmit) -> None:
        """Let a repeated call read what the first one's sequence makes, or has made."""
        submit = message.submit
        if message.readers.is_ended:
            self._queue(message.readers.replay())
            return
        for sequence in self._records.open_sequences(submit.tenant, submit.request_id):
            if sequence.readers is not None:
                message.readers.join(sequence.readers)

    def _abort(self, abort: Abort, now: float) -> None:
        """End a request's sequences; of one call among several that share them, only its own sessions."""
        for sequence in self._records.open_sequences(abort.tenant, abort.request_id):
            if sequence.readers is not None and abort.call_id:
                self._leave(sequence, lambda reader: reader.call_id == abort.call_id, now)
            else:
                self._finish(sequence, FinishReason.ABORT, now)

    def _lose(self, worker: str, now: float) -> None:
        """End what only a worker that is gone has read."""
        for sequence in self._sequences():
            if sequence.readers is not None:
                self._leave(sequence, lambda reader: reader.worker == worker, now)
            elif sequence.worker == worker:
                self._finish(sequence, FinishReason.ABORT, now)
        self._outputs.pop(worker, None)

    def _leave(self, sequence: Sequence, leaves: Leaves, now: float) -> None:
        """Let some readers of a sequence go, each with an end of its own; the sequence ends with the last of them."""
        if sequence.readers is None or sequence.readers.break_off(leaves):
            self._finish(sequence, FinishReason.ABORT, now)
            return
        finished = Finished(FinishReason.ABORT, sequence.num_completion_tokens, sequence.timing(now))
        output = SequenceOutput("", sequence.row, sequence.epoch, 0, [], finished)
        self._queue(sequence.readers.dismiss(leaves, output))

    @property
    def _num_known_tokens(self) -> int:
        """Slots that the running rows need once everything known is computed."""
        return sum(len(sequence.token_ids) for sequence in self._running.values())

    def _make_room(self) -> None:
        """Take rows back, the latest first, until the KV cache holds what is known; one sequence always fits.

        Invariant: the oldest keeps its row, so that something always comes to its end.
        """
        while len(self._running) > 1 and self._num_known_tokens > self._max_kv_tokens:
            row, sequence = self._running.popitem()
            sequence.preempt()
            self._give_back(row)
            self._waiting.put_back(sequence)
            self._admission.wait_again(len(sequence.submit.token_ids))
            self._metrics["preemptions"] += 1

    def _start_waiting(self, now: float) -> None:
        """Give free rows to those who wait, in the line's order, as far as the KV cache has room for them to grow."""
        while self._waiting and self._rows.num_free:
            sequence = self._waiting.first()
            num_tokens = self._num_known_tokens + len(sequence.token_ids) + GROWTH_TOKENS * (len(self._running) + 1)
            if self._running and num_tokens > self._max_kv_tokens:
                break
            self._waiting.take_first()
            row, epoch = self._rows.allocate(sequence)
            sequence.start(row, epoch, now)
            self._running[row] = sequence
            self._metrics["prefix_queried_tokens"] += len(sequence.token_ids) if self._rows.remembers else 0
            self._admission.start(len(sequence.submit.token_ids))

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
            elif self._planner.num_left(sequence) < 1:
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
        output = self._output(sequence, index, token_ids, result)
        sequence.mu = result.mu
        output = msgspec.structs.replace(output, logprobs=logprobs, mu=result.mu)
        if reason is not None:
            self._finish(sequence, reason, now, output=output)
        else:
            self._send(sequence, output)

    def _take_prompt(self, sequence: Sequence, result: RowResult, now: float) -> None:
        """Queue what a step found out about known ids; a sequence that asks for no other ends with the last of them."""
        output = self._output(sequence, sequence.num_completion_tokens, [], result)
        if sequence.num_uncomputed_tokens == 0 and not sequence.draws:
            sequence.embedding = result.embedding
            reason = FinishReason.LENGTH if result.embedding is None else FinishReason.STOP
            self._finish(sequence, reason, now, output=output)
        elif result.scores:
            self._send(sequence, output)

    def _output(self, sequence: Sequence, index: int, token_ids: list[int], result: RowResult) -> SequenceOutput:
        """Return what a step made for a sequence, whose prompt ids that are scored now are scored for good."""
        sequence.num_scored_tokens += len(result.scores)
        output = SequenceOutput(sequence.session_id, sequence.row, sequence.epoch, index, token_ids)
        return msgspec.structs.replace(output, prompt_logprobs=list(result.scores)) if result.scores else output

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
            if not self._window.drop(sequence):
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
        if sequence.readers is None:
            self._queue([(sequence.worker, output)])
        else:
            self._queue(sequence.readers.take(output, sequence.finished_at))

    def _queue(self, outputs: Iterable[tuple[str, SequenceOutput]]) -> None:
        for worker, output in outputs:
            self._outputs.setdefault(worker, []).append(output)

    def _snapshot(self, query: Query, now: float) -> Snapshot:
        num_rows = self._info.num_rows
        waiting = [*self._waiting, *self._window]
        snapshot = Snapshot(query.query_id, len(waiting), num_rows, len(self._running))
        parts: dict[str, object] = {}
        if query.kind is QueryKind.ROWS:
            parts["rows"] = [row_view(row, self._running.get(row), query.tenant, now) for row in range(num_rows)]
        elif query.kind is QueryKind.REQUEST:
            parts["request"] = self._records.view(query.tenant, query.request_id, now, waiting)
        else:
            parts["metrics"] = {**self._metrics, "refused": self._admission.num_refused}
            parts["kv_usage"] = self._num_known_tokens / min(self._max_kv_tokens, num_rows * self._info.context_tokens)
            parts["histograms"] = self._figures.histograms()
        return msgspec.structs.replace(snapshot, **parts)


def _is_answered(plan: RowPlan, result: RowResult) -> bool:
    """Tell whether an engine made all that was planned for a row."""
    return (
        (plan.sample is None or bool(result.token_ids))
        and (plan.pool is None or not plan.pool.is_last or result.embedding is not None)
        and (plan.score is None or len(result.scores) == len(plan.score.next_ids))
    )
