"""Turn chat messages into prompt ids with the model's own Jinja template, in a gunicorn worker.

The template is rendered in a sandbox with a random sentinel in place of each content; what it writes around the
sentinels is trusted, the contents put back there are not, so that no caller can write a control id. A template that
looks into a content, changes it, drops it or repeats it is found out and refused, never followed in part. Knows no
HTTP and no model, and has no clock: `strftime_now` is undefined, and templates fall back to a date of their own.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from inference_api.errors import InvalidRequestError, ModelError
from inference_api.server.tokenizer import Segment, Tokenizer
from inference_api.server.validation import refuse_lone_surrogates

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles that a message may have. A template writes them among its own, trusted words: never free text."""

# Unicode 16, section 23.5: U+E000 to U+F8FF are for private use; they have no case and are no blanks.
_SENTINEL_OF_ASCII = {code: 0xE000 + code for code in range(0x80)}
_CLOSING = ">".translate(_SENTINEL_OF_ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class ChatTemplate:
    """Render and encode conversations; immutable once made, so that all threads of a worker may share it."""

    def __init__(self, source: str, tokenizer: Tokenizer, *, bos_text: str = "", eos_text: str = "") -> None:
        """Compile the template; raises ModelError if it is no Jinja. The two texts are its `bos_token`, `eos_token`."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"The model's chat template cannot be compiled: {error}") from error
        self.source = source
        self._tokenizer = tokenizer
        self._bos_text = bos_text
        self._eos_text = eos_text

    def encode(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Encode a conversation as a whole prompt; the template alone decides about BOS.

        For contents without control texts the ids are those of `apply_chat_template`. Raises InvalidRequestError for
        a role or content that cannot be sent, and for a conversation that the template refuses or would alter.
        """
        segments = self._segments(messages, add_generation_prompt)
        return self._tokenizer.encode_segments(segments, field="messages")

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as the text that `encode` encodes; raises as it does. What is trusted is not told."""
        return "".join(segment.text for segment in self._segments(messages, add_generation_prompt))

    def _segments(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[Segment]:
        """Check the messages and render them."""
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise InvalidRequestError(f"messages[{index}].role is not one of {', '.join(ROLES)}.")
            refuse_lone_surrogates(f"messages[{index}].content", message.content)
        return self._render_segments(messages, add_generation_prompt)

    def _render_segments(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> list[Segment]:
        opening = _sentinel(f"{secrets.token_hex(16)}<")
        numbers = {_sentinel(str(index)): index for index in range(len(messages))}
        hidden = [
            ChatMessage(message.role, _hide(message.content, f"{opening}{number}{_CLOSING}"))
            for number, message in zip(numbers, messages, strict=True)
        ]
        pieces = _cut(self._render(hidden, add_generation_prompt), opening, numbers)
        _check_each_once(messages, [piece for piece in pieces if isinstance(piece, int)])
        segments = [
            Segment(messages[piece].content.strip(), trusted=False)
            if isinstance(piece, int)
            else Segment(piece, trusted=True)
            for piece in pieces
        ]
        # Rendered as it stands, the conversation must read the same: else the template looked into a content.
        if self._render(messages, add_generation_prompt) != "".join(segment.text for segment in segments):
            raise InvalidRequestError(
                "This model's chat template rewrites what one of these messages says, so they cannot be sent safely."
                " Leave out markup that the model itself writes, such as its reasoning."
            )
        return segments

    def _render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_text,
                eos_token=self._eos_text,
                tools=None,
                documents=None,
            )
        except _TemplateRefusalError as error:
            raise InvalidRequestError(f"This model's chat template refuses these messages: {error}") from None
        except Exception as error:  # a template is code: whatever it raises, it cannot render these messages
            # The error's own text may quote a content, which belongs in no log.
            raise InvalidRequestError(
                f"This model's chat template cannot render these messages ({type(error).__name__})."
            ) from None


class _TemplateRefusalError(jinja2.TemplateError):
    """What a template raises on purpose, by calling `raise_exception`."""


class _GenerationTag(Extension):
    """Accept `{% generation %}`, by which templates mark the assistant's words for training, and pass its body on."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Configure Jinja as transformers 5.23 does (utils/chat_template_utils.py), less `strftime_now`.

    A prompt that changed with the day would make equal requests unequal.
    """
    environment = ImmutableSandboxedEnvironment(  # prompts are no HTML: nothing may be escaped
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Print JSON without Jinja's HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)


def _sentinel(name: str) -> str:
    """Move ASCII into a private-use area of Unicode, where no template looks for words, quotes or brackets."""
    return name.translate(_SENTINEL_OF_ASCII)


def _hide(content: str, sentinel: str) -> str:
    """Put the sentinel in place of a content, but leave the blanks around it, so that a template may trim them."""
    core = content.strip()
    return content.replace(core, sentinel, 1) if core else content


def _cut(rendered: str, opening: str, numbers: Mapping[str, int]) -> list[str | int]:
    """Cut what was rendered into the template's own texts and, between them, the indices of the contents.

    A sentinel that the template has broken stays in the text, and its index is missing. Without a pattern: each
    conversation would need one of its own, and to compile it costs as much as all the rest.
    """
    first, *others = rendered.split(opening)
    pieces: list[str | int] = [first]
    for other in others:
        number, closing, text = other.partition(_CLOSING)
        if closing and number in numbers:
            pieces += [numbers[number], text]
        else:
            pieces.append(opening + other)
    return pieces


def _check_each_once(messages: Sequence[ChatMessage], found: list[int]) -> None:
    times = collections.Counter(found)
    for index, message in enumerate(messages):
        expected = 1 if message.content.strip() else 0
        if times[index] != expected:
            verb = "leaves out or alters" if times[index] < expected else "repeats"
            raise InvalidRequestError(
                f"This model's chat template {verb} messages[{index}] (role {message.role}), so it cannot be sent."
            )
