"""Write a response as the Responses API's server-sent events, each with its name and its number.

Runs in PROCESS 1, in the request's own thread. An item opens with its first text or call, so that a response which
fails before has none, and every stream ends with one of `response.completed`, `.incomplete` and `.failed`. Knows no
routes, and not where one item ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from inference_api.errors import AbortedError, InferenceApiError
from inference_api.messages import ErrorInfo, Finished, FinishReason
from inference_api.server.choices import ChoicePiece
from inference_api.server.openai.answers import DONE
from inference_api.server.openai_responses.answers import ResponseHead, State, ended_response
from inference_api.server.openai_responses.items import (
    Change,
    Closed,
    Grown,
    Item,
    MessageItem,
    Opened,
    Output,
    text_logprobs,
    text_part,
)
from inference_api.server.responses import PING, event
from inference_api.server.tokenizer import Tokenizer


class ResponseEventWriter:
    """Write the events of one response; see `EventWriter`."""

    def __init__(self, head: ResponseHead, output: Output, tokenizer: Tokenizer) -> None:
        self._head = head
        self._output = output
        self._tokenizer = tokenizer
        self._num_events = 0
        self._finished: Finished | None = None

    def begin(self) -> Iterator[bytes]:
        """Write that the response exists and runs."""
        yield self._event("response.created", response=self._head.as_dict(State()))
        yield self._event("response.in_progress", response=self._head.as_dict(State()))

    def piece(self, choice: ChoicePiece) -> Iterator[bytes]:
        """Write what is new in the items, which open and close on the way."""
        self._finished = choice.piece.finished
        status = State(self._finished.reason).status if self._finished is not None else ""
        for change in self._output.take(choice.piece, status):
            yield from self._told(change)

    def ping(self) -> bytes:
        """Write a comment, which every parser of events skips (WHATWG HTML, section 9.2.6)."""
        return PING

    def end(self) -> Iterator[bytes]:
        """Write the whole response, and the end of the stream."""
        if self._finished is None:
            raise RuntimeError("the response has not ended")
        response = ended_response(self._head, self._finished, self._output)
        yield self._event(f"response.{State(self._finished.reason).status}", response=response)
        yield DONE

    def error(self, error: InferenceApiError) -> Iterator[bytes]:
        """Write that the response failed, or was cancelled, with what it had said by then; no end follows."""
        reason = FinishReason.ABORT if isinstance(error, AbortedError) else FinishReason.ERROR
        state = State(reason, ErrorInfo(error.code, str(error)))
        self._output.cut()
        yield self._event("response.failed", response=self._head.as_dict(state, self._output.as_list()))

    def _told(self, change: Change) -> Iterator[bytes]:
        match change:
            case Opened(item):
                yield self._event("response.output_item.added", output_index=item.place, item=item.as_dict())
                if isinstance(item, MessageItem):
                    yield self._event("response.content_part.added", **_part_place(item), part=text_part("", []))
            case Grown(MessageItem() as item, text, tokens):
                logprobs = text_logprobs(tokens, self._tokenizer)
                yield self._event("response.output_text.delta", **_part_place(item), delta=text, logprobs=logprobs)
            case Grown(item, text):
                yield self._event("response.function_call_arguments.delta", **_place(item), delta=text)
            case Closed(item):
                yield from self._closed(item)

    def _closed(self, item: Item) -> Iterator[bytes]:
        if isinstance(item, MessageItem):
            part = item.part()
            text, logprobs = part["text"], part["logprobs"]
            yield self._event("response.output_text.done", **_part_place(item), text=text, logprobs=logprobs)
            yield self._event("response.content_part.done", **_part_place(item), part=part)
        else:
            kind = "response.function_call_arguments.done"
            yield self._event(kind, **_place(item), name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", output_index=item.place, item=item.as_dict())

    def _event(self, kind: str, **members: object) -> bytes:
        number = self._num_events
        self._num_events += 1
        return event(kind, {"type": kind, "sequence_number": number, **members})


def _place(item: Item) -> dict[str, object]:
    return {"item_id": item.item_id, "output_index": item.place}


def _part_place(item: MessageItem) -> dict[str, object]:
    return {**_place(item), "content_index": 0}
