"""Check the backend's debug events of a session: queued, first token, ended; counts and times, no token id."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from inference_api.backend.inbox_messages import MaskedSubmit
from inference_api.backend.session_trace import TracedInbox, TracedOutbox
from inference_api.debug_log import DebugLog
from inference_api.messages import (
    Abort,
    ErrorInfo,
    Finished,
    FinishReason,
    Grammar,
    GrammarKind,
    Message,
    Pong,
    SequenceOutput,
    StepOutput,
    Submit,
    Timing,
)
from inference_api.sampling_params import SamplingParams

SUBMIT = Submit(
    session_id="s1",
    request_id="req_1",
    tenant="alpha",
    token_ids=[71, 72, 73],
    num_prompt_tokens=3,
    max_tokens=9,
    sampling=SamplingParams(1.0, 1, 1.0, 0),
    stop_sequences=[b"stop-canary"],
    queue_seconds=1.0,
    first_token_seconds=1.0,
    total_seconds=1.0,
)
TIMING = Timing(0.25, 0.5, 1.0, 4, 5)


class FreeMask:
    """Allow everything."""

    def allowed(self, ids: Sequence[int]) -> bytes:
        return b"\xff"


class Sent:
    """Keep what was sent on."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Message]] = []

    def send(self, worker: str, message: Message) -> None:
        self.messages.append((worker, message))


def events_of(log: DebugLog) -> list[dict[str, Any]]:
    log.close()
    return [json.loads(line) for line in log.path.read_text().splitlines()]


def test_a_submit_with_a_grammar_is_an_event_without_a_word_of_it(tmp_path: Path) -> None:
    log = DebugLog(tmp_path, "backend-7000")
    inbox = TracedInbox(log)
    grammar = Grammar(GrammarKind.REGEX, "grammar-canary")
    message = MaskedSubmit(msgspec.structs.replace(SUBMIT, grammar=grammar), FreeMask())
    inbox.put("worker-1", message)
    assert inbox.drain(0) == [("worker-1", message)]
    (event,) = events_of(log)
    assert (event["event"], event["num_prompt_tokens"]) == ("queued", 3)
    assert "canary" not in log.path.read_text()


def test_a_submit_is_an_event_and_goes_on_to_the_decode_thread(tmp_path: Path) -> None:
    log = DebugLog(tmp_path, "backend-7000")
    inbox = TracedInbox(log)
    inbox.put("worker-1", SUBMIT)
    inbox.put("worker-1", Abort("req_1", "alpha"))
    assert inbox.drain(0.0) == [("worker-1", SUBMIT), ("worker-1", Abort("req_1", "alpha"))]
    (event,) = events_of(log)
    del event["time"]
    assert event == {
        "event": "queued",
        "session_id": "s1",
        "request_id": "req_1",
        "worker": "worker-1",
        "num_prompt_tokens": 3,
        "max_tokens": 9,
    }


def test_first_tokens_and_ends_are_events_and_the_steps_between_are_not(tmp_path: Path) -> None:
    log = DebugLog(tmp_path, "backend-7000")
    sent = Sent()
    outbox = TracedOutbox(sent, log)
    failed = Finished(FinishReason.ERROR, 0, TIMING, error=ErrorInfo("generation_failed", "text-canary"))
    messages: list[Message] = [
        StepOutput([SequenceOutput("s1", 7, 2, 0, [91])]),
        StepOutput([SequenceOutput("s1", 7, 2, 1, [92])]),
        Pong(1, 0.0, False, 0, 0),
        StepOutput(
            [
                SequenceOutput("s1", 7, 2, 2, [93], Finished(FinishReason.STOP, 3, TIMING, b"stop-canary")),
                SequenceOutput("s2", -1, 0, 0, [], failed),
            ]
        ),
    ]
    for message in messages:
        outbox.send("worker-1", message)
    assert sent.messages == [("worker-1", message) for message in messages]
    first, ended, refused = events_of(log)
    assert (first["event"], first["session_id"], first["row"]) == ("first_token", "s1", 7)
    assert (ended["event"], ended["reason"], ended["num_completion_tokens"]) == ("ended", "stop", 3)
    assert (ended["queue_seconds"], ended["prefill_seconds"], ended["decode_seconds"]) == (0.25, 0.5, 1.0)
    assert (refused["session_id"], refused["row"], refused["code"]) == ("s2", -1, "generation_failed")
    text = log.path.read_text()
    assert "canary" not in text and not {"91", "92", "93"} & set(text.replace(",", " ").split())
