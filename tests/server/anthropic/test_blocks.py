"""How an answer's text and calls stand in blocks: whole, and event by event in their order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference_api.messages import FinishReason
from inference_api.server.anthropic.answers import AnswerReader, MessageEventWriter, MessageHead, whole_message
from inference_api.server.anthropic.blocks import INVALID_JSON
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.generation import Piece
from inference_api.server.tools.call_parser import CallParser
from inference_api.server.tools.formats import FORCED, HERMES
from tests.server.anthropic.named_events import read_event
from tests.server.fakes import finished

HEAD = MessageHead("req_0123", "mock", 21)
STOPPED = finished(FinishReason.STOP)
CUT = finished(FinishReason.LENGTH)
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
CUT_CALL = CALL[:50]
SECOND = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'


def reader(formats: tuple[Any, ...] = (HERMES,), call_end: str | None = None) -> AnswerReader:
    return AnswerReader(CallParser(formats), call_end)


def whole(text: str, end: Any = STOPPED, **options: Any) -> dict[str, Any]:
    """Return a whole message without the ids of its calls, each of which must be one of its own."""
    message: dict[str, Any] = whole_message(HEAD, reader(**options), Answer(text, end, ()))
    ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and all(one.startswith("toolu_") for one in ids)
    return message


def streamed(*texts: str, end: Any = STOPPED, **options: Any) -> list[tuple[Any, ...]]:
    """Return what the events of a stream hold, each in short, from the first block on."""
    writer = MessageEventWriter(HEAD, reader(**options))
    events = [*writer.begin()]
    for text in texts:
        events += writer.piece(ChoicePiece(0, Piece(text, None), 1))
    events += [*writer.piece(ChoicePiece(0, Piece("", end), 1)), *writer.end()]
    (first, _), *found = [read_event(event) for event in events]
    assert first == "message_start"
    return [_short(name, data) for name, data in found]


def _short(name: str, data: dict[str, Any]) -> tuple[Any, ...]:
    assert data["type"] == name
    match name:
        case "content_block_start":
            block = data["content_block"]
            assert block.pop("id", "toolu_").startswith("toolu_")
            return ("start", data["index"], block)
        case "content_block_delta":
            return (data["delta"].pop("type"), data["index"], *data["delta"].values())
        case "content_block_stop":
            return ("stop", data["index"])
        case "message_delta":
            return (data["delta"]["stop_reason"],)
    return (name,)


def test_a_stream_opens_fills_and_closes_its_blocks_one_after_the_other() -> None:
    pieces = ("Let", " me see.<tool", CALL[5:47], CALL[47:], "\n" + SECOND)
    assert streamed(*pieces) == [
        ("start", 0, {"type": "text", "text": ""}),
        ("text_delta", 0, "Let"),
        ("text_delta", 0, " me see."),
        ("stop", 0),
        ("start", 1, {"type": "tool_use", "name": "f", "input": {}}),
        ("input_json_delta", 1, '{"a": [1,'),
        ("input_json_delta", 1, ' "}"]}'),
        ("stop", 1),
        ("start", 2, {"type": "tool_use", "name": "g", "input": {}}),
        ("input_json_delta", 2, "{}"),
        ("stop", 2),
        ("tool_use",),
        ("message_stop",),
    ]


def test_a_forced_call_is_the_only_block() -> None:
    text = '{"name": "f", "arguments": {"a": 1}}'
    assert streamed(text, formats=(FORCED,)) == [
        ("start", 0, {"type": "tool_use", "name": "f", "input": {}}),
        ("input_json_delta", 0, '{"a": 1}'),
        ("stop", 0),
        ("tool_use",),
        ("message_stop",),
    ]


@pytest.mark.parametrize("size", [1, 3, 200])
@pytest.mark.parametrize("end", [STOPPED, CUT])
@pytest.mark.parametrize("text", ["", "No <b>.", f"Yes.{CALL}", f"{CALL}{SECOND} So.", CUT_CALL, CALL[:20], "a <tool"])
def test_a_stream_adds_up_to_the_blocks_of_the_whole_answer(text: str, end: Any, size: int) -> None:
    message = whole(text, end)
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    *events, (reason,), _ = streamed(*(text[first : first + size] for first in range(0, len(text), size)), end=end)
    for kind, index, *rest in events:
        if kind == "start":
            blocks.append(rest[0])
            arguments.append("")
        elif kind == "text_delta":
            blocks[index]["text"] += rest[0]
        elif kind == "input_json_delta":
            arguments[index] += rest[0]
    for block, given in zip(blocks, arguments, strict=True):
        if block["type"] == "tool_use" and text != CUT_CALL:
            block["input"] = json.loads(given)
        elif block["type"] == "tool_use":
            block["input"] = {"a": [1]}  # of what was cut off, what is whole
    assert (blocks, reason) == (message["content"], message["stop_reason"])


@pytest.mark.parametrize(
    ("text", "end", "call_end", "reason", "stop"),
    [
        (CALL, STOPPED, None, "tool_use", None),
        (CUT_CALL, CUT, None, "max_tokens", None),
        ("No.", STOPPED, None, "end_turn", None),
        (CALL, finished(FinishReason.STOP, stop=b"###"), None, "stop_sequence", "###"),
        (CALL[:-12], finished(FinishReason.STOP, stop=HERMES.end.encode()), HERMES.end, "tool_use", None),
        (CALL[:-12], finished(FinishReason.STOP, stop=HERMES.end.encode()), None, "stop_sequence", HERMES.end),
    ],
)
def test_a_message_with_calls_ends_for_what_ended_it(text, end, call_end, reason: str, stop: str | None) -> None:
    message = whole(text, end, call_end=call_end)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert {block["type"] for block in message["content"]} == {"tool_use" if "call" in text else "text"}


@pytest.mark.parametrize(
    "arguments",
    ["{a: 1}", '{"a": 1e999}', '{"a": NaN}', '{"a": ' * 2000 + "{}" + "}" * 2000],
    ids=["unquoted", "infinite", "nan", "deep"],
)
def test_arguments_that_are_no_json_are_told_as_they_are(arguments: str) -> None:
    (block,) = whole(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')["content"]
    assert block["input"] == {INVALID_JSON: arguments}
    json.dumps(block, allow_nan=False)
