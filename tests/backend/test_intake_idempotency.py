"""Check what the intake tells calls with an idempotency key, over real sockets: new, a repetition, or another call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inference_api.backend import intake
from inference_api.backend.admission import Admission
from inference_api.backend.grammar_queue import GrammarQueue
from inference_api.backend.grammars import GrammarError
from inference_api.backend.idempotency import IdempotencyRecords
from inference_api.backend.inbox_messages import KeyedSubmit
from inference_api.messages import (
    NO_TIMING,
    Accepted,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    RefusalReason,
    Refused,
    SequenceOutput,
    Submit,
)
from tests.backend.keyed_rig import keyed_submit
from tests.backend.test_intake import READY, WAIT_SECONDS, Desk, Peer

REGEX = Grammar(GrammarKind.REGEX, "[a-z]+", "guided_regex")


class KeyedDesk(Desk):
    """An intake with records and a compiler that the test lets go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Admission(2, 1, 100))
        self.records = IdempotencyRecords(100.0)
        self.may_compile = threading.Event()
        self.refuses = False

    def serve(self) -> None:
        grammars = GrammarQueue(self._compile, WAIT_SECONDS, self.intake.wake)
        self.intake.start_serving(READY, grammars, self.records)
        assert self.supervisor.receive() == READY

    def _compile(self, grammar: Grammar, num_prompt_tokens: int, tenant: str) -> object:
        assert self.may_compile.wait(WAIT_SECONDS)
        if self.refuses:
            raise GrammarError("is no expression.")
        return f"mask of {grammar.text}"

    def taken(self, number: int = 1) -> list[KeyedSubmit]:
        """Return the `number` messages that the decode thread would take in; they follow their answers."""
        messages: list[KeyedSubmit] = []
        while len(messages) < number:
            items = self.inbox.drain(WAIT_SECONDS)
            assert items, f"{len(messages)} of {number} messages came"
            messages += [message for _, message in items]
        assert len(messages) == number
        return messages


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[KeyedDesk]:
    desk = KeyedDesk(tmp_path)
    desk.serve()
    yield desk
    desk.may_compile.set()
    desk.close()


def answers(peer: Peer, *submits: Submit) -> list[object]:
    """Send submits; return their answers."""
    peer.send(*submits)
    return [peer.receive() for _ in submits]


def end(message: KeyedSubmit, reason: FinishReason, num_ids: int = 2) -> None:
    """Let a call say something and end, as the decode thread would."""
    message.readers.take(SequenceOutput("", 0, 1, 0, [7] * num_ids, Finished(reason, num_ids, NO_TIMING)), 1e12)


def test_a_repetition_is_accepted_without_a_place_and_told_when_the_first_one_was_made(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    first, second = answers(worker, keyed_submit("a", created=5), keyed_submit("b", created=6))
    assert first == Accepted("a", 0, 0.0)
    assert second == Accepted("b", 0, 0.0, created=5)
    assert [message.follows for message in desk.taken(2)] == [False, True]
    assert desk.admission.num_requests == 1


def test_a_repetition_is_served_though_the_queue_is_full(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    answers(worker, *(keyed_submit(str(number), key=str(number)) for number in range(3)))
    full, repeated = answers(worker, keyed_submit("x", key="x"), keyed_submit("y", key="1"))
    assert isinstance(full, Refused) and full.reason is RefusalReason.QUEUE_FULL
    assert isinstance(repeated, Accepted)
    assert len(desk.records) == 3


def test_another_call_under_a_known_key_is_refused_at_once_and_takes_no_place(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    _, other = answers(worker, keyed_submit("a"), keyed_submit("b", digest=b"two"))
    assert other == Refused("b", RefusalReason.KEY_REUSED, 0.0)
    assert desk.admission.num_requests == 1
    assert len(desk.taken()) == 1


def test_what_was_broken_off_comes_with_its_known_ids_and_takes_a_place_for_them(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    answers(worker, keyed_submit("a", created=5))
    end(desk.taken()[0], FinishReason.ABORT)
    assert answers(worker, keyed_submit("b", created=6)) == [Accepted("b", 0, 0.0, created=5)]
    (message,) = desk.taken()
    assert not message.follows
    assert (message.submit.token_ids, message.submit.num_prompt_tokens) == ([*b"hello", 7, 7], 5)


def test_a_grammar_is_compiled_again_for_what_is_gone_on_with(desk: KeyedDesk) -> None:
    desk.may_compile.set()
    worker = desk.connect_served()
    answers(worker, keyed_submit("a", grammar=REGEX))
    (first,) = desk.taken()
    assert first.mask == "mask of [a-z]+"
    end(first, FinishReason.ABORT)
    answers(worker, keyed_submit("b", grammar=REGEX))
    (second,) = desk.taken()
    assert second.mask == "mask of [a-z]+" and len(second.submit.token_ids) == 7
    assert desk.admission.num_requests == 2


def test_of_two_calls_whose_grammar_compiles_at_once_the_second_follows_and_gives_its_place_back(
    desk: KeyedDesk,
) -> None:
    worker = desk.connect_served()
    worker.send(keyed_submit("a", grammar=REGEX, created=5), keyed_submit("b", grammar=REGEX))
    desk.may_compile.set()
    told = {answer.session_id: answer.created for answer in (worker.receive(), worker.receive())}
    assert sorted(told.values()) in ([0, 5], [0, 1000])
    assert sorted(message.follows for message in desk.taken(2)) == [False, True]
    assert desk.admission.num_requests == 1


def test_a_bad_grammar_leaves_no_record(desk: KeyedDesk) -> None:
    desk.refuses = True
    desk.may_compile.set()
    worker = desk.connect_served()
    (refused,) = answers(worker, keyed_submit("a", grammar=REGEX))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.BAD_GRAMMAR
    assert len(desk.records) == 0
    assert desk.admission.num_requests == 0
    assert answers(worker, keyed_submit("b", digest=b"two")) == [Accepted("b", 0, 0.0)]


def test_a_call_of_which_one_part_is_refused_leaves_no_record_of_the_others(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    other, *_ = answers(worker, keyed_submit("other", key="other", part=0, call_id="other"))
    parts = [keyed_submit(f"part {part}", part=part, call_id="call") for part in range(3)]
    assert [type(answer) for answer in answers(worker, *parts)] == [Accepted, Accepted, Refused]
    assert isinstance(other, Accepted) and len(desk.records) == 1
    repeated = keyed_submit("again", digest=b"two", part=0, call_id="later")
    full = answers(worker, repeated)[0]
    assert isinstance(full, Refused) and full.reason is RefusalReason.QUEUE_FULL, "and not for its key"


def test_a_repetition_that_is_refused_leaves_the_record_that_it_followed(desk: KeyedDesk) -> None:
    worker = desk.connect_served()
    answers(worker, *(keyed_submit(f"a{part}", part=part, call_id="first") for part in range(2)))
    worker.send(keyed_submit("b0", part=0, call_id="b"), keyed_submit("b1", part=1, call_id="b", digest=b"two"))
    assert isinstance(worker.receive(), Accepted)
    assert worker.receive() == Refused("b1", RefusalReason.KEY_REUSED, 0.0)
    assert len(desk.records) == 2


def test_a_repetition_of_a_worker_that_has_much_to_read_is_put_off(
    desk: KeyedDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = desk.connect_served()
    answers(worker, keyed_submit("a"))
    monkeypatch.setattr(intake, "MAX_BACKLOG_BYTES", -1)
    put_off, other = answers(worker, keyed_submit("b"), keyed_submit("c", key="other"))
    assert put_off == Refused("b", RefusalReason.QUEUE_FULL, 1.0)
    assert isinstance(other, Accepted), "what is computed comes step by step"
    assert len(desk.records) == 2


def test_an_end_within_its_time_is_followed_by_any_worker(desk: KeyedDesk) -> None:
    first, second = desk.connect_served(), desk.connect_served()
    answers(first, keyed_submit("a", created=5))
    end(desk.taken()[0], FinishReason.STOP)
    assert answers(second, keyed_submit("b")) == [Accepted("b", 0, 0.0, created=5)]
    (message,) = desk.taken()
    assert message.follows and message.readers.is_ended
    ((worker, output),) = message.readers.replay()
    assert worker == "worker-2"
    assert msgspec.structs.astuple(output)[:5] == ("b", -1, 0, 0, [7, 7])
