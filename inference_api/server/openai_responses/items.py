"""Turn the text of an answer, as it comes, into a response's output items: messages, and calls of functions.

Runs in PROCESS 1, in the request's own thread; pure. An item is open until the next one begins or the answer ends. Ids
follow from the request's, so that an answer is told the same whole and streamed. Knows no events and no routes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from inference_api.server.choices import Answer
from inference_api.server.generation import Piece
from inference_api.server.openai.tokens import chat_logprobs
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.tools.call_parser import Argued, Called, CallParser, Heard, Said
from inference_api.server.tools.formats import CallFormat

RUNNING, WHOLE, CUT = "in_progress", "completed", "incomplete"
_REQUEST_PREFIX = "req_"


class MessageItem:
    """Text, which is the only part of its message."""

    def __init__(self, item_id: str, place: int, tokenizer: Tokenizer) -> None:
        self.item_id = item_id
        self.place = place
        """Its index among the items."""
        self.status = RUNNING
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._tokens: list[TokenText] = []

    def say(self, text: str, tokens: Sequence[TokenText]) -> None:
        """Take the next text and its tokens, if logprobs are reported."""
        self._texts.append(text)
        self._tokens += tokens

    def part(self) -> dict[str, object]:
        """Return the part with all text so far."""
        return text_part("".join(self._texts), text_logprobs(self._tokens, self._tokenizer))

    def as_dict(self) -> dict[str, object]:
        """Return the item; it has no part before its first text."""
        content = [self.part()] if self._texts or self.status != RUNNING else []
        members: dict[str, object] = {"id": self.item_id, "type": "message", "status": self.status}
        return {**members, "role": "assistant", "content": content}


class CallItem:
    """A call of a function."""

    def __init__(self, item_id: str, place: int, call_id: str, name: str) -> None:
        self.item_id = item_id
        self.place = place
        """Its index among the items."""
        self.status = RUNNING
        self._call_id = call_id
        self.name = name
        self._arguments: list[str] = []

    def argue(self, text: str) -> None:
        """Take the next piece of the arguments."""
        self._arguments.append(text)

    @property
    def arguments(self) -> str:
        """All of them so far: JSON, unless the answer was cut off."""
        return "".join(self._arguments)

    def as_dict(self) -> dict[str, object]:
        """Return the item."""
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


Item = MessageItem | CallItem


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """An item has begun; it is empty."""

    item: Item


@dataclasses.dataclass(frozen=True, slots=True)
class Grown:
    """The open item has this more of text or arguments."""

    item: Item
    text: str
    tokens: Sequence[TokenText] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """An item is as it stays."""

    item: Item


Change = Opened | Grown | Closed


class Output:
    """The output of one response. Without `formats` its text makes no calls."""

    def __init__(self, request_id: str, tokenizer: Tokenizer, formats: Sequence[CallFormat] = ()) -> None:
        self._hex = request_id.removeprefix(_REQUEST_PREFIX)
        self._tokenizer = tokenizer
        self._parser = CallParser(formats) if formats else None
        self._items: list[Item] = []

    def as_list(self) -> list[dict[str, object]]:
        """Return the items as they are by now."""
        return [item.as_dict() for item in self._items]

    def cut(self) -> None:
        """Take no more: what is open stays incomplete."""
        if self._items and self._items[-1].status == RUNNING:
            self._items[-1].status = CUT

    def take(self, piece: Piece, status: str = WHOLE) -> Iterator[Change]:
        """Yield what a piece changes, each change once it is made; `status` is what an end leaves a message in."""
        for heard in self._heard(piece):
            yield from self._hear(heard, piece.tokens)
        if piece.finished is not None:
            if not self._items:
                yield self._open(self._message())
            yield from self._close(status)

    def take_whole(self, answer: Answer, status: str) -> None:
        """Take an answer that has ended; `status` as for `take`."""
        for _ in self.take(Piece(answer.text, answer.finished, answer.tokens), status):
            pass

    def _heard(self, piece: Piece) -> Iterable[Heard]:
        if self._parser is None:
            return [Said(piece.text)] if piece.text or piece.tokens else []
        heard = self._parser.feed(piece.text)
        return heard if piece.finished is None else [*heard, *self._parser.finish()]

    def _hear(self, heard: Heard, tokens: Sequence[TokenText]) -> Iterator[Change]:
        if isinstance(heard, Called):
            yield from self._close(WHOLE)
            yield self._open(self._call(heard.name))
        elif isinstance(heard, Said) and not (self._items and isinstance(self._items[-1], MessageItem)):
            yield from self._close(WHOLE)
            yield self._open(self._message())
        item = self._items[-1]
        if isinstance(item, MessageItem) and isinstance(heard, Said):
            item.say(heard.text, tokens)
            yield Grown(item, heard.text, tokens)
        elif isinstance(item, CallItem) and isinstance(heard, Argued):
            item.argue(heard.text)
            yield Grown(item, heard.text)

    def _message(self) -> MessageItem:
        return MessageItem(self._id("msg"), len(self._items), self._tokenizer)

    def _call(self, name: str) -> CallItem:
        return CallItem(self._id("fc"), len(self._items), self._id("call"), name)

    def _id(self, prefix: str) -> str:
        place = len(self._items)
        return f"{prefix}_{self._hex}_{place}" if place else f"{prefix}_{self._hex}"

    def _open(self, item: Item) -> Opened:
        self._items.append(item)
        return Opened(item)

    def _close(self, status: str) -> Iterator[Closed]:
        item = self._items[-1] if self._items else None
        if item is not None and item.status == RUNNING:
            if isinstance(item, CallItem):
                status = WHOLE if _is_json(item.arguments) else CUT
            item.status = status
            yield Closed(item)


def text_part(text: str, logprobs: list[object]) -> dict[str, object]:
    """Return a message's only part."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def text_logprobs(tokens: Sequence[TokenText], tokenizer: Tokenizer) -> list[object]:
    """Return logprobs as a part and a delta show them; none for no tokens."""
    content = chat_logprobs(tokens, tokenizer)["content"]
    return content if isinstance(content, list) else []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
