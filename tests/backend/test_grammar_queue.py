"""Check the queue of grammars: order, the bound on threads, the two limits of time, and what a gone worker leaves.

Time stands still unless a test moves it; compiling takes as long as the test says.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from inference_api.backend.grammar_queue import MAX_THREADS, Compilation, GrammarQueue, Outcome, Overdue
from inference_api.backend.grammars import GrammarError
from inference_api.messages import Grammar, GrammarKind
from tests.backend.factories import make_submit

LIMIT_SECONDS = 5.0
WAIT_SECONDS = 10.0


class Bench:
    """A queue whose compiler waits for the test at texts that begin with `slow` or `held`, and fails at some others."""

    def __init__(self) -> None:
        self.now = 100.0
        self.compiled: list[tuple[str, int]] = []
        self.released = threading.Event()
        self.held = threading.Event()
        self.woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.queue = GrammarQueue(self._compile, LIMIT_SECONDS, lambda: self.woken.put(None), lambda: self.now)

    def put(self, text: str, worker: str = "worker-1", tenant: str = "") -> None:
        """Put a grammar in; each is of another tenant unless the test says whose it is."""
        grammar = Grammar(GrammarKind.REGEX, text)
        self.queue.put(worker, make_submit(text, grammar=grammar, tenant=tenant or text), grammar, 0)

    def settle(self, count: int = 1) -> dict[str, Outcome]:
        """Wait until `count` threads have told of news; return the outcomes by text."""
        for _ in range(count):
            self.woken.get(timeout=WAIT_SECONDS)
        return self.settled_now()

    def settled_now(self) -> dict[str, Outcome]:
        return {one.submit.session_id: outcome for one, outcome in self.queue.take_settled()}

    def _compile(self, grammar: Grammar, num_prompt_tokens: int, tenant: str) -> object:
        self.compiled.append((grammar.text, num_prompt_tokens, tenant))
        if grammar.text.startswith("slow"):
            assert self.released.wait(WAIT_SECONDS)
        if grammar.text.startswith("held"):
            assert self.held.wait(WAIT_SECONDS)
        if grammar.text == "bad":
            raise GrammarError("is bad.")
        if grammar.text == "panic":
            raise BaseException("with a text of the grammar in it")
        return grammar.text


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.released.set()
    bench.held.set()
    bench.queue.close()


def test_a_compiled_grammar_comes_back_once_with_its_submit_and_place(bench: Bench) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    submit = make_submit("s0", b"hello", grammar=grammar)
    bench.queue.put("worker-2", submit, grammar, 3)
    bench.woken.get(timeout=WAIT_SECONDS)
    ((compilation, outcome),) = bench.queue.take_settled()
    assert isinstance(compilation, Compilation)
    assert (compilation.worker, compilation.submit, compilation.place) == ("worker-2", submit, 3)
    assert (outcome, bench.compiled) == ("a", [("a", 5, "alpha")])
    assert bench.queue.take_settled() == []
    assert bench.queue.next_wake() is None


def test_a_bad_grammar_and_a_panic_are_outcomes_and_tell_nothing_of_other_texts(bench: Bench) -> None:
    bench.put("bad")
    bench.put("panic")
    outcomes = bench.settle(2)
    assert str(outcomes["bad"]) == "is bad."
    assert isinstance(outcomes["panic"], GrammarError)
    assert str(outcomes["panic"]) == "could not be compiled."


def test_no_more_than_the_bound_compile_at_once_and_the_others_follow_in_order(bench: Bench) -> None:
    for number in range(MAX_THREADS + 2):
        bench.put(f"slow-{number}")
    assert len([thread for thread in threading.enumerate() if thread.name == "grammar"]) == MAX_THREADS
    bench.released.set()
    texts: list[str] = []
    while len(texts) < MAX_THREADS + 2:
        texts += bench.settle()
    assert [text for text, *_ in bench.compiled] == [f"slow-{number}" for number in range(MAX_THREADS + 2)]


def test_a_slow_grammar_is_given_up_in_time_and_its_late_result_is_dropped(bench: Bench) -> None:
    bench.put("slow")
    assert bench.queue.next_wake() == LIMIT_SECONDS
    bench.now += LIMIT_SECONDS - 0.1
    assert bench.settled_now() == {}
    bench.now += 0.1
    assert bench.queue.next_wake() == 0
    assert bench.settled_now() == {"slow": Overdue(has_begun=True)}
    bench.released.set()
    assert bench.settle() == {}


def test_a_slow_grammar_fails_alone(bench: Bench) -> None:
    bench.put("slow")
    bench.put("quick")
    assert bench.settle() == {"quick": "quick"}
    bench.now += LIMIT_SECONDS
    bench.put("quick again")
    assert bench.settle() == {"slow": Overdue(has_begun=True), "quick again": "quick again"}


def test_one_that_found_no_thread_in_time_was_not_slow_itself(bench: Bench) -> None:
    for number in range(MAX_THREADS):
        bench.put(f"slow-{number}")
    bench.now += 1
    bench.put("waits")
    bench.now += LIMIT_SECONDS
    outcomes = bench.settled_now()
    assert outcomes.pop("waits") == Overdue(has_begun=False)
    assert set(outcomes.values()) == {Overdue(has_begun=True)}
    bench.released.set()
    bench.settle(MAX_THREADS)
    assert "waits" not in [text for text, *_ in bench.compiled]


def test_its_own_time_begins_with_its_thread(bench: Bench) -> None:
    for number in range(MAX_THREADS):
        bench.put(f"slow-{number}")
    bench.put("held")
    bench.now += LIMIT_SECONDS - 1
    bench.released.set()
    assert len(bench.settle(MAX_THREADS)) == MAX_THREADS
    bench.now += LIMIT_SECONDS - 1
    assert bench.settled_now() == {}
    bench.now += 1
    assert bench.settled_now() == {"held": Overdue(has_begun=True)}


def test_what_a_gone_worker_sent_is_dropped_and_the_others_stay(bench: Bench) -> None:
    for number in range(MAX_THREADS):
        bench.put(f"slow-{number}", "gone")
    bench.put("slow-mine", "stays")
    bench.put("waits", "gone")
    forgotten = bench.queue.forget("gone")
    assert [submit.session_id for submit in forgotten] == [f"slow-{n}" for n in range(MAX_THREADS)] + ["waits"]
    bench.released.set()
    texts: list[str] = []
    while not texts:
        texts += bench.settle()
    assert texts == ["slow-mine"]
    assert bench.queue.next_wake() is None


def test_after_the_close_no_thread_wakes_anybody(bench: Bench) -> None:
    bench.put("slow")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "grammar"]
    bench.queue.close()
    bench.released.set()
    thread.join(WAIT_SECONDS)
    assert bench.woken.empty()


def test_one_tenant_compiles_one_grammar_at_a_time_and_another_one_meanwhile(bench: Bench) -> None:
    for number in range(4):
        bench.put(f"slow-{number}", tenant="alpha")
    bench.put("quick", tenant="beta")
    assert bench.settle() == {"quick": "quick"}
    assert [text for text, *_ in bench.compiled] == ["slow-0", "quick"]


def test_tenants_take_turns_however_many_grammars_one_of_them_sends(bench: Bench) -> None:
    bench.put("held", tenant="gamma")
    for number in range(3):
        bench.put(f"slow-{number}", tenant="alpha")
    bench.put("one", tenant="beta")
    bench.put("two", tenant="beta")
    bench.released.set()
    settled: list[str] = []
    while len(settled) < 5:
        settled += bench.settle()
    assert settled == ["slow-0", "one", "slow-1", "two", "slow-2"]


def test_a_tenant_whose_grammar_was_given_up_waits_for_its_thread(bench: Bench) -> None:
    bench.put("slow", tenant="alpha")
    bench.now += LIMIT_SECONDS
    assert bench.settled_now() == {"slow": Overdue(has_begun=True)}
    bench.put("next", tenant="alpha")
    bench.put("other", tenant="beta")
    assert bench.settle() == {"other": "other"}
    bench.released.set()
    settled = bench.settle()
    while not settled:
        settled = bench.settle()
    assert settled == {"next": "next"}
