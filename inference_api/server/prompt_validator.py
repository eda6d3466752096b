"""Hold the prompts of some tenants to a plain character set and a length, on every route that takes a prompt.

Runs in PROCESS 1, on a call's body before any route reads it: the one place where the texts of all APIs are. The mode
is the tenant's, as the proxy's assertion says it, or the setting's. What could bring a text past the rule, token ids,
the tools of a conversation and the form of an answer, is refused by its name. Knows no tokenizer and no wording of an
API's errors.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Mapping
from typing import Any

from flask import Flask, g, request

from inference_api.config import Settings
from inference_api.errors import InvalidRequestError, SettingError
from inference_api.server.body_fields import shown
from inference_api.server.json_body import parse_json

CLAIM = "prompt_validator"
MODES = ("off", "reject", "strip")

_CHARACTERS = "INFERENCE_API_PROMPT_CHARACTERS"
_MESSAGES = ("system", "messages")
PROMPT_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "native.inference": ("text",),
    "native.predictions": ("text", "rag_context"),
    "native.chat": ("text", "rag_context"),
    "openai.chat": _MESSAGES,
    "openai.completions": ("prompt",),
    "openai_responses.create": ("instructions", "input"),
    "openai_responses.cancel": (),
    "anthropic.messages": _MESSAGES,
    "anthropic.count_tokens": _MESSAGES,
    "tgi.generate": ("inputs",),
    "tgi.generate_stream": ("inputs",),
    "root.answer": ("inputs",),
    "embeddings.embed": ("input",),
    "tokenization.tokenize": ("prompt", "content", "inputs", *_MESSAGES),
    "tokenization.detokenize": (),
    "tokenization.apply_template": _MESSAGES,
}
"""Members that hold what a caller says, of every endpoint that takes a body. No entry, no start."""

_TEXT_MEMBERS = frozenset({"content", "text"})
# Of messages and their parts: what the model is not told.
_SILENT_MEMBERS = frozenset(
    {
        "annotations",
        "audio",
        "cache_control",
        "citations",
        "id",
        "logprobs",
        "name",
        "phase",
        "provider_specific_fields",
        "refusal",
        "role",
        "status",
        "type",
    }
)
_REFUSED_MEMBERS = (
    # Their names and descriptions are told to the model in front of the conversation.
    "tools",
    # A form's texts stand in the answer: a choice, a pattern or a schema can leave the model nothing else to say.
    "guided_choice",
    "guided_regex",
    "guided_json",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "grammar",
    "parameters.grammar",
    # Of a few ids, each with its own weight, a caller spells the answer token by token.
    "allowed_token_ids",
    "logit_bias",
)
# Forms, too, but for those of a type alone that brings no text.
_FORMATS = ("response_format", "text.format")
_TEXTLESS_TYPES = ("text", "json_object")
# Parts of messages of a list are five deep. Far more is no conversation, and would end in Python's own limit.
_MAX_DEPTH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRule:
    """Say what a text may be: characters, as they stand in a class of a regular expression, and how many."""

    characters: str
    min_characters: int
    max_characters: int

    def __post_init__(self) -> None:
        """Raise SettingError for a character set that is none."""
        # What means more than itself in a class is left out, and what may one day (the warnings of Python's re).
        is_plain = re.search(r"[\[\]\\^]|&&|\|\||~~|--", self.characters) is None
        try:
            if not self.characters or not is_plain:
                raise re.error("more than characters and ranges")
            re.compile(f"[{self.characters}]")
        except re.error:
            raise SettingError(
                f"{_CHARACTERS}={self.characters!r} must be characters and ranges such as a-z, without [ ] \\ and ^."
            ) from None
        if self.min_characters > self.max_characters:
            raise SettingError("INFERENCE_API_PROMPT_MIN_CHARACTERS is above INFERENCE_API_PROMPT_MAX_CHARACTERS.")

    @classmethod
    def of(cls, settings: Settings) -> PromptRule:
        """Return the rule of the settings; raises SettingError."""
        return cls(settings.prompt_characters, settings.prompt_min_characters, settings.prompt_max_characters)

    def applied(self, field: str, text: str, mode: str) -> str:
        """Return the text as it may go on; raises InvalidRequestError that names the field and the rule."""
        if mode == "strip":
            text = re.sub(f"[^{self.characters}]", "", text)
        fits = self.min_characters <= len(text) <= self.max_characters
        if not fits or re.fullmatch(f"[{self.characters}]*", text) is None:
            raise InvalidRequestError(
                f"Invalid prompt: {field} must be {self.min_characters} to {self.max_characters} characters of"
                f" [{self.characters}].",
                field,
            )
        return text


class PromptValidator:
    """Look at the body of each call before its route does."""

    def __init__(self, settings: Settings) -> None:
        """Take the rule and the mode of tenants of whom nothing is said; raises SettingError for a wrong rule."""
        self._rule = PromptRule.of(settings)
        self._default_mode = settings.prompt_validator

    def check(self) -> None:
        """Refuse this thread's call, or put what is left of its texts in their places, as its tenant's mode says."""
        if request.method != "POST" or g.get("call") is None or request.endpoint is None:
            return
        mode = str(g.call.claims.quotas.get(CLAIM, self._default_mode))
        members = PROMPT_MEMBERS[request.endpoint]
        if mode == "off" or not members:
            return
        raw = request.get_data(cache=False)
        if request.endpoint == "root.answer" and request.mimetype != "application/json":
            raw = self._rule.applied("The body", raw.decode("utf-8", "replace"), mode).encode()
        else:
            raw = self.checked(raw, members, mode)
        request.stream = io.BytesIO(raw)

    def checked(self, raw: bytes, members: tuple[str, ...], mode: str) -> bytes:
        """Return a JSON body whose prompts keep to the rule; raises InvalidRequestError."""
        try:
            given = parse_json(raw)
        except ValueError:
            raise InvalidRequestError("Invalid prompt: the body is not valid JSON without doubled members.") from None
        if not isinstance(given, dict):
            return raw
        _refuse_other_texts(given)
        for name in members:
            if given.get(name) is not None:
                given[name] = self._walk(name, given[name], mode)
        if mode != "strip":
            return raw
        try:
            return json.dumps(given).encode()
        except RecursionError:
            raise InvalidRequestError("Invalid prompt: the body is nested too deep.") from None

    def _walk(self, field: str, value: Any, mode: str, depth: int = 0) -> Any:
        """Return a prompt, a message or a part, its texts as they may go on."""
        if isinstance(value, str):
            return self._rule.applied(field, value, mode)
        if depth == _MAX_DEPTH:
            raise _refused(field)
        if isinstance(value, list):
            return [self._walk(f"{field}[{index}]", entry, mode, depth + 1) for index, entry in enumerate(value)]
        if not isinstance(value, dict):
            raise _refused(field)
        checked = dict(value)
        for name, member in value.items():
            if name in _TEXT_MEMBERS and member is not None:
                checked[name] = self._walk(f"{field}.{name}", member, mode, depth + 1)
            elif name not in _SILENT_MEMBERS and member is not None:
                raise _refused(f"{field}.{shown(name)}")
        return checked


def refuse_unlisted_prompts(app: Flask) -> None:
    """Raise SettingError if an endpoint of the application takes a body and is not in PROMPT_MEMBERS."""
    unlisted = {
        rule.endpoint
        for rule in app.url_map.iter_rules()
        if "POST" in (rule.methods or ()) and rule.endpoint not in PROMPT_MEMBERS
    }
    if unlisted:
        raise SettingError(f"endpoints of which it is not said where their prompts are: {', '.join(sorted(unlisted))}")


def _refuse_other_texts(given: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for a member beside the prompts that could bring a text in."""
    for path in _REFUSED_MEMBERS:
        if _member(given, path):
            raise _refused(path)
    for path in _FORMATS:
        format_ = _member(given, path)
        if format_ and not _is_textless(format_):
            raise _refused(path)


def _is_textless(format_: Any) -> bool:
    if not isinstance(format_, dict) or format_.get("type") not in _TEXTLESS_TYPES:
        return False
    return not any(value for name, value in format_.items() if name != "type")


def _member(given: Any, path: str) -> Any:
    """Return the member at a dotted path; None if it, or one on the way to it, is not there."""
    for name in path.split("."):
        given = given.get(name) if isinstance(given, dict) else None
    return given


def _refused(field: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Invalid prompt: {field} is not taken here; this tenant's prompts are held to plain text.", field
    )
