"""Own every sequence of the backend: who waits, who has a row, what each step computes, and when each one ends.

Pure and single-threaded: the decode thread calls `apply`, `schedule`, `update` in turn, and time is an argument.
There is no prefill phase and no decode phase, only sequences whose computed ids catch up with their known ids under a
budget of prompt tokens a step. `_finish` is the one owner of the end. Knows nothing of engines, sockets or text.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Several

from inference_api.backend.admission import Admission
from inference_api.backend.engines.base import (
    EngineInfo,
    PrefillBudget,
    RowPlan,
    RowResult,
    SampleSpec,
    StepPlan,
    StepResult,
)
from inference_api.backend.kv_cache import RowAllocator
from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.backend.views import request_view, row_view
from inference_api.errors import GenerationError
from inference_api.messages import (
    Abort,
    Dropped,
    ErrorInfo,
    FinishReason,
    Query,
    QueryKind,
    RequestView,
    SequenceOutput,
    Snapshot,
    StepOutput,
    Submit,
)

MAX_IDLE_SECONDS = 1.0
"""An idle loop still steps so often: its heartbeat stays fresh."""

_NO_RESULT = ErrorInfo(GenerationError.code, "The engine drew no token.")

MAX_ENDED_REQUESTS = 1024
"""Ended requests whose figures can still be asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerGone:
    """Say that a worker's connection is lost: its sessions have no reader any more."""

    worker: str


InboxMessage = Submit | Abort | Query | Dropped | WorkerGone


@dataclasses.dataclass(frozen=True, slots=True)
class TokenRules:
    """What the scheduler must know of the vocabulary: the bytes of every id, and the ids that end a sequence."""

    token_bytes: Several[bytes]
    stop_ids: frozenset[int]


class Scheduler:
    """Decide each step under a budget of prompt tokens."""

    def __init__(self, info: EngineInfo, rules: TokenRules, admission: Admission, budget: PrefillBudget) -> None:
        self._info = info
        self._rules = rules
        self._admission = admission
        self._budget = budget
        self._rows = RowAllocator(info.num_rows)
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[int, Sequence] = {}
        self._by_request: dict[tuple[str, str], list[Sequence]] = {}
        self._ended: collections.OrderedDict[tuple[str, str], RequestView] = collections.OrderedDict()
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._snapshots: list[tuple[str, Snapshot]] = []
        self._released: list[int] = []
        self._metrics: collections.Counter[str] = collections.Counter()

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
                case Abort():
                    for sequence in list(self._by_request.get((message.tenant, message.request_id), ())):
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
        """Give free rows to those who wait, then plan the step: every decoding row, and prompts under the budget."""
        while self._waiting and self._rows.num_free:
            sequence = self._waiting.popleft()
            row, epoch = self._rows.allocate()
            sequence.start(row, epoch, now)
            self._running[row] = sequence
            self._admission.start(len(sequence.submit.token_ids))
        decoding = any(s.num_uncomputed_tokens == 1 for s in self._running.values())
        budget = self._budget.beside_tokens if decoding else self._budget.alone_tokens
        rows: list[RowPlan] = []
        for sequence in sorted(self._running.values(), key=lambda s: s.arrived_at):
            num_tokens = sequence.num_uncomputed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                budget -= num_tokens
            if num_tokens:
                rows.append(self._row_plan(sequence, num_tokens))
        rows.sort(key=lambda plan: plan.row)
        self._metrics["steps"] += bool(rows)
        self._metrics["scheduled_tokens"] += sum(len(plan.token_ids) for plan in rows)
        return StepPlan(tuple(rows))

    def update(self, plan: StepPlan, result: StepResult, now: float) -> dict[str, StepOutput]:
        """Take in what the engine made of `plan`; return one message for each worker that has news."""
        results = {row_result.row: row_result for row_result in result.rows}
        num_sampled = sum(row_plan.sample is not None for row_plan in plan.rows)
        for row_plan in plan.rows:
            sequence = self._running[row_plan.row]
            sequence.batch_size = max(sequence.batch_size, num_sampled)
            sequence.advance(len(row_plan.token_ids))
            row_result = results.get(row_plan.row)
            if row_result is not None:
                self._take_result(sequence, row_result, now)
            elif row_plan.sample is not None:
                self._finish(sequence, FinishReason.ERROR, now, _NO_RESULT)
        outputs, self._outputs = self._outputs, {}
        return {worker: StepOutput(items) for worker, items in outputs.items()}

    def take_snapshots(self) -> list[tuple[str, Snapshot]]:
        """Return the answers to queries since the last call, as (worker, snapshot)."""
        snapshots, self._snapshots = self._snapshots, []
        return snapshots

    def take_released(self) -> list[int]:
        """Return the rows given back since the last call; the engine forgets them."""
        released, self._released = self._released, []
        return released

    def _sequences(self) -> list[Sequence]:
        return [*self._waiting, *self._running.values()]

    def _submit(self, worker: str, submit: Submit, now: float) -> None:
        sequence = Sequence(submit, worker, now)
        sequence.recall(self._rules.token_bytes[token_id] for token_id in submit.token_ids[submit.num_prompt_tokens :])
        self._waiting.append(sequence)
        self._by_request.setdefault((submit.tenant, submit.request_id), []).append(sequence)
        self._metrics["requests"] += 1
        self._metrics["prompt_tokens"] += submit.num_prompt_tokens

    def _row_plan(self, sequence: Sequence, num_tokens: int) -> RowPlan:
        start = sequence.num_computed_tokens
        end = start + num_tokens
        sample = None
        if end == len(sequence.token_ids):
            submit = sequence.submit
            sample = SampleSpec(submit.sampling, submit.choice, end, submit.num_prompt_tokens)
        return RowPlan(sequence.row, start, tuple(sequence.token_ids[start:end]), sample)

    def _take_result(self, sequence: Sequence, result: RowResult, now: float) -> None:
        """Append the drawn ids up to the one that ends the sequence; queue them for the worker."""
        if result.error is not None:
            error = ErrorInfo(GenerationError.code, result.error.message)
            self._finish(sequence, FinishReason.ERROR, now, error)
            return
        index = sequence.num_completion_tokens
        reason: FinishReason | None = None
        for token_id in result.token_ids:
            stopped = sequence.append(token_id, self._rules.token_bytes[token_id], now)
            if stopped or token_id in self._rules.stop_ids:
                reason = FinishReason.STOP
            elif self._is_full(sequence):
                reason = FinishReason.LENGTH
            if reason is not None:
                break
        token_ids = sequence.token_ids[sequence.submit.num_prompt_tokens + index :]
        self._metrics["completion_tokens"] += len(token_ids)
        self._metrics["discarded_tokens"] += len(result.token_ids) - len(token_ids)
        if reason is not None:
            self._finish(sequence, reason, now, index=index, token_ids=token_ids)
        else:
            self._send(sequence, SequenceOutput(sequence.session_id, sequence.row, sequence.epoch, index, token_ids))

    def _is_full(self, sequence: Sequence) -> bool:
        """Tell whether max_tokens is reached or the next id would have no slot."""
        return (
            sequence.num_completion_tokens >= sequence.submit.max_tokens
            or len(sequence.token_ids) >= self._info.context_tokens
        )

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        error: ErrorInfo | None = None,
        *,
        index: int | None = None,
        token_ids: Several[int] = (),
    ) -> None:
        """End a sequence: free its row and its place, record it, queue its one terminal event.

        Invariant: every end comes through here, and the row is free for the next `schedule`.
        """
        was_waiting = sequence.status is SequenceStatus.WAITING
        finished = sequence.finish(reason, now, error)
        if was_waiting:
            self._waiting.remove(sequence)
            self._admission.start(len(sequence.submit.token_ids))
            self._admission.release(None)
        else:
            del self._running[sequence.row]
            self._rows.free(sequence.row)
            self._released.append(sequence.row)
            self._admission.release(sequence.running_seconds(now))
        key = (sequence.submit.tenant, sequence.submit.request_id)
        self._by_request[key].remove(sequence)
        if not self._by_request[key]:
            del self._by_request[key]
        self._ended[key] = request_view(sequence, now)
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_ENDED_REQUESTS:
            self._ended.popitem(last=False)
        self._metrics[f"finished_{reason}"] += 1
        first = sequence.num_completion_tokens if index is None else index
        output = SequenceOutput(sequence.session_id, sequence.row, sequence.epoch, first, list(token_ids), finished)
        self._send(sequence, output)

    def _send(self, sequence: Sequence, output: SequenceOutput) -> None:
        self._outputs.setdefault(sequence.worker, []).append(output)

    def _snapshot(self, query: Query, now: float) -> Snapshot:
        rows = []
        request = None
        if query.kind is QueryKind.ROWS:
            rows = [row_view(row, self._running.get(row), query.tenant, now) for row in range(self._info.num_rows)]
        elif query.kind is QueryKind.REQUEST:
            key = (query.tenant, query.request_id)
            sequences = self._by_request.get(key)
            request = request_view(sequences[0], now, self._waiting) if sequences else self._ended.get(key)
        return Snapshot(
            query_id=query.query_id,
            num_waiting=len(self._waiting),
            num_rows=self._info.num_rows,
            num_rows_in_use=len(self._running),
            rows=rows,
            request=request,
            metrics=self._figures() if query.kind is QueryKind.METRICS else {},
        )

    def _figures(self) -> dict[str, float]:
        return {**self._metrics, "refused": self._admission.num_refused}
