"""Check how the intake answers a Submit with a grammar: once that is compiled, and while others are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_api.backend.admission import Admission
from inference_api.backend.grammar_queue import GrammarQueue
from inference_api.backend.grammars import GrammarCompiler, GrammarError
from inference_api.backend.inbox_messages import MaskedSubmit, WorkerGone
from inference_api.messages import Accepted, Grammar, GrammarKind, Ping, Pong, RefusalReason, Refused, Submit
from tests.backend.factories import make_image, make_submit
from tests.backend.test_intake import READY, WAIT_SECONDS, Desk

REGEX = Grammar(GrammarKind.REGEX, "[ab]+", "guided_regex")


class FormDesk(Desk):
    """A running Intake whose grammars compile when the test lets them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Admission(2, 1, 100))
        self.may_compile = threading.Event()
        self.may_compile.set()
        self._compiler = GrammarCompiler(make_image())

    def serve_grammars(self, limit_seconds: float = WAIT_SECONDS) -> None:
        self.intake.start_serving(READY, GrammarQueue(self._compile, limit_seconds, self.intake.wake))
        assert self.supervisor.receive() == READY

    def _compile(self, grammar: Grammar, num_prompt_tokens: int, tenant: str) -> object:
        assert self.may_compile.wait(WAIT_SECONDS)
        return self._compiler.compile(grammar, num_prompt_tokens, tenant)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[FormDesk]:
    desk = FormDesk(tmp_path)
    yield desk
    desk.may_compile.set()
    desk.close()


def formed(session_id: str = "s0", grammar: Grammar = REGEX, tenant: str = "alpha") -> Submit:
    return make_submit(session_id, grammar=grammar, tenant=tenant)


def test_a_submit_is_accepted_with_the_mask_of_its_grammar(desk: FormDesk) -> None:
    desk.serve_grammars()
    worker = desk.connect_served()
    worker.send(formed())
    assert worker.receive() == Accepted("s0", 0, 0.0)
    ((_, message),) = desk.inbox.drain(WAIT_SECONDS)
    assert isinstance(message, MaskedSubmit)
    assert message.submit == formed()
    allowed = int.from_bytes(message.mask.allowed(list(b"hello")), "little")
    assert allowed == 1 << ord("a") | 1 << ord("b")


def test_a_bad_grammar_is_refused_with_its_cause_and_keeps_no_place(desk: FormDesk) -> None:
    desk.serve_grammars()
    worker = desk.connect_served()
    worker.send(formed(grammar=Grammar(GrammarKind.REGEX, "(a", "guided_regex")))
    refused = worker.receive()
    assert isinstance(refused, Refused)
    assert (refused.session_id, refused.reason) == ("s0", RefusalReason.BAD_GRAMMAR)
    assert refused.message.startswith("is no usable regular expression: ")
    assert desk.admission.num_requests == 0
    assert desk.inbox.drain(0) == []


def test_others_are_served_while_a_grammar_compiles(desk: FormDesk) -> None:
    desk.serve_grammars()
    worker = desk.connect_served()
    desk.may_compile.clear()
    worker.send(formed(), make_submit("plain"), Ping(1))
    assert worker.receive() == Accepted("plain", 0, 0.0)
    assert isinstance(worker.receive(), Pong)
    desk.may_compile.set()
    assert isinstance(worker.receive(), Accepted)


def test_a_grammar_that_takes_too_long_is_refused_in_time_and_keeps_no_place(desk: FormDesk) -> None:
    desk.serve_grammars(limit_seconds=0.05)
    worker = desk.connect_served()
    desk.may_compile.clear()
    began = time.monotonic()
    worker.send(formed())
    assert worker.receive() == Refused(
        "s0", RefusalReason.BAD_GRAMMAR, 0.0, "takes too long to compile: make it simpler."
    )
    assert time.monotonic() - began < 2
    assert desk.admission.num_requests == 0
    desk.may_compile.set()
    worker.send(formed("s1"))
    assert worker.receive() == Accepted("s1", 0, 0.0)
    assert [message.submit.session_id for _, message in desk.inbox.drain(WAIT_SECONDS)] == ["s1"]


def test_a_grammar_that_found_no_thread_is_told_to_come_again(desk: FormDesk) -> None:
    desk.serve_grammars(limit_seconds=0.05)
    worker = desk.connect_served()
    desk.may_compile.clear()
    worker.send(*(formed(f"s{number}", tenant=f"tenant-{number}") for number in range(3)))
    answers = {answer.session_id: answer for answer in (worker.receive() for _ in range(3))}
    assert [answers[f"s{number}"].reason for number in range(3)] == [
        RefusalReason.BAD_GRAMMAR,
        RefusalReason.BAD_GRAMMAR,
        RefusalReason.QUEUE_FULL,
    ]
    assert answers["s2"].retry_after_seconds >= 1
    assert desk.admission.num_requests == 0


def test_a_worker_that_goes_while_its_grammar_compiles_leaves_no_place_and_no_sequence(desk: FormDesk) -> None:
    desk.serve_grammars()
    gone, stays = desk.connect_served(), desk.connect_served()
    desk.may_compile.clear()
    gone.send(formed(), Ping(1))
    assert isinstance(gone.receive(), Pong)
    gone.connection.shutdown()
    assert [message for _, message in desk.inbox.drain(WAIT_SECONDS)] == [WorkerGone("worker-1")]
    assert desk.admission.num_requests == 0
    desk.may_compile.set()
    stays.send(formed("s1"))
    assert stays.receive() == Accepted("s1", 0, 0.0)
    assert [message.submit.session_id for _, message in desk.inbox.drain(WAIT_SECONDS)] == ["s1"]


def test_a_backend_without_a_compiler_refuses_every_grammar(desk: FormDesk) -> None:
    desk.serve()
    worker = desk.connect_served()
    worker.send(formed())
    assert worker.receive().reason is RefusalReason.BAD_GRAMMAR
    assert desk.admission.num_requests == 0


def test_a_full_queue_is_told_before_anything_is_compiled(desk: FormDesk) -> None:
    desk.serve_grammars()
    worker = desk.connect_served()
    desk.may_compile.clear()
    worker.send(*(make_submit(f"s{number}") for number in range(3)), formed("s3"))
    assert [type(worker.receive()) for _ in range(3)] == [Accepted] * 3
    assert worker.receive().reason is RefusalReason.QUEUE_FULL


def test_a_grammar_error_is_no_surprise() -> None:
    with pytest.raises(GrammarError):
        GrammarCompiler(make_image()).compile(Grammar(GrammarKind.LARK, "?"), 0)
