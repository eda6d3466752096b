"""Write Anthropic's answers, whole and as events, from what the running choice makes; PROCESS 1.

An answer is one message of blocks: text, even if it is empty, and the calls of tools. Knows no prompts and no sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from inference_api.errors import InferenceApiError
from inference_api.messages import Finished, FinishReason
from inference_api.server.anthropic.blocks import BlockEvents, typed_event, whole_blocks
from inference_api.server.anthropic.errors import error_object
from inference_api.server.choices import Answer, ChoicePiece
from inference_api.server.responses import event
from inference_api.server.tools.call_parser import CallParser, Heard, Said

NO_END: dict[str, object] = {"stop_reason": None, "stop_sequence": None}
"""The end of a message that still runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class MessageHead:
    """What is known of an answer before it begins."""

    request_id: str
    model: str
    num_prompt_tokens: int

    def message(self, content: list[object], ending: dict[str, object], finished: Finished | None) -> dict[str, object]:
        """Return the message object, which has no end yet without `finished`."""
        return {
            "id": f"msg_{self.request_id.removeprefix('req_')}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **ending,
            "usage": self.usage(finished),
        }

    def usage(self, finished: Finished | None) -> dict[str, int]:
        """Return a `usage`: the prompt is the sum of the three kinds of input, as in Anthropic's API.

        Which part of it was reused is known at the end only. Nothing is kept for later at a caller's expense.
        """
        num_cached_tokens = finished.num_cached_tokens if finished is not None else 0
        return {
            "input_tokens": self.num_prompt_tokens - num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached_tokens,
            "output_tokens": finished.num_completion_tokens if finished is not None else 0,
        }


class AnswerReader:
    """Tell what one answer says and calls, and why it ended. Without a parser all of it is text."""

    def __init__(self, parser: CallParser | None = None, call_end: str | None = None) -> None:
        """`call_end` is a stop of our own, which ends an answer after its first call and is not told."""
        self._parser = parser
        self._call_end = call_end

    def hear(self, text: str, *, is_end: bool) -> list[Heard]:
        """Return what the next text made sure of; at the end, all that was still waited for."""
        if self._parser is None:
            return [Said(text)] if text else []
        heard = self._parser.feed(text)
        return [*heard, *self._parser.finish()] if is_end else heard

    def ending(self, finished: Finished) -> dict[str, object]:
        """Return why the message has ended, and the caller's stop sequence that ended it, if one has."""
        stop = finished.stop.decode() if finished.stop is not None else None
        if stop == self._call_end:
            stop = None
        if finished.reason is not FinishReason.STOP:
            reason = "max_tokens"
        elif stop is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser is not None and self._parser.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}


def whole_message(head: MessageHead, reader: AnswerReader, answer: Answer) -> dict[str, object]:
    """Return the body of an answer that was not streamed."""
    blocks = whole_blocks(reader.hear(answer.text, is_end=True), head.request_id)
    return head.message(blocks, reader.ending(answer.finished), answer.finished)


class MessageEventWriter:
    """Write the events of one message; see `EventWriter`. Clients skip events without a name."""

    def __init__(self, head: MessageHead, reader: AnswerReader) -> None:
        self._head = head
        self._reader = reader
        self._blocks = BlockEvents(head.request_id)

    def begin(self) -> Iterator[bytes]:
        """Open the message; what its first block is, its text tells."""
        yield typed_event("message_start", message=self._head.message([], NO_END, None))

    def piece(self, choice: ChoicePiece) -> Iterator[bytes]:
        """Write new text and calls; at the end, close the last block and tell why and how much."""
        finished = choice.piece.finished
        yield from self._blocks.write(self._reader.hear(choice.piece.text, is_end=finished is not None))
        if finished is not None:
            yield from self._blocks.close()
            usage = self._head.usage(finished)
            yield typed_event("message_delta", delta=self._reader.ending(finished), usage=usage)

    def ping(self) -> bytes:
        """Write an event that Anthropic's clients skip."""
        return typed_event("ping")

    def end(self) -> Iterator[bytes]:
        """Close the message."""
        yield typed_event("message_stop")

    def error(self, error: InferenceApiError) -> Iterator[bytes]:
        """Write the error; nothing follows."""
        yield event("error", error_object(error, self._head.request_id))
