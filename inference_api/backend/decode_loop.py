"""Own the heart of the backend: one step after another, in one thread, for ever in the same order.

Runs in PROCESS 2's main thread, the decode thread. Takes messages from the inbox, asks the scheduler what to compute,
lets the engine compute it, sends one message a worker. Features go into the scheduler, the engine or the router.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from inference_api.backend.engines.base import EMPTY_RESULT, Engine, RowPlan, SampleSpec, StepPlan
from inference_api.backend.inbox_messages import InboxMessage
from inference_api.backend.scheduler import Scheduler
from inference_api.messages import Message
from inference_api.sampling_params import SamplingParams

InboxItem = tuple[str, InboxMessage]


class Inbox:
    """Hand messages from the intake thread to the decode thread; admission bounds the Submits in it."""

    def __init__(self) -> None:
        self._items: list[InboxItem] = []
        self._condition = threading.Condition()

    def put(self, worker: str, message: InboxMessage) -> None:
        """Add a message; called by the intake thread."""
        with self._condition:
            self._items.append((worker, message))
            self._condition.notify()

    def wake(self) -> None:
        """Let a waiting `drain` return at once."""
        with self._condition:
            self._condition.notify()

    def drain(self, timeout: float) -> list[InboxItem]:
        """Return all messages in order; wait up to `timeout` seconds for the first."""
        with self._condition:
            if not self._items and timeout > 0:
                self._condition.wait(timeout)
            items, self._items = self._items, []
            return items


class Outbox(Protocol):
    """Send to workers without ever blocking; a worker that is gone is ignored."""

    def send(self, worker: str, message: Message) -> None:
        """Send one message to a worker."""
        ...


class DecodeLoop:
    """Step the scheduler and the engine. `heartbeat_at` is the time of the last finished step."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        inbox: Inbox,
        outbox: Outbox,
        now: Callable[[], float] = time.monotonic,
        *,
        scrubs: bool = False,
    ) -> None:
        """`scrubs`: what a row holds is zeroed once nobody may begin with it any more."""
        self._scheduler = scheduler
        self._scrubs = scrubs
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._now = now
        self.heartbeat_at = now()
        self._busy_at = now()

    def step(self) -> None:
        """Take in messages, run one forward pass, send out one message a worker."""
        messages = self._inbox.drain(timeout=self._scheduler.next_wake(self._now()))
        now = self._now()
        self._scheduler.apply(messages, now)
        self._release_rows()
        plan = self._scheduler.schedule(now)
        self._scrub_rows()
        result = self._engine.execute(plan) if plan.rows else EMPTY_RESULT
        now = self._now()
        for worker, output in self._scheduler.update(plan, result, now).items():
            self._outbox.send(worker, output)
        for worker, snapshot in self._scheduler.take_snapshots():
            self._outbox.send(worker, snapshot)
        self._release_rows()
        self.heartbeat_at = now
        if plan.rows:
            self._busy_at = now

    def check_idle_engine(self, interval_seconds: float) -> bool:
        """Run the self-check if nothing has run for so long; return True if it ran. Raises on a sick engine."""
        if self._now() - self._busy_at < interval_seconds or not self._scheduler.is_empty:
            return False
        row = self._scheduler.borrow_row()
        self._scrub_rows()
        check_engine(self._engine, row)
        self._busy_at = self.heartbeat_at = self._now()
        return True

    def _release_rows(self) -> None:
        for row in self._scheduler.take_released():
            self._engine.release(row)
        self._scrub_rows()

    def _scrub_rows(self) -> None:
        unclean = self._scheduler.take_unclean()
        for row in unclean if self._scrubs else ():
            self._engine.scrub(row)


def check_engine(engine: Engine, row: int = 0) -> None:
    """Run one id through `row`, which nobody owns or remembers; raise RuntimeError if no id comes back."""
    params = SamplingParams(temperature=1.0, top_k=1, top_p=1.0, seed=0)
    plan = StepPlan((RowPlan(row=row, start=0, token_ids=(0,), sample=SampleSpec(params, 0, 1, 1)),))
    result = engine.execute(plan)
    engine.release(row)
    if len(result.rows) != 1 or result.rows[0].error is not None or not result.rows[0].token_ids:
        raise RuntimeError(f"engine self-check failed: {result.rows}")
