"""Make Anthropic's content blocks of what is heard in an answer, whole and as events; PROCESS 1.

Blocks stand in the order in which they are heard, so that a stream and a whole answer have the same ones. Knows no
message around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pydantic_core import from_json

from inference_api.server.responses import event
from inference_api.server.tools.call_parser import Argued, Called, Heard, Said
from inference_api.server.tools.calling import call_hex

INVALID_JSON = "INVALID_JSON"
"""The member that holds arguments which are no JSON (Anthropic's guide to fine-grained tool streaming)."""


def whole_blocks(heard: Iterable[Heard], request_id: str) -> list[object]:
    """Return an answer's blocks, its calls named after its request; one without text if nothing was heard."""
    found: list[tuple[Called | None, list[str]]] = []
    for one in heard:
        if isinstance(one, Called):
            found.append((one, []))
            continue
        if isinstance(one, Said) and (not found or found[-1][0] is not None):
            found.append((None, []))
        found[-1][1].append(one.text)
    blocks: list[object] = []
    for called, texts in found or [(None, [])]:
        text = "".join(texts)
        blocks.append(_text_block(text) if called is None else _tool_block(request_id, called, _input(text)))
    return blocks


class BlockEvents:
    """Write the events of one answer's blocks: `write` as often as something is heard, then `close`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._index = -1
        self._is_text = False

    def write(self, heard: Iterable[Heard]) -> Iterator[bytes]:
        """Open, fill and close blocks."""
        for one in heard:
            match one:
                case Said():
                    if not self._is_text:
                        yield from self._open(_text_block(""), is_text=True)
                    yield self._delta({"type": "text_delta", "text": one.text})
                case Called():
                    yield from self._open(_tool_block(self._request_id, one, {}), is_text=False)
                case Argued():
                    yield self._delta({"type": "input_json_delta", "partial_json": one.text})

    def close(self) -> Iterator[bytes]:
        """Close the last block; if nothing was heard, it is one without text."""
        if self._index < 0:
            yield from self._open(_text_block(""), is_text=True)
        yield self._stop()

    def _open(self, block: dict[str, object], *, is_text: bool) -> Iterator[bytes]:
        if self._index >= 0:
            yield self._stop()
        self._index += 1
        self._is_text = is_text
        yield typed_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, object]) -> bytes:
        return typed_event("content_block_delta", index=self._index, delta=delta)

    def _stop(self) -> bytes:
        return typed_event("content_block_stop", index=self._index)


def typed_event(kind: str, **members: object) -> bytes:
    """Return an event whose data has its name as `type`."""
    return event(kind, {"type": kind, **members})


def _text_block(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}


def _tool_block(request_id: str, called: Called, arguments: dict[str, object]) -> dict[str, object]:
    tool_id = f"toolu_{call_hex(request_id, 0, called.index)}"
    return {"type": "tool_use", "id": tool_id, "name": called.name, "input": arguments}


def _input(text: str) -> dict[str, object]:
    """Return a call's arguments; of those that were cut off what is whole, as Anthropic's client reads a stream."""
    try:
        found = from_json(text, allow_partial=True, cache_strings="none")
        json.dumps(found, allow_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: text}
