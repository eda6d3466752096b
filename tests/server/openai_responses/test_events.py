"""Check the events of a response one by one: their order, names, numbers and every member."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from inference_api.errors import AbortedError, BackendLostError, InferenceApiError
from inference_api.messages import FinishReason
from inference_api.sampling_params import TokenLogprobs
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.context import ServerContext
from inference_api.server.generation import Piece
from inference_api.server.openai_responses.answers import ResponseHead, State, asked_members, ended_response
from inference_api.server.openai_responses.bodies import ResponsesBody
from inference_api.server.openai_responses.events import ResponseEventWriter
from inference_api.server.openai_responses.items import Output
from inference_api.server.token_trail import TokenText
from inference_api.server.tools.formats import HERMES
from tests.server.fakes import finished

HEX = "cd" * 16
MESSAGE_ID = f"msg_{HEX}"
HEAD = ResponseHead(f"req_{HEX}", 1_700_000_000, 7, asked_members(ResponsesBody(model="mock", input="hi")))
PLACE = {"item_id": MESSAGE_ID, "output_index": 0, "content_index": 0}
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def writer(context: ServerContext) -> ResponseEventWriter:
    output = Output(HEAD.request_id, context.tokenizer)
    return ResponseEventWriter(HEAD, output, context.tokenizer)


def piece(text: str, end: Any = None, tokens: tuple[TokenText, ...] = ()) -> ChoicePiece:
    return ChoicePiece(0, Piece(text, end, tokens), len(text))


def parse(chunks: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the events' data; each one's name is its type."""
    parsed = []
    for chunk in chunks:
        name, data = chunk.decode().removesuffix("\n\n").split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def item(status: str, *content: object) -> dict[str, Any]:
    return {"id": MESSAGE_ID, "type": "message", "status": status, "role": "assistant", "content": list(content)}


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "incomplete")])
def test_the_events_of_a_whole_response(
    context: ServerContext, writer: ResponseEventWriter, reason: FinishReason, status: str
) -> None:
    end = finished(reason, num_tokens=3)
    chunks = [*writer.begin(), *writer.piece(piece("on")), *writer.piece(piece("")), *writer.piece(piece("e", end))]
    chunks += writer.end()
    assert chunks[-1] == DONE
    events = parse(chunks[:-1])
    running = HEAD.as_dict(State())
    whole = Output(HEAD.request_id, context.tokenizer)
    whole.take_whole(Answer("one", end, ()), status)
    assert events == [
        {"type": "response.created", "sequence_number": 0, "response": running},
        {"type": "response.in_progress", "sequence_number": 1, "response": running},
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "output_index": 0,
            "item": item("in_progress"),
        },
        {"type": "response.content_part.added", "sequence_number": 3, **PLACE, "part": part("")},
        {"type": "response.output_text.delta", "sequence_number": 4, **PLACE, "delta": "on", "logprobs": []},
        {"type": "response.output_text.delta", "sequence_number": 5, **PLACE, "delta": "e", "logprobs": []},
        {"type": "response.output_text.done", "sequence_number": 6, **PLACE, "text": "one", "logprobs": []},
        {"type": "response.content_part.done", "sequence_number": 7, **PLACE, "part": part("one")},
        {
            "type": "response.output_item.done",
            "sequence_number": 8,
            "output_index": 0,
            "item": item(status, part("one")),
        },
        {
            "type": f"response.{status}",
            "sequence_number": 9,
            "response": ended_response(HEAD, end, whole),
        },
    ]


def test_an_answer_without_text_still_has_a_message(writer: ResponseEventWriter) -> None:
    chunks = [*writer.begin(), *writer.piece(piece("", finished(FinishReason.STOP))), *writer.end()]
    events = parse(chunks[:-1])
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[-1]["response"]["output"] == [item("completed", part(""))]


def test_a_response_that_fails_before_its_first_text_has_no_message(writer: ResponseEventWriter) -> None:
    events = parse([*writer.begin(), *writer.error(BackendLostError("it broke"))])
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    told = {"code": "server_error", "message": "it broke", "param": None, "type": "backend_lost"}
    assert events[-1] == {
        "type": "response.failed",
        "sequence_number": 2,
        "response": {**HEAD.as_dict(State()), "status": "failed", "error": told},
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BackendLostError("it broke"), "failed", "backend_lost"),
        (AbortedError("The request was aborted."), "cancelled", "aborted"),
    ],
)
def test_a_response_that_breaks_tells_what_it_had_said_and_does_not_look_whole(
    writer: ResponseEventWriter, error: InferenceApiError, status: str, kind: str
) -> None:
    chunks = [*writer.begin(), *writer.piece(piece("on")), *writer.error(error)]
    assert DONE not in chunks
    events = parse(chunks)
    assert [event["sequence_number"] for event in events] == list(range(6))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["type"], response["error"]["message"]) == (status, kind, str(error))
    assert response["output"] == [item("incomplete", part("on"))]
    assert (response["completed_at"], response["usage"]) == (None, None)


def test_logprobs_come_with_their_text_and_all_of_them_at_the_end(writer: ResponseEventWriter) -> None:
    tokens = [TokenText(ord(char), char, TokenLogprobs(-0.5, [(ord(char), -0.5), (65, -2.0)])) for char in "on"]
    told = [
        {
            "token": char,
            "logprob": -0.5,
            "bytes": [ord(char)],
            "top_logprobs": [
                {"token": char, "logprob": -0.5, "bytes": [ord(char)]},
                {"token": "A", "logprob": -2.0, "bytes": [65]},
            ],
        }
        for char in "on"
    ]
    end = finished(FinishReason.STOP, num_tokens=2)
    chunks = [*writer.piece(piece("o", None, (tokens[0],))), *writer.piece(piece("n", end, (tokens[1],)))]
    events = parse([*chunks, *writer.end()][:-1])
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [told[:1], told[1:]]
    by_type = {event["type"]: event for event in events}
    assert by_type["response.output_text.done"]["logprobs"] == told
    assert by_type["response.content_part.done"]["part"]["logprobs"] == told
    assert by_type["response.completed"]["response"]["output"][0]["content"][0]["logprobs"] == told


def test_a_ping_is_a_comment_and_takes_no_number(writer: ResponseEventWriter) -> None:
    assert parse(writer.begin())[-1]["sequence_number"] == 1
    assert writer.ping() == b": ping\n\n"
    assert parse(writer.piece(piece("x")))[0]["sequence_number"] == 2


def test_a_response_that_has_not_ended_is_never_told_as_whole(writer: ResponseEventWriter) -> None:
    with pytest.raises(RuntimeError):
        list(writer.end())


def test_the_events_of_a_text_and_a_call(context: ServerContext) -> None:
    output = Output(HEAD.request_id, context.tokenizer, (HERMES,))
    writer = ResponseEventWriter(HEAD, output, context.tokenizer)
    call = {"id": f"fc_{HEX}_1", "type": "function_call", "call_id": f"call_{HEX}_1", "name": "f"}
    begun = {**call, "status": "in_progress", "arguments": ""}
    done = {**call, "status": "completed", "arguments": '{"a": 1}'}
    place = {"item_id": call["id"], "output_index": 1}
    end = finished(FinishReason.STOP, num_tokens=9)
    chunks = [*writer.piece(piece('ok<tool_call>{"name": "f", "arguments": {"a')), *writer.piece(piece('": 1}}</tool'))]
    chunks += [*writer.piece(piece("_call>", end)), *writer.end()]
    events = parse(chunks[:-1])
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    assert events == [
        {"type": "response.output_item.added", "output_index": 0, "item": item("in_progress")},
        {"type": "response.content_part.added", **PLACE, "part": part("")},
        {"type": "response.output_text.delta", **PLACE, "delta": "ok", "logprobs": []},
        {"type": "response.output_text.done", **PLACE, "text": "ok", "logprobs": []},
        {"type": "response.content_part.done", **PLACE, "part": part("ok")},
        {"type": "response.output_item.done", "output_index": 0, "item": item("completed", part("ok"))},
        {"type": "response.output_item.added", "output_index": 1, "item": begun},
        {"type": "response.function_call_arguments.delta", **place, "delta": '{"a'},
        {"type": "response.function_call_arguments.delta", **place, "delta": '": 1}'},
        {"type": "response.function_call_arguments.done", **place, "name": "f", "arguments": '{"a": 1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": done},
        {"type": "response.completed", "response": ended_response(HEAD, end, output)},
    ]
    assert events[-1]["response"]["output"] == [item("completed", part("ok")), done]


def test_a_call_that_breaks_stays_incomplete(context: ServerContext) -> None:
    output = Output(HEAD.request_id, context.tokenizer, (HERMES,))
    writer = ResponseEventWriter(HEAD, output, context.tokenizer)
    chunks = [
        *writer.piece(piece('<tool_call>{"name": "f", "arguments": {"a')),
        *writer.error(BackendLostError("it broke")),
    ]
    (left,) = parse(chunks)[-1]["response"]["output"]
    assert (left["type"], left["status"], left["arguments"]) == ("function_call", "incomplete", '{"a')
