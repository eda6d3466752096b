"""Own who reads a generation with an idempotency key: several sessions, each of which gets all of it from the first id.

Pure; made by the intake thread for the decode thread, which alone uses it from then on. What a step made goes to
everybody who reads; whoever came late, or goes on after an earlier attempt, gets what is on record before it. Knows
nothing of rows, queues or keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from inference_api.backend.idempotency import IdempotencyRecords, Recording
from inference_api.messages import SequenceOutput, Submit

WorkerOutput = tuple[str, SequenceOutput]


@dataclasses.dataclass(eq=False, slots=True)
class Reader:
    """One session, and how much of the recording it has been sent."""

    session_id: str
    worker: str
    call_id: str
    num_ids: int = 0
    num_prompt_logprobs: int = 0


Leaves = Callable[[Reader], bool]
"""Says of a session whether it goes."""


class Readers:
    """The sessions that read one recording, which they share."""

    def __init__(self, records: IdempotencyRecords, recording: Recording) -> None:
        self._records = records
        self._recording = recording
        self._readers: list[Reader] = []

    def add(self, submit: Submit, worker: str) -> None:
        """Let a session read from the first id on."""
        self._readers.append(Reader(submit.session_id, worker, submit.call_id))

    def begin(self) -> int:
        """Put on record that the generation begins; return the time of the call that it repeats, 0 if it is the first.

        For the intake thread.
        """
        self._records.open(self._recording)
        return self._recording.told_created

    def join(self, others: Readers) -> None:
        """Read with `others` from now on, if they read the same."""
        if others._recording is self._recording:
            self._records.join(self._recording)
            others._readers += self._readers

    def replay(self) -> list[WorkerOutput]:
        """Return everything up to the end, which is on record."""
        self._records.join(self._recording)
        output = SequenceOutput("", -1, 0, 0, [], self._recording.finished)
        return [(reader.worker, self._next(reader, output)) for reader in self._readers]

    @property
    def is_ended(self) -> bool:
        """Tell whether what they read has ended."""
        return self._recording.finished is not None

    def take(self, output: SequenceOutput, ended_at: float | None) -> list[WorkerOutput]:
        """Record what a step made, and return it as everybody is to get it; `ended_at` is set if that is the last."""
        self._records.extend(self._recording, output)
        if output.finished is not None and ended_at is not None:
            self._records.end(self._recording, output.finished, ended_at)
        return [(reader.worker, self._next(reader, output)) for reader in self._readers]

    def catch_up(self, row: int, epoch: int) -> list[WorkerOutput]:
        """Return what those have missed who came after it; their streams belong to `epoch`, which is not 0."""
        output = SequenceOutput("", row, epoch, 0, [])
        behind = [reader for reader in self._readers if self._is_behind(reader)]
        return [(reader.worker, self._next(reader, output)) for reader in behind]

    def break_off(self, leaves: Leaves) -> bool:
        """Tell whether the generation ends when those leave whom `leaves` names: nobody else reads, or is about to."""
        return all(leaves(reader) for reader in self._readers) and self._records.break_off(self._recording)

    def dismiss(self, leaves: Leaves, output: SequenceOutput) -> list[WorkerOutput]:
        """Let those go whom `leaves` names; return `output`, which has their end, as they are to get it."""
        gone = [reader for reader in self._readers if leaves(reader)]
        self._readers = [reader for reader in self._readers if reader not in gone]
        return [(reader.worker, self._next(reader, output)) for reader in gone]

    def _is_behind(self, reader: Reader) -> bool:
        recording = self._recording
        num_sent = reader.num_ids + reader.num_prompt_logprobs
        return num_sent < len(recording.token_ids) + len(recording.prompt_logprobs)

    def _next(self, reader: Reader, output: SequenceOutput) -> SequenceOutput:
        """Return an output as a session gets it, with what that has missed before it."""
        recording = self._recording
        shown = SequenceOutput(
            reader.session_id,
            output.row,
            output.epoch,
            reader.num_ids,
            recording.token_ids[reader.num_ids :],
            output.finished,
            recording.logprobs[reader.num_ids :] or None,
            recording.prompt_logprobs[reader.num_prompt_logprobs :] or None,
            recording.mu,
        )
        reader.num_ids = len(recording.token_ids)
        reader.num_prompt_logprobs = len(recording.prompt_logprobs)
        return shown
