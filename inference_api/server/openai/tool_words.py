"""Word chat answers whose text may hold calls: `tool_calls`, whole or with their arguments streamed; PROCESS 1.

Knows OpenAI's words for a call; how calls stand in a text is the parser's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inference_api.messages import FinishReason
from inference_api.server.choices import Answer
from inference_api.server.generation import Piece
from inference_api.server.openai.answers import FINISH_REASONS, ChatWords
from inference_api.server.token_trail import TokenText
from inference_api.server.tokenizer import Tokenizer
from inference_api.server.tools.call_parser import Argued, Called, CallParser, Heard, Said
from inference_api.server.tools.calling import call_hex
from inference_api.server.tools.formats import CallFormat

CALLED = "tool_calls"
"""The finish reason of an answer that calls and has come to its own end."""


class ToolWords(ChatWords):
    """The words of chat completions with tools; reports no logprobs."""

    def __init__(self, tokenizer: Tokenizer, formats: Sequence[CallFormat], num_choices: int, request_id: str) -> None:
        super().__init__(tokenizer, logprobs=False)
        self._request_id = request_id
        self._parsers = [CallParser(formats) for _ in range(num_choices)]

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        """Return a choice with its message: its content, null where there is none, and its calls."""
        parser = self._parsers[index]
        heard = [*parser.feed(answer.text), *parser.finish()]
        content = "".join(one.text for one in heard if isinstance(one, Said))
        message: dict[str, object] = {"role": "assistant", "content": content or None, "refusal": None}
        if parser.num_calls:
            message["tool_calls"] = self._calls(index, heard)
        else:
            message["content"] = content
        reason = self._reason(index, FINISH_REASONS[answer.finished.reason])
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def text(self, index: int, text: str, tokens: Sequence[TokenText]) -> list[dict[str, object]]:  # noqa: ARG002 - none are reported
        """Return deltas with new content, calls that begin, and pieces of their arguments."""
        return self._deltas(index, self._parsers[index].feed(text))

    def ending(self, index: int, piece: Piece, reason: str) -> list[dict[str, object]]:
        """Return what was still waited for, and the delta that tells why it ended."""
        parser = self._parsers[index]
        heard = [*parser.feed(piece.text), *parser.finish()]
        return [*self._deltas(index, heard), self._chunk(index, {}, reason=self._reason(index, reason))]

    def _reason(self, index: int, reason: str) -> str:
        return CALLED if self._parsers[index].num_calls and reason == FINISH_REASONS[FinishReason.STOP] else reason

    def _deltas(self, index: int, heard: Iterable[Heard]) -> list[dict[str, object]]:
        return [self._chunk(index, self._delta(index, one)) for one in heard]

    def _delta(self, index: int, heard: Heard) -> dict[str, object]:
        match heard:
            case Said():
                return {"content": heard.text}
            case Called():
                function = {"name": heard.name, "arguments": ""}
                call = {"index": heard.index, "id": self._call_id(index, heard.index), "type": "function"}
                return {"tool_calls": [{**call, "function": function}]}
            case Argued():
                return {"tool_calls": [{"index": heard.index, "function": {"arguments": heard.text}}]}

    def _calls(self, index: int, heard: Iterable[Heard]) -> list[dict[str, object]]:
        names: list[str] = []
        arguments: list[str] = []
        for one in heard:
            if isinstance(one, Called):
                names.append(one.name)
                arguments.append("")
            elif isinstance(one, Argued):
                arguments[one.index] += one.text
        return [
            {"id": self._call_id(index, place), "type": "function", "function": {"name": name, "arguments": text}}
            for place, (name, text) in enumerate(zip(names, arguments, strict=True))
        ]

    def _call_id(self, index: int, place: int) -> str:
        return f"call_{call_hex(self._request_id, index, place)}"
