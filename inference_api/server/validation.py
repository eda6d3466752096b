"""Parse the native routes' JSON bodies into a `NativeRequest`, or say what is wrong with them.

Runs in a gunicorn worker. One table, `NATIVE_FIELDS`, holds every name, type, default and bound; the OpenAPI document
is generated from it. Error texts are those that callers of the original service know, and so is the order of checks:
is JSON, type of `text`, types of the parameters, empty `text`, bounds, `session_id`; checks that the original lacked
come after them. Pure: knows no Flask, no tokenizer, no model; every fault is an InvalidRequestError.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

from inference_api.errors import InvalidRequestError, PromptTooLongError

DEFAULT_STOP_TEXT = "<|endoftext|>"
"""The original's documented default of `stop_sequence`; means the model's own end, whatever the model calls it."""

MAX_SEED = 2**63 - 1
MAX_SESSION_ID_CHARS = 128

# What Python's float() and int() take, less their underscores, padding, digits of other scripts, nan and inf.
_NUMBER_TEXT = re.compile(r"[+-]?([0-9]{1,40}(\.[0-9]{0,40})?|\.[0-9]{1,40})([eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER_TEXT = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)
# RFC 9110 section 5.5: visible ASCII, blanks only inside; the label goes back in a response header.
_HEADER_SAFE = re.compile(r"([!-~]([ -~]*[!-~])?)?", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOOLEAN_TEXTS = {"true": True, "false": False}
_MAX_SHOWN_CHARS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One JSON member: its Python type, its default (None: absent has its own meaning) and its inclusive bounds."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    default: float | bool | None
    summary: str
    bounds: tuple[float, float] | None = None


TEXT = Field("text", str, None, "The prompt; required and not empty.")
RAG_CONTEXT = Field("rag_context", str, None, "Material to answer from, put before the text; chat and predictions.")
SESSION_ID = Field("session_id", str, None, "The caller's own label, echoed in X-Client-Session-Id; routes nothing.")
NATIVE_FIELDS = (
    TEXT,
    Field("temperature", float, 1.0, "Flattens (above 1) or sharpens the distribution, before top_k.", (0.01, 100.0)),
    Field("top_p", float, 0.9, "Keeps the most likely tokens whose probabilities add up to this.", (0.01, 1.0)),
    Field("top_k", int, 40, "Keeps this many most likely tokens; 1 is greedy.", (1, 1000)),
    Field("max_tokens", int, 128, "Ends the answer after this many tokens.", (1, 2048)),
    Field("stop_sequence", str, None, "Ends the answer before this text; by default only the model's own end does."),
    Field("return_prompt", bool, False, "Puts the prompt before the answer."),
    Field("seed", int, None, "Makes the draws repeatable; drawn by the server when absent.", (0, MAX_SEED)),
    RAG_CONTEXT,
    SESSION_ID,
)
"""Every member of a native body, in the order in which they are checked."""


@dataclasses.dataclass(frozen=True, slots=True)
class NativeLimits:
    """What the loaded model and the settings allow, beyond the table's bounds."""

    context_tokens: int = 2048
    eos_text: str | None = None
    max_stop_chars: int = 64

    def fit_max_tokens(self, max_tokens: int, num_prompt_tokens: int) -> int:
        """Clamp `max_tokens` to the room that the prompt leaves in the context; at least 1.

        A prompt that fills the context still gets one token, which needs no slot of its own. Raises
        PromptTooLongError, naming both numbers, for a longer one: nothing is ever cropped.
        """
        if num_prompt_tokens > self.context_tokens:
            raise PromptTooLongError(
                f"The prompt is {num_prompt_tokens} tokens long and the context is {self.context_tokens}."
                " Shorten the prompt."
            )
        return min(max_tokens, max(1, self.context_tokens - num_prompt_tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class NativeRequest:
    """A native body that passed every check. `stop_sequence` None: only the model's own end stops the answer."""

    text: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_sequence: str | None
    return_prompt: bool
    seed: int | None
    session_id: str | None
    rag_context: str | None


def parse_native(
    body: bytes, content_type: str | None, limits: NativeLimits, *, allow_rag_context: bool = False
) -> NativeRequest:
    """Parse the body of a native route; raises InvalidRequestError for the first fault and nothing else.

    Absent members take their defaults; null is no value and is refused. `rag_context` is known to some routes only.
    """
    given = _parse_object(body, content_type)
    fields = [field for field in NATIVE_FIELDS if allow_rag_context or field is not RAG_CONTEXT]
    values = {field.name: _convert(field, given) for field in fields if field is not SESSION_ID}
    if not values["text"]:
        raise InvalidRequestError("required 'text' parameter is either empty or not provided")
    for field in fields:
        _check_bounds(field, values.get(field.name))
    values["session_id"] = _convert(SESSION_ID, given)
    _check_session_id(values["session_id"])
    for name, value in values.items():
        refuse_lone_surrogates(name, value)
    values["stop_sequence"] = _resolve_stop(values["stop_sequence"], limits)
    _refuse_unknown(given, fields)
    values.setdefault("rag_context", None)
    return NativeRequest(**values)


def refuse_lone_surrogates(name: str, value: object) -> None:
    r"""Raise InvalidRequestError for text that JSON can spell (`"\ud800"`) but Unicode cannot encode."""
    if isinstance(value, str) and (found := _SURROGATE.search(value)):
        raise InvalidRequestError(
            f"Parameter: {name} has half a surrogate pair (U+{ord(found.group()):04X}) at character {found.start()}."
            " Send both halves, or the character itself as UTF-8."
        )


def _parse_object(body: bytes, content_type: str | None) -> dict[str, object]:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    # RFC 6839 section 3.1: the suffix +json marks JSON too.
    if media_type != "application/json" and not re.fullmatch(r"application/[^\s/]+\+json", media_type):
        raise InvalidRequestError("Request was not JSON")
    try:
        # RFC 8259 section 8.1: UTF-8 without a byte order mark; json.loads would guess other encodings from bytes.
        # NaN and Infinity are no JSON, but a field's bounds name them better than "malformed" does.
        given = json.loads(body.decode("utf-8"), object_pairs_hook=_refuse_duplicates, parse_constant=float)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise InvalidRequestError("Malformed JSON request body.")
    return given


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object; of two members with one name (RFC 8259 section 4) nobody knows which one is meant."""
    members: dict[str, object] = {}
    for name, value in pairs:
        if name in members:
            raise InvalidRequestError(f"Parameter: {_shown(name)} is given more than once. Send it once.")
        members[name] = value
    return members


def _convert(field: Field, given: dict[str, object]) -> Any:
    """Return the field's default, or its value as `field.kind`; raises InvalidRequestError for another type."""
    if field.name not in given:
        return field.default
    value = given[field.name]
    converted = _CONVERTERS[field.kind](value)
    if converted is None:
        raise InvalidRequestError(f"Parameter: {field.name} is type={type(value)}, expected {field.kind}")
    return converted


def _to_str(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _to_bool(value: object) -> bool | None:
    if isinstance(value, str):
        return _BOOLEAN_TEXTS.get(value)
    return value if isinstance(value, bool) else None


def _to_int(value: object) -> int | None:
    """Convert an integer, its text, or a number without a fraction: JSON has one number type, so 40.0 is 40."""
    if isinstance(value, str):
        return int(value) if _INTEGER_TEXT.fullmatch(value) else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _to_float(value: object) -> float | None:
    """Convert a number or its text; an integer too large for a float becomes infinite, for its bounds to refuse."""
    if isinstance(value, str):
        return float(value) if _NUMBER_TEXT.fullmatch(value) else None
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return value if isinstance(value, float) else None


_CONVERTERS: dict[type, Callable[[object], object]] = {str: _to_str, bool: _to_bool, int: _to_int, float: _to_float}


def _check_bounds(field: Field, value: Any) -> None:
    if field.bounds is None or value is None:
        return
    low, high = field.bounds
    if not low <= value <= high:
        raise InvalidRequestError(
            f"Parameter: {field.name}={_shown(value)} is outside bounds, {low} <= {field.name} <= {high}."
        )


def _check_session_id(label: str | None) -> None:
    if label is None:
        return
    if len(label) > MAX_SESSION_ID_CHARS:
        raise InvalidRequestError(
            f"Parameter: session_id is {len(label)} characters long, at most {MAX_SESSION_ID_CHARS} are allowed."
        )
    if not _HEADER_SAFE.fullmatch(label):
        raise InvalidRequestError(
            "Parameter: session_id may hold printable ASCII only, without a blank at either end: it goes into a header."
        )


def _resolve_stop(stop: str | None, limits: NativeLimits) -> str | None:
    if stop in (None, "", DEFAULT_STOP_TEXT, limits.eos_text):
        return None
    if len(stop) > limits.max_stop_chars:
        raise InvalidRequestError(
            f"Parameter: stop_sequence is {len(stop)} characters long, at most {limits.max_stop_chars} are allowed."
        )
    return stop


def _refuse_unknown(given: dict[str, object], fields: list[Field]) -> None:
    allowed = [field.name for field in fields]
    for name in given:
        if name not in allowed:
            raise InvalidRequestError(f"Parameter: {_shown(name)} is unknown, expected only {', '.join(allowed)}.")


def _shown(value: object) -> str:
    """Print a value that a caller sent, as short plain ASCII: it goes into an error text."""
    text = ascii(value)[1:-1] if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."
