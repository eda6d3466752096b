"""Own the records of calls with an idempotency key: what each has said so far, and what a repetition of it is to get.

Pure, time is an argument; PROCESS 2. The intake thread claims and opens, the decode thread records; a lock guards what
both touch. Records are bounded in number and size; whoever holds most makes room. They die with the process.
Knows sessions' outputs, not who reads them (readers.py), and neither rows nor connections.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

import msgspec

from inference_api.messages import NO_TIMING, Finished, FinishReason, RefusalReason, SequenceOutput, Submit
from inference_api.sampling_params import TokenLogprobs

MAX_RECORDS = 4096
"""Generations that are remembered."""

MAX_RECORDED_NUMBERS = 1 << 20
"""Of all records together: their ids, and for each reported logprob three (an id, a float, what holds them)."""

MAX_JOINING_NUMBERS = MAX_RECORDED_NUMBERS
"""Of what repetitions on their way to the decode thread are to get: it may send all of that in one message, of some
five bytes a number, and a worker takes none over 8 MiB (queues.py). Any one call finds room, since all is recorded."""

_NUMBERS_A_RECORD = 16
"""What a record costs that has said nothing yet: its key, its digest, its end."""

_NUMBERS_A_LOGPROB = 3

_BROKEN_OFF = Finished(FinishReason.ABORT, 0, NO_TIMING)
"""Stands for the end until that is known."""

RecordKey = tuple[str, str, int]


@dataclasses.dataclass(eq=False, slots=True)
class Recording:
    """What one generation has said; the decode thread alone reads and extends the lists, until it has ended.

    `created` is the first call's, `told_created` what this one's clients are told: 0 unless they repeat an earlier one.
    """

    key: RecordKey
    digest: bytes
    created: int
    call_id: str
    told_created: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    mu: float | None = None
    finished: Finished | None = None
    num_joining: int = 0
    """Repetitions that were told to follow and have not reached the decode thread yet."""
    ended_at: float = 0.0
    num_numbers: int = _NUMBERS_A_RECORD

    @property
    def tenant(self) -> str:
        """Whose call it is."""
        return self.key[0]

    def continued(self, submit: Submit) -> Submit:
        """Return a Submit that goes on after what is known."""
        if not self.token_ids:
            return submit
        prompt_ids = submit.token_ids[: submit.num_prompt_tokens]
        return msgspec.structs.replace(submit, token_ids=[*prompt_ids, *self.token_ids], mu=self.mu)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with a Submit: follow `recording`, which is there, or compute it; None: refuse it with `reason`."""

    recording: Recording | None
    is_repeat: bool = False
    reason: RefusalReason = RefusalReason.KEY_REUSED


REUSED = Verdict(None)
BUSY = Verdict(None, reason=RefusalReason.QUEUE_FULL)


class IdempotencyRecords:
    """Remember generations by (tenant, key, part), for `ttl_seconds` after their end."""

    def __init__(
        self, ttl_seconds: float, *, max_records: int = MAX_RECORDS, max_numbers: int = MAX_RECORDED_NUMBERS
    ) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_records = max_records
        self._max_numbers = max_numbers
        self._lock = threading.Lock()
        self._open: dict[RecordKey, Recording] = {}
        self._ended: collections.OrderedDict[RecordKey, Recording] = collections.OrderedDict()
        self._num_numbers_of: collections.Counter[str] = collections.Counter()
        self._num_records_of: collections.Counter[str] = collections.Counter()
        self._joining: set[Recording] = set()

    def claim(self, submit: Submit, now: float, *, may_follow: bool = True) -> Verdict:
        """Say what a Submit with a key is: new, another call's under that key, or a repetition of one on record.

        Repetitions are refused where they may not follow, or would be told more than MAX_JOINING_NUMBERS together.
        What runs or has come to its end is followed; the decode thread must then `join`. What was broken off is gone on
        with: its recording begins with what is known. Nothing is recorded before `open`.
        """
        if submit.idempotency is None:
            raise ValueError("a Submit without a key has no record")
        digest = submit.idempotency.digest
        key = (submit.tenant, submit.idempotency.key, submit.idempotency.part)
        with self._lock:
            self._expire(now)
            found = self._open.get(key) or self._ended.get(key)
            if found is None:
                return Verdict(Recording(key, digest, submit.created, submit.call_id))
            if found.digest != digest:
                return REUSED
            if found.finished is None or _is_whole(found.finished):
                joining_numbers = sum(one.num_joining * one.num_numbers for one in self._joining)
                if not may_follow or joining_numbers + found.num_numbers > MAX_JOINING_NUMBERS:
                    return BUSY
                found.num_joining += 1
                self._joining.add(found)
                return Verdict(found, is_repeat=True)
            return Verdict(_going_on(found, submit))

    def open(self, recording: Recording) -> None:
        """Record a generation that begins, in the place of what its key stood for."""
        with self._lock:
            self._drop(recording.key)
            self._open[recording.key] = recording
            self._num_records_of[recording.tenant] += 1
            self._hold(recording, recording.num_numbers)

    def withdraw(self, submit: Submit) -> None:
        """Forget what the same call has opened before and still runs."""
        if submit.idempotency is None:
            return
        with self._lock:
            for part in range(submit.idempotency.part):
                found = self._open.get((submit.tenant, submit.idempotency.key, part))
                if found is not None and found.call_id == submit.call_id:
                    self._drop(found.key)

    def extend(self, recording: Recording, output: SequenceOutput) -> None:
        """Add what a step made."""
        recording.token_ids += output.token_ids
        recording.logprobs += output.logprobs or ()
        recording.prompt_logprobs += output.prompt_logprobs or ()
        recording.mu = output.mu if output.mu is not None else recording.mu
        reported = (*(output.logprobs or ()), *(output.prompt_logprobs or ()))
        num_logprobs = sum(1 + len(logprobs.top) for logprobs in reported)
        num_numbers = len(output.token_ids) + _NUMBERS_A_LOGPROB * num_logprobs
        with self._lock:
            recording.num_numbers += num_numbers
            if self._open.get(recording.key) is recording:
                self._hold(recording, num_numbers)

    def end(self, recording: Recording, finished: Finished, now: float) -> None:
        """Add the end. One that failed is forgotten; one that was broken off can be gone on with."""
        num_numbers = len(finished.embedding or b"") // 8
        with self._lock:
            recording.finished, recording.ended_at = finished, now
            recording.num_numbers += num_numbers
            if self._open.get(recording.key) is not recording:
                return
            if _is_whole(finished) or finished.reason is FinishReason.ABORT:
                self._ended[recording.key] = self._open.pop(recording.key)
                self._hold(recording, num_numbers)
            else:
                self._num_numbers_of[recording.tenant] += num_numbers
                self._drop(recording.key)

    def join(self, recording: Recording) -> None:
        """Note that a repetition which was told to follow does so now."""
        with self._lock:
            recording.num_joining -= 1
            if not recording.num_joining:
                self._joining.discard(recording)

    def break_off(self, recording: Recording) -> bool:
        """Keep everybody else from following, if nobody is on the way; return False if somebody is.

        To be followed by `end` if True.
        """
        with self._lock:
            if recording.num_joining:
                return False
            recording.finished = _BROKEN_OFF
            return True

    @property
    def num_numbers(self) -> int:
        """Size of all records together; see MAX_RECORDED_NUMBERS."""
        return self._num_numbers_of.total()

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def _expire(self, now: float) -> None:
        while self._ended:
            key, oldest = next(iter(self._ended.items()))
            if now - oldest.ended_at < self._ttl_seconds:
                return
            self._drop(key)

    def _hold(self, recording: Recording, num_numbers: int) -> None:
        """Count what a recording has grown by, and make room.

        Whoever holds most forgets its oldest, those that have ended first; one that runs is forgotten, and goes on.
        """
        self._num_numbers_of[recording.tenant] += num_numbers
        while len(self) > self._max_records or self.num_numbers > self._max_numbers:
            tenant = max(self._num_records_of, key=self._share)
            self._drop(next(key for records in (self._ended, self._open) for key in records if key[0] == tenant))

    def _share(self, tenant: str) -> float:
        """Return which part of the room a tenant holds, of records or of numbers, whichever is more."""
        num_records, num_numbers = self._num_records_of[tenant], self._num_numbers_of[tenant]
        return max(num_records / self._max_records, num_numbers / self._max_numbers)

    def _drop(self, key: RecordKey) -> None:
        recording = self._open.pop(key, None) or self._ended.pop(key, None)
        if recording is None:
            return
        self._num_numbers_of[recording.tenant] -= recording.num_numbers
        self._num_records_of[recording.tenant] -= 1
        if not self._num_records_of[recording.tenant]:
            del self._num_records_of[recording.tenant], self._num_numbers_of[recording.tenant]


def _is_whole(finished: Finished) -> bool:
    """Tell whether a generation has come to its own end, which any repetition would come to as well."""
    return finished.reason in (FinishReason.STOP, FinishReason.LENGTH)


def _going_on(found: Recording, submit: Submit) -> Recording:
    """Return the recording of what goes on after `found`; anew where the prompt's scores must come before any id."""
    recording = Recording(found.key, found.digest, found.created, submit.call_id, told_created=found.created)
    if submit.prompt_logprobs is None:
        recording.token_ids, recording.logprobs = list(found.token_ids), list(found.logprobs)
        recording.mu, recording.num_numbers = found.mu, found.num_numbers
    return recording
