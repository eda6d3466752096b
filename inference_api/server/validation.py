"""Parse the native routes' JSON bodies into a `NativeRequest`, or say what is wrong with them.

Runs in a gunicorn worker. One table, `NATIVE_FIELDS`, holds every name, type, default and bound; the OpenAPI document
is generated from it. Error texts are those that callers of the original service know, and so is the order of checks:
is JSON, type of `text`, types of the parameters, empty `text`, bounds, `session_id`; checks that the original lacked
come after them. Pure: knows no Flask, no tokenizer, no model; every fault is an InvalidRequestError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from inference_api.errors import InvalidRequestError, PromptTooLongError
from inference_api.sampling_params import SamplingParams
from inference_api.server.body_fields import Field, check_bounds, convert, shown
from inference_api.server.ids_left import count_ids_left
from inference_api.server.json_body import DuplicateMemberError, parse_json
from inference_api.server.sampler_rules import MAX_BREAKER_CHARS, MAX_BREAKERS, breakers_as_bytes, find_conflict

DEFAULT_STOP_TEXT = "<|endoftext|>"
"""The original's documented default of `stop_sequence`; means the model's own end, whatever the model calls it."""

MAX_SEED = 2**63 - 1
MAX_SESSION_ID_CHARS = 128

# As vLLM 0.32 has them, vllm/v1/worker/gpu/sample/logit_bias.py: so many cost a step next to nothing.
MAX_LISTED_IDS = 1024
MAX_STOP_IDS = 128
MAX_CONTEXT = 2**20
"""Of what counts back from the end of a text: as many tokens as a context may have."""

# RFC 9110 section 5.5: visible ASCII, blanks only inside; the label goes back in a response header.
_HEADER_SAFE = re.compile(r"([!-~]([ -~]*[!-~])?)?", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")


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
    Field("min_p", float, 0.0, "Keeps tokens at least this share as likely as the likeliest, after top_p.", (0.0, 1.0)),
    Field("typical_p", float, 1.0, "Keeps the least surprising tokens that add up to this, after min_p.", (0.01, 1.0)),
    Field("repetition_penalty", float, 1.0, "Makes tokens of prompt and answer less likely (above 1).", (0.01, 100.0)),
    Field("presence_penalty", float, 0.0, "Taken from the logits of tokens that the answer holds.", (-2.0, 2.0)),
    Field("frequency_penalty", float, 0.0, "Taken as often as the answer holds the token.", (-2.0, 2.0)),
    Field("logit_bias", dict, None, "Added to the logits of token ids.", (-100.0, 100.0), MAX_LISTED_IDS),
    Field("allowed_token_ids", list, None, "The only tokens that may be drawn.", max_entries=MAX_LISTED_IDS),
    Field("banned_token_ids", list, None, "Tokens that are never drawn.", max_entries=MAX_LISTED_IDS),
    Field(
        "stop_token_ids", list, None, "Tokens that end the answer, beside the model's end.", max_entries=MAX_STOP_IDS
    ),
    Field("min_tokens", int, 0, "So many tokens come before an end, at most max_tokens.", (0, 2048)),
    Field("ignore_eos", bool, False, "Goes on over the model's own end."),
    Field("dry_multiplier", float, 0.0, "Loss of tokens that go on with a repetition.", (0.0, 100.0)),
    Field("dry_base", float, 1.75, "Multiplies it for each further token.", (1.0, 100.0)),
    Field("dry_allowed_length", int, 2, "So many tokens may be repeated.", (1, MAX_CONTEXT)),
    Field("dry_penalty_last_n", int, -1, "Looks at so many last tokens; -1: all.", (-1, MAX_CONTEXT)),
    Field(
        "dry_sequence_breakers",
        list,
        None,
        "Texts over which no repetition goes on.",
        (1, MAX_BREAKER_CHARS),
        MAX_BREAKERS,
        entry=str,
    ),
    Field("top_n_sigma", float, 0.0, "Keeps logits so many standard deviations below the highest.", (-1.0, 100.0)),
    Field("xtc_probability", float, 0.0, "How often the likeliest tokens are taken out, after typical_p.", (0.0, 1.0)),
    Field("xtc_threshold", float, 0.1, "Those of this share, but for the least likely of them.", (0.0, 1.0)),
    Field("mirostat", int, 0, "Keeps the surprise near mirostat_tau: version 1 or 2, in place of top_k.", (0, 2)),
    Field("mirostat_tau", float, 5.0, "That surprise in bits.", (0.0, 100.0)),
    Field("mirostat_eta", float, 0.1, "How fast it is held.", (0.0, 1.0)),
    RAG_CONTEXT,
    SESSION_ID,
)
"""Every member of a native body, in the order in which they are checked."""

_UNLIMITED = {"top_k": 0, "top_p": 1.0}
"""What these are beside mirostat where a body names none: their defaults would be in its way."""

_SAMPLING_OPTIONS = {
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_ids",
    "banned_token_ids": "banned_ids",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
"""Members that a body may leave out, and what SamplingParams calls them."""


@dataclasses.dataclass(frozen=True, slots=True)
class NativeLimits:
    """What the loaded model and the settings allow, beyond the table's bounds."""

    context_tokens: int = 2048
    eos_text: str | None = None
    max_stop_chars: int = 64
    vocab_size: int = 2**31
    stop_ids: frozenset[int] = frozenset()
    """The model's own ends."""

    def fit_max_tokens(self, max_tokens: int, num_prompt_tokens: int, min_tokens: int = 0) -> int:
        """Clamp `max_tokens` to the room that the prompt leaves in the context; at least 1.

        A prompt that fills the context still gets one token, which needs no slot of its own. Raises
        PromptTooLongError, naming both numbers, for a longer one: nothing is ever cropped; and InvalidRequestError if
        the room is less than `min_tokens`.
        """
        if num_prompt_tokens > self.context_tokens:
            raise PromptTooLongError(
                f"The prompt is {num_prompt_tokens} tokens long and the context is {self.context_tokens}."
                " Shorten the prompt."
            )
        room = max(1, self.context_tokens - num_prompt_tokens)
        if min_tokens > room:
            raise InvalidRequestError(
                f"Parameter: min_tokens={min_tokens} is outside bounds, 0 <= min_tokens <= {room}: the prompt is"
                f" {num_prompt_tokens} tokens long and the context is {self.context_tokens}."
            )
        return min(max_tokens, room)


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
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    banned_token_ids: list[int] | None
    stop_token_ids: list[int] | None
    min_tokens: int
    ignore_eos: bool
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: list[str] | None
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    session_id: str | None
    rag_context: str | None

    def sampling(self, seed: int) -> SamplingParams:
        """Return how to draw; an option that is off is left to its default, which does not cross."""
        options: dict[str, Any] = {}
        for field in NATIVE_FIELDS:
            value = getattr(self, field.name)
            if field.name in _SAMPLING_OPTIONS and value != field.default and value not in ([], {}):
                options[_SAMPLING_OPTIONS[field.name]] = distinct(value) if isinstance(value, list) else value
        if self.dry_multiplier:
            options["dry_sequence_breakers"] = breakers_as_bytes(self.dry_sequence_breakers)
        if self.top_n_sigma > 0:
            options["top_n_sigma"] = self.top_n_sigma
        return SamplingParams(self.temperature, self.top_k, self.top_p, seed, **options)


def distinct(token_ids: Collection[int] | None) -> tuple[int, ...]:
    """Return each of the ids once, in their order; nothing for None."""
    return tuple(dict.fromkeys(token_ids or ()))


def parse_native(
    body: bytes, content_type: str | None, limits: NativeLimits, *, allow_rag_context: bool = False
) -> NativeRequest:
    """Parse the body of a native route; raises InvalidRequestError for the first fault and nothing else.

    Absent members take their defaults; null is no value and is refused. `rag_context` is known to some routes only.
    """
    given = _parse_object(body, content_type)
    fields = [field for field in NATIVE_FIELDS if allow_rag_context or field is not RAG_CONTEXT]
    values = {field.name: convert(field, given) for field in fields if field is not SESSION_ID}
    if not values["text"]:
        raise InvalidRequestError("required 'text' parameter is either empty or not provided")
    for field in fields:
        check_bounds(field, values.get(field.name), limits.vocab_size)
    values["session_id"] = convert(SESSION_ID, given)
    _check_session_id(values["session_id"])
    for name, value in values.items():
        refuse_lone_surrogates(name, value)
    if values["mirostat"]:
        values |= {name: off for name, off in _UNLIMITED.items() if name not in given}
    values["stop_sequence"] = _resolve_stop(values["stop_sequence"], limits)
    _refuse_unknown(given, fields)
    values.setdefault("rag_context", None)
    native = NativeRequest(**values)
    _check_ids_left(native, limits)
    conflict = find_conflict(native.sampling(0))
    if conflict is not None:
        raise InvalidRequestError(f"Parameter: {conflict.name} {conflict.reason}")
    return native


def refuse_lone_surrogates(name: str, value: object) -> None:
    r"""Raise InvalidRequestError for text that JSON can spell (`"\ud800"`) but Unicode cannot encode."""
    if isinstance(value, list):
        for place, entry in enumerate(value):
            refuse_lone_surrogates(f"{name}[{place}]", entry)
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
        given = parse_json(body)
    except DuplicateMemberError as error:
        raise InvalidRequestError(f"Parameter: {shown(error.name)} is given more than once. Send it once.") from None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InvalidRequestError("Malformed JSON request body.")
    return given


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


def _check_ids_left(native: NativeRequest, limits: NativeLimits) -> None:
    """Raise InvalidRequestError if the parameters together leave no id to draw, or no room for min_tokens."""
    if native.min_tokens > native.max_tokens:
        raise InvalidRequestError(
            f"Parameter: min_tokens={native.min_tokens} is outside bounds, 0 <= min_tokens <= max_tokens="
            f"{native.max_tokens}."
        )
    if native.allowed_token_ids == []:
        raise InvalidRequestError("Parameter: allowed_token_ids has 0 entries, at least 1 is needed.")
    ends = set(native.stop_token_ids or ()) | (set() if native.ignore_eos else limits.stop_ids)
    left = count_ids_left(
        limits.vocab_size,
        allowed=native.allowed_token_ids,
        banned=native.banned_token_ids,
        ends=ends if native.min_tokens else None,
    )
    if not left.num_drawable:
        raise InvalidRequestError(
            f"Parameter: banned_token_ids holds all {left.num_allowed} ids that may be drawn,"
            f" at most {left.num_allowed - 1} are allowed."
        )
    if not left.num_going_on:
        raise InvalidRequestError(
            f"Parameter: min_tokens={native.min_tokens} is outside bounds, 0 <= min_tokens <= 0:"
            f" all {left.num_drawable} ids that may be drawn end the answer."
        )


def _refuse_unknown(given: dict[str, object], fields: list[Field]) -> None:
    allowed = [field.name for field in fields]
    for name in given:
        if name not in allowed:
            raise InvalidRequestError(f"Parameter: {shown(name)} is unknown, expected only {', '.join(allowed)}.")
