"""Find which ids keep to the forms of answers beside the forward pass, and keep a slow form from stalling others.

Most draws need no mask: the form takes the id that was drawn without it. Where a mask is likely to be needed it is
found ahead. Two threads of PROCESS 2, each a lane: most masks take less than a millisecond and are found while their
step is computed, in one lane; the step waits for them. One that is slow for longer than a moment goes to the other
lane for good, which yields to everybody else: its row sits steps out until its bits are there. The decode thread calls
every method but the lanes' own. Knows no grammars, no rows and no scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from inference_api.backend.engines.base import MaskError, TokenMask

logger = logging.getLogger(__name__)

SLOW_SECONDS = 0.002
"""Processor time for one id, on the average: so much a row is what others may wait for, less what the forward pass
takes. JSON schemas take 0.1 ms, counted repetitions 0.6 ms, with 49,152 ids on 2.5 GHz; on a machine that is shared one
in some hundred takes several times as long."""

MAX_EXCESS_SECONDS = 0.01
"""What a mask takes beyond SLOW_SECONDS an id adds up, what it takes less is paid back; above this it is slow."""

MAX_WAIT_SECONDS = 1.0
"""A step waits so long for a mask that was never slow before; then its row ends. What bounds a grammar's step ends the
worst one known within a tenth of it, so that this is for a machine that has no processor to spare."""

SLOW_NICENESS = 10
"""What the slow lane adds to its own niceness, so that the engine's threads hardly feel it (setpriority(2))."""


class FormMask(TokenMask, Protocol):
    """A mask that is told ahead what it may be asked, by the planner of steps; an engine asks."""

    def is_late(self, ids: Sequence[int]) -> bool:
        """Begin with what is slow to find after `ids`; tell whether a step had better leave the row out."""
        ...

    def guess(self, ids: Sequence[int], proposal: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` ids that keep to the form after `ids`: those that it forces, or some proposed."""
        ...

    def expect(self, ids: Sequence[int], draft_ids: Sequence[int] = (), *, surely: bool = False) -> None:
        """Begin to find what `allowed` may be asked after `ids` and after each of the drafts; returns at once.

        Only if it is likely to be asked: `surely`, for drafts, or if the last draw asked it.
        """
        ...


class LaneMask(TokenMask, Protocol):
    """A mask that a lane works for: one thread at a time calls it."""

    def guess(self, ids: Sequence[int], proposal: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return ids as `FormMask.guess` does."""
        ...

    def prepare(self, ids: Sequence[int], draft_ids: Sequence[int] = ()) -> None:
        """Find what `allowed` will be asked: after `ids`, and after each of the drafts that follow them (blocking).

        `allowed` tells what goes wrong.
        """
        ...


@dataclasses.dataclass(eq=False, slots=True)
class _Job:
    """Bits to find for one step of a sequence. Its ids stay as they are while the sequence's own list grows."""

    ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    is_done: threading.Event = dataclasses.field(default_factory=threading.Event)
    failed: bool = False
    is_overdue: bool = False

    def covers(self, ids: Sequence[int]) -> bool:
        """Tell whether the bits after `ids` are among those to find; of one length after `ids` there is one list."""
        return len(self.ids) <= len(ids) <= len(self.ids) + len(self.draft_ids)


class MaskLanes:
    """The two lanes. Their threads start with the first mask that needs them."""

    def __init__(self, tell_late_done: Callable[[], None]) -> None:
        """`tell_late_done` is called in the slow lane's thread when a row that sat out may go on."""
        self._prompt = _Lane("masks", 0)
        self._slow = _Lane("slow masks", SLOW_NICENESS, tell_late_done)

    def ahead(self, mask: LaneMask) -> AheadMask:
        """Return a mask that says what `mask` does, found in the lanes; nobody else may call that one any more."""
        return AheadMask(mask, self._prompt, self._slow)

    def close(self) -> None:
        """End the threads, after what they are at."""
        self._prompt.close()
        self._slow.close()


class AheadMask:
    """Find the bits of one sequence in the lanes; see `FormMask`."""

    def __init__(self, mask: LaneMask, prompt: _Lane, slow: _Lane) -> None:
        self._mask = mask
        self._lane = prompt
        self._slow = slow
        self._excess_seconds = 0.0
        self._num_metered = 0
        self._was_needed = False
        self._job: _Job | None = None

    def is_late(self, ids: Sequence[int]) -> bool:
        """Tell whether the mask has been slow before and its bits after `ids` are not there yet; begin with them."""
        return self._lane is self._slow and not self._begin(ids, ()).is_done.is_set()

    def guess(self, ids: Sequence[int], proposal: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Return what the mask guesses, at once; nothing for one that has been slow."""
        is_busy = self._job is not None and not self._job.is_done.is_set()
        return () if is_busy or self._lane is self._slow else self._mask.guess(ids, proposal, max_tokens)

    def expect(self, ids: Sequence[int], draft_ids: Sequence[int] = (), *, surely: bool = False) -> None:
        """Begin in a lane, if the bits are likely to be needed; returns at once."""
        if surely or draft_ids or self._was_needed:
            self._begin(ids, tuple(draft_ids))
        self._was_needed = False

    def forced_id(self, ids: Sequence[int]) -> int | None:
        """Return the only id that may follow, as far as the form foretells it or a lane finds its bits."""
        if self._is_in_lane(ids):
            self._bits(ids)  # the form is free again
        with self._metered(ids):
            return self._mask.forced_id(ids)

    def takes(self, ids: Sequence[int], token_id: int) -> bool:
        """Tell whether an id may follow: by the bits where a lane finds them, or else by asking the form, here."""
        if self._is_in_lane(ids):
            return bool(self._bits(ids)[token_id // 8] >> token_id % 8 & 1)
        with self._metered(ids):
            return self._mask.takes(ids, token_id)

    def allowed(self, ids: Sequence[int]) -> bytes:
        """Return the bits after `ids`, once a lane has found them. Raises MaskError, also if it never does."""
        self._was_needed = True
        if self._job is None or not self._job.covers(ids):
            self._begin(ids, ())
        return self._bits(ids)

    def find(self, job: _Job) -> None:
        """Find the bits of a job in a lane's thread; whatever happens there is the job's outcome."""
        began = time.thread_time()
        try:
            self._mask.prepare(job.ids, job.draft_ids)
        except BaseException as error:  # a panic of native code is no Exception
            logger.error("a form could not be followed: %s", type(error).__name__)  # its text may quote the answer
            job.failed = True
        self._meter(time.thread_time() - began, SLOW_SECONDS * (1 + len(job.draft_ids)))
        job.is_done.set()

    def _is_in_lane(self, ids: Sequence[int]) -> bool:
        """Tell whether a lane has found the bits after `ids`, or is at work: then nobody else may ask the form."""
        job = self._job
        return job is not None and (job.failed or not job.is_done.is_set() or job.covers(ids))

    @contextlib.contextmanager
    def _metered(self, ids: Sequence[int]) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self._meter(time.thread_time() - began, SLOW_SECONDS if len(ids) > self._num_metered else 0.0)
            self._num_metered = len(ids)

    def _meter(self, seconds: float, allowance: float) -> None:
        excess = self._excess_seconds + seconds - allowance
        self._excess_seconds = max(0.0, excess)
        if excess > MAX_EXCESS_SECONDS:
            self._lane = self._slow

    def _bits(self, ids: Sequence[int]) -> bytes:
        job = self._job
        if job is not None:
            if not job.is_done.wait(0 if job.is_overdue else MAX_WAIT_SECONDS):
                job.is_overdue = True  # a sampler may ask twice: one wait is enough
                raise MaskError(f"what may follow in its form was not found within {MAX_WAIT_SECONDS:g} seconds.")
            if job.failed:
                raise MaskError("its form could not be followed.")
        return self._mask.allowed(ids)

    def _begin(self, ids: Sequence[int], draft_ids: tuple[int, ...]) -> _Job:
        job = self._job
        if job is None or len(job.ids) != len(ids) or job.draft_ids != draft_ids:
            self._job = job = _Job(tuple(ids), draft_ids)
            self._lane.put(self, job)
        return job


class _Lane:
    """Find one job's bits after another, in a thread of its own."""

    def __init__(self, name: str, niceness: int, tell_done: Callable[[], None] | None = None) -> None:
        self._niceness = niceness
        self._tell_done = tell_done
        self._jobs: queue.SimpleQueue[tuple[AheadMask, _Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def put(self, mask: AheadMask, job: _Job) -> None:
        """Take in a job of a mask; returns at once."""
        if not self._started:
            self._started = True
            self._thread.start()
        self._jobs.put((mask, job))

    def close(self) -> None:
        """End the thread after the jobs that it has."""
        if self._started:
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        os.nice(self._niceness)  # of this thread alone: nice(2), "NPTL nonconformance"
        while (taken := self._jobs.get()) is not None:
            mask, job = taken
            mask.find(job)
            del taken, mask, job  # not kept until the next one comes
            if self._tell_done is not None:
                self._tell_done()
