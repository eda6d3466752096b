"""Say how each surface of the service is asked for a text, and where the text stands in what it answers.

One table, of every route that generates, streamed and whole; `RAW` is the one that the others are set beside. Pure: it
makes bodies and reads answers. Knows no engine, no times and nothing of how often anything is asked.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from benches.peer_contender import read_events
from benches.service import BenchError
from benches.streams import Answer

PROMPT = "count"
MODEL = "bench"
"""The served name that the bench gives whatever model it runs."""

Body = dict[str, object]


@dataclasses.dataclass(frozen=True, slots=True)
class Surface:
    """One way to ask: `body` makes a request for so many tokens, `piece` finds the text of an event or an answer."""

    name: str
    path: str
    body: Callable[[int], Body]
    piece: Callable[[object], str] | None = None
    """None where the body is the text and nothing else."""
    is_streamed: bool = True
    is_cumulative: bool = False
    """Whether each event repeats all of the text so far."""

    def read(self, answer: Answer) -> Reading:
        """Return the text of an answer and when it came; raise BenchError if there is none."""
        if self.piece is None:
            return Reading(answer.body.decode(), tuple(at for at, _ in answer.chunks))
        if not self.is_streamed:
            return Reading(self.piece(json.loads(answer.body)), (answer.ended_at,))
        piece = self.piece
        arrivals, events = read_events(answer, lambda event: bool(piece(event)))
        pieces = [text for text in map(piece, events) if text]
        if not pieces:
            raise BenchError(f"{self.path} sent no text: {answer.body[:300]!r}")
        return Reading(pieces[-1] if self.is_cumulative else "".join(pieces), tuple(arrivals))


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """An answer's text, and when each event with some of it came (monotonic seconds)."""

    text: str
    arrivals: tuple[float, ...]

    def check_digits(self, tokens: int) -> None:
        """Raise BenchError unless the text is as many digits of the mock, each one more than the one before."""
        first = int(self.text[0]) if self.text[:1].isdigit() else 0
        if self.text != "".join(str((first + index) % 10) for index in range(tokens)):
            raise BenchError(f"{len(self.text)} digits of {tokens}, or wrong ones: {self.text[:64]!r}")


def text_at(*keys: str | int) -> Callable[[object], str]:
    """Return what reads the text at a place in a JSON value: the empty one where there is none."""

    def read(value: object) -> str:
        for key in keys:
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return ""
        return value if isinstance(value, str) else ""

    return read


def _chat_message(event: object) -> str:
    """Return the text of an event of /chat; its last one, `close`, has a message and none of the answer."""
    message = text_at("message")(event)
    return "" if message == "Connection closed" else message


def _native(tokens: int) -> Body:
    return {"text": PROMPT, "max_tokens": tokens}


def _completion(tokens: int) -> Body:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens}


def _chat(tokens: int) -> Body:
    return {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens}


def _response(tokens: int) -> Body:
    return {"model": MODEL, "input": PROMPT, "max_output_tokens": tokens}


def _generation(tokens: int) -> Body:
    return {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}}


def _streamed(body: Callable[[int], Body]) -> Callable[[int], Body]:
    return lambda tokens: {**body(tokens), "stream": True}


RAW = Surface("inference", "/inference/falcon40b", _native)
SURFACES = (
    RAW,
    Surface("chat", "/chat/falcon40b", _native, _chat_message, is_cumulative=True),
    Surface("v1_completions", "/v1/completions", _streamed(_completion), text_at("choices", 0, "text")),
    Surface("v1_chat", "/v1/chat/completions", _streamed(_chat), text_at("choices", 0, "delta", "content")),
    Surface("v1_responses", "/v1/responses", _streamed(_response), text_at("delta")),
    Surface("v1_messages", "/v1/messages", _streamed(_chat), text_at("delta", "text")),
    Surface("generate_stream", "/generate_stream", _generation, text_at("token", "text")),
    Surface("v1_completions_whole", "/v1/completions", _completion, text_at("choices", 0, "text"), is_streamed=False),
    Surface(
        "v1_chat_whole", "/v1/chat/completions", _chat, text_at("choices", 0, "message", "content"), is_streamed=False
    ),
    Surface(
        "v1_responses_whole", "/v1/responses", _response, text_at("output", 0, "content", 0, "text"), is_streamed=False
    ),
    Surface("v1_messages_whole", "/v1/messages", _chat, text_at("content", 0, "text"), is_streamed=False),
    Surface("generate", "/generate", _generation, text_at("generated_text"), is_streamed=False),
)
