"""Check how an answer's text becomes output items: what opens, grows and closes them, and how they are left."""

from __future__ import annotations

from typing import Any

import pytest

from inference_api.messages import FinishReason
from inference_api.server.choices import Answer
from inference_api.server.context import ServerContext
from inference_api.server.generation import Piece
from inference_api.server.openai_responses.items import Change, Closed, Grown, Opened, Output
from inference_api.server.tools.formats import FORCED, HERMES, CallFormat
from tests.server.fakes import finished

HEX = "ab" * 16
FIRST = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
SECOND = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
STOP = finished(FinishReason.STOP)


def told(change: Change) -> tuple[str, int, str]:
    match change:
        case Opened(item):
            assert item.status == "in_progress"
            return "open", item.place, ""
        case Grown(item, text):
            return "grow", item.place, text
        case Closed(item):
            return "close", item.place, item.status


def call(place: int, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    suffix = f"{HEX}_{place}" if place else HEX
    ids = {"id": f"fc_{suffix}", "call_id": f"call_{suffix}"}
    return {**ids, "type": "function_call", "status": status, "name": name, "arguments": arguments}


def message(place: int, text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    item_id = f"msg_{HEX}_{place}" if place else f"msg_{HEX}"
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": [part]}


def output(context: ServerContext, *formats: CallFormat) -> Output:
    return Output(f"req_{HEX}", context.tokenizer, formats)


def test_each_item_closes_before_the_next_one_opens(context: ServerContext) -> None:
    found = output(context, HERMES)
    changes = [told(change) for change in found.take(Piece(f"Yes. {FIRST}\n{SECOND}", STOP, ()))]
    assert changes == [
        ("open", 0, ""),
        ("grow", 0, "Yes. "),
        ("close", 0, "completed"),
        ("open", 1, ""),
        ("grow", 1, '{"a": [1, "}"]}'),
        ("close", 1, "completed"),
        ("open", 2, ""),
        ("grow", 2, "{}"),
        ("close", 2, "completed"),
    ]
    assert found.as_list() == [message(0, "Yes. "), call(1, "f", '{"a": [1, "}"]}'), call(2, "g", "{}")]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pieces_of_any_size_make_the_items_of_the_whole_answer(context: ServerContext, size: int) -> None:
    text = f"Yes. {FIRST} and {SECOND}"
    whole, streamed = output(context, HERMES), output(context, HERMES)
    whole.take_whole(Answer(text, STOP, ()), "completed")
    for first in range(0, len(text), size):
        list(streamed.take(Piece(text[first : first + size], None, ())))
    list(streamed.take(Piece("", STOP, ())))
    assert streamed.as_list() == whole.as_list()
    assert [item["type"] for item in whole.as_list()] == ["message", "function_call", "message", "function_call"]


def test_without_formats_a_text_makes_no_calls(context: ServerContext) -> None:
    found = output(context)
    found.take_whole(Answer(FIRST, STOP, ()), "completed")
    assert found.as_list() == [message(0, FIRST)]


def test_a_forced_call_is_the_only_item(context: ServerContext) -> None:
    found = output(context, FORCED)
    found.take_whole(Answer('{"name": "f", "arguments": {"a": 1}}', STOP, ()), "completed")
    assert found.as_list() == [call(0, "f", '{"a": 1}')]


def test_a_call_that_was_cut_off_is_incomplete_and_one_that_is_whole_is_not(context: ServerContext) -> None:
    end = finished(FinishReason.LENGTH)
    cut, whole = output(context, HERMES), output(context, HERMES)
    cut.take_whole(Answer(FIRST[:45], end, ()), "incomplete")
    assert [item["status"] for item in cut.as_list()] == ["incomplete"]
    whole.take_whole(Answer(SECOND, end, ()), "incomplete")
    assert whole.as_list() == [call(0, "g", "{}")]


def test_what_is_open_when_an_answer_breaks_is_incomplete(context: ServerContext) -> None:
    found = output(context, HERMES)
    list(found.take(Piece(f"{SECOND}{FIRST[:45]}", None, ())))
    found.cut()
    assert [item["status"] for item in found.as_list()] == ["completed", "incomplete"]
