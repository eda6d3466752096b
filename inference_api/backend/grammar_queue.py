"""Own the Submits whose grammars are being compiled, between the intake and the inbox; PROCESS 2.

The intake thread calls every method; compiling happens in a few threads beside it, so that neither the intake nor the
decode thread waits for a grammar. One that takes too long is given up: its request is told, and its thread, which
nobody can stop, ends by the compiler's own bounds. Knows no connections and no grammars' syntax.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable

from inference_api.backend.grammars import GrammarError
from inference_api.backend.mask_lanes import FormMask
from inference_api.messages import Grammar, Submit

logger = logging.getLogger(__name__)

MAX_THREADS = 2
"""Grammars that compile at once, each of another tenant; they take processors from the engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Overdue:
    """Say that a grammar was not compiled in time, or that in all this time no thread was free for it."""

    has_begun: bool


@dataclasses.dataclass(eq=False, slots=True)
class Compilation:
    """One Submit on its way, with the place in the queue that it has taken."""

    worker: str
    submit: Submit
    grammar: Grammar
    place: int
    deadline: float
    has_begun: bool = False


Outcome = FormMask | GrammarError | Overdue


class GrammarQueue:
    """Compile grammars, MAX_THREADS at once: tenants take turns, one grammar each, and a tenant's own keep their order.

    A thread lives as long as one grammar compiles: none is there for requests without one.
    """

    def __init__(
        self,
        compile_grammar: Callable[[Grammar, int, str], FormMask],
        limit_seconds: float,
        wake: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """A grammar may wait `limit_seconds` for a thread, and then take as long. Threads call the first and `wake`.

        `compile_grammar` gets the grammar, the number of prompt ids and the tenant.
        """
        self._compile_grammar = compile_grammar
        self._limit_seconds = limit_seconds
        self._wake = wake
        self._now = now
        self._open: list[Compilation] = []
        self._waiting: dict[str, collections.deque[Compilation]] = {}
        """By tenant, in the order of their turns."""
        self._compiling: set[str] = set()
        """Tenants with a thread; one that was given up still has it."""
        self._done: queue.SimpleQueue[tuple[Compilation, Outcome]] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False

    def put(self, worker: str, submit: Submit, grammar: Grammar, place: int) -> None:
        """Take in a Submit that asks for `grammar`; `wake` is called once `take_settled` may have it."""
        compilation = Compilation(worker, submit, grammar, place, self._now() + self._limit_seconds)
        self._open.append(compilation)
        self._waiting.setdefault(submit.tenant, collections.deque()).append(compilation)
        self._start_threads()

    def take_settled(self) -> list[tuple[Compilation, Outcome]]:
        """Return those that are compiled, cannot be, or are overdue, each once."""
        settled: list[tuple[Compilation, Outcome]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                compilation, outcome = self._done.get_nowait()
                self._end_turn(compilation.submit.tenant)
                if compilation in self._open:
                    self._open.remove(compilation)
                    settled.append((compilation, outcome))
        now = self._now()
        for compilation in [one for one in self._open if one.deadline <= now]:
            self._drop(compilation)
            settled.append((compilation, Overdue(compilation.has_begun)))
        self._start_threads()
        return settled

    def forget(self, worker: str) -> list[Submit]:
        """Drop what a worker that is gone has sent; return it."""
        forgotten = [one for one in self._open if one.worker == worker]
        for compilation in forgotten:
            self._drop(compilation)
        return [one.submit for one in forgotten]

    def next_wake(self) -> float | None:
        """Return in how many seconds `take_settled` must be called even if nothing wakes; None: not at all."""
        deadlines = [one.deadline for one in self._open]
        return max(0.0, min(deadlines) - self._now()) if deadlines else None

    def close(self) -> None:
        """Let no thread call `wake` any more; one that still compiles ends unheard."""
        with self._closing:
            self._closed = True

    def _drop(self, compilation: Compilation) -> None:
        self._open.remove(compilation)
        if not compilation.has_begun:
            tenant = compilation.submit.tenant
            self._waiting[tenant].remove(compilation)
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    def _start_threads(self) -> None:
        while len(self._compiling) < MAX_THREADS and (compilation := self._take_next()) is not None:
            compilation.has_begun = True
            compilation.deadline = self._now() + self._limit_seconds
            self._compiling.add(compilation.submit.tenant)
            threading.Thread(target=self._compile, args=(compilation,), name="grammar", daemon=True).start()

    def _take_next(self) -> Compilation | None:
        """Return the next one of the tenant whose turn it is; None if all that wait have a thread already."""
        for tenant, line in self._waiting.items():
            if tenant not in self._compiling:
                compilation = line.popleft()
                if not line:
                    del self._waiting[tenant]
                return compilation
        return None

    def _end_turn(self, tenant: str) -> None:
        """Let others who wait by now come first."""
        self._compiling.remove(tenant)
        if tenant in self._waiting:
            self._waiting[tenant] = self._waiting.pop(tenant)

    def _compile(self, compilation: Compilation) -> None:
        """Compile in a thread of its own; whatever happens there is an outcome."""
        outcome: Outcome
        try:
            submit = compilation.submit
            outcome = self._compile_grammar(compilation.grammar, submit.num_prompt_tokens, submit.tenant)
        except GrammarError as error:
            outcome = error
        except BaseException as error:  # a panic of native code is no Exception
            logger.error("a grammar could not be compiled: %s", type(error).__name__)  # its text may quote the grammar
            outcome = GrammarError("could not be compiled.")
        self._done.put((compilation, outcome))
        with self._closing:
            if not self._closed:
                self._wake()
