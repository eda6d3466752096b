"""Own what the JSON bodies of all modern surfaces share: the strict base, bounds that agree, and how faults are told.

Runs in PROCESS 1. A surface declares its members as a pydantic model and parses with `parse_body`; every fault becomes
an InvalidRequestError that names the member's path, its value and what is allowed. Pure: knows no Flask, no tokenizer
and no surface.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from inference_api.errors import InvalidRequestError
from inference_api.server.json_body import DuplicateMemberError, parse_json
from inference_api.server.validation import refuse_lone_surrogates

MAX_STOPS = 16
MAX_STOP_CHARS = 64
MAX_TOP_LOGPROBS = 20
"""OpenAI's bound, API reference of chat completions, `top_logprobs`."""

MAX_COUNT = 2**31 - 1
"""Of any number of tokens: far above every context, and short enough to be told."""

# OpenAI's bounds, API reference of responses and chat completions, `metadata`.
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

_MAX_SHOWN_CHARS = 64

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""As many as fit into a body: its first fault is enough, all of them would take hundreds of bytes of memory each."""
FormText = Annotated[str, Field(min_length=1)]
"""What says which form an answer has: a JSON schema as text, a regular expression, a grammar."""
Schema = dict[str, Any]
EXAMPLE_CONVERSATION = [[{"role": "user", "content": "Hello"}]]
"""For the description of a body, of which no valid one can be guessed."""
FormName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARS)],
    ],
    Field(max_length=MAX_METADATA),
]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Priority = Annotated[int, Field(ge=-100, le=100)]
PRIORITY_WORDS = "Orders the caller's own waiting requests, lowest first; default 0."
Deadline = Annotated[float, Field(ge=0.1)]
DEADLINE_WORDS = "Seconds after which the request fails, at most those of `INFERENCE_API_TOTAL_SECONDS`."
Body = TypeVar("Body", bound="StrictModel")


class StrictModel(BaseModel):
    """Base of every body: nothing unknown, nothing converted."""

    # Built at their first use, which pydantic guards by a lock: no start waits for all of them. No string of a body is
    # kept for the next: pydantic would keep 16,384, short prompts among them, whosever they are.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True, cache_strings="none")


def refuse_too_many(given: object, most: int) -> object:
    """Return what is given as one prompt or several; raises PydanticCustomError for more than `most` of them.

    A list of numbers is one prompt. Left to the types, too long a list would be told as a fault of the last type tried.
    """
    if isinstance(given, list) and len(given) > most and isinstance(given[0], str | list):
        text = "List should have at most {most} items, not {found}"
        raise PydanticCustomError("too_many", text, {"most": most, "found": len(given)})
    return given


def parse_body(model: type[Body], body: bytes, content_type: str | None) -> Body:
    """Parse a body; raises InvalidRequestError that names the first member at fault, its value and what is allowed."""
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequestError("The body must be JSON: send Content-Type: application/json.")
    given = _read(body)
    try:
        # The bytes again, not what they were read as: of JSON, pydantic tells the types in JSON's words.
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(_likeliest(error.errors(include_url=False, include_context=False), given), given) from None


def _read(body: bytes) -> object:
    try:
        given = parse_json(body)
    except DuplicateMemberError as error:
        raise InvalidRequestError(f"{_cut(error.name)}: is given more than once; send it once.", error.name) from None
    except ValueError:
        raise InvalidRequestError("The body is not valid JSON.") from None
    if isinstance(given, dict):
        _refuse_lone_surrogates_in([], given)
    return given


def _refusal(fault: ErrorDetails, given: object) -> InvalidRequestError:
    path = _spelled(_place(fault, given))
    if fault["type"] == "json_invalid":  # what json.loads lets through, such as half a surrogate pair in a name
        return InvalidRequestError("The body is not valid JSON.")
    if fault["type"] == "extra_forbidden":
        return InvalidRequestError(f"Unknown parameter: {path}.", path)
    if fault["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: {path}.", path)
    told = fault["msg"].replace(" after validation", "")
    return InvalidRequestError(f"{path or 'The body'}: {told}; it is {_shown(fault['input'])}.", path or None)


def _likeliest(faults: list[ErrorDetails], given: object, begin: int = 0) -> ErrorDetails:
    """Return the first fault; of a member with several types, the first one of the type that fits furthest.

    The locations of all `faults` agree up to `begin`.
    """
    first = faults[0]
    fork = _next_alternative(first, given, begin)
    if fork is None:
        return first
    alternatives: dict[int | str, list[ErrorDetails]] = {}
    for fault in faults:
        if len(fault["loc"]) > fork and fault["loc"][:fork] == first["loc"][:fork]:
            alternatives.setdefault(fault["loc"][fork], []).append(fault)
    found = [_likeliest(alternative, given, fork + 1) for alternative in alternatives.values()]
    return max(found, key=lambda fault: _progress(fault, given))


def _progress(fault: ErrorDetails, given: object) -> tuple[list[int], int, bool]:
    """Rank how far a value fitted a type before it did not: the later and deeper, the more of it did."""
    place = _place(fault, given)
    return [part for part in place if isinstance(part, int)], len(place), not fault["type"].endswith("_type")


def _next_alternative(fault: ErrorDetails, given: object, begin: int) -> int | None:
    """Return where, from `begin` on, a location has pydantic's name of one of several types; None if nowhere."""
    location = fault["loc"]
    for index in range(begin, len(location)):
        if len(_place(fault, given, index)) == len(_place(fault, given, index + 1)):
            return index
    return None


def _place(fault: ErrorDetails, given: object, end: int | None = None) -> list[int | str]:
    """Return the names and indices on the way to a fault, without pydantic's names of alternative types."""
    place: list[int | str] = []
    value: Any = given
    for part in fault["loc"][:end]:
        if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
            value = value[part]
            place.append(part)
        elif isinstance(value, dict) and fault["type"] == "missing" and part == fault["loc"][-1]:
            place.append(part)
    return place


def _spelled(place: list[int | str]) -> str:
    """Spell a place as callers do: `messages[2].content`, `logit_bias[50]`."""
    path = ""
    for part in place:
        if isinstance(part, int) or part.isdecimal():
            path += f"[{_cut(str(part))}]"
        else:
            path += f".{_cut(part)}" if path else _cut(part)
    return path


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return _cut(json.dumps(value, ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _refuse_lone_surrogates_in(place: list[int | str], value: Any) -> None:
    """Raise InvalidRequestError for half a surrogate pair anywhere in a value; `place` is the way to it.

    It is spelled for a fault alone: a few long names would make megabytes of text of each of thousands of entries.
    """
    if isinstance(value, str):
        if not _is_encodable(value):
            refuse_lone_surrogates(_spelled(place), value)
    elif isinstance(value, list | dict):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for name, entry in entries:
            place.append(name)
            _refuse_lone_surrogates_in(place, entry)
            place.pop()


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
