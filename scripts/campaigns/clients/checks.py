"""Run the checks of a client's program and print a JSON line for each: what all programs in Python share.

Runs in each client's own environment, so that it needs the standard library only. Knows the service by three variables,
and asks it for nothing but its rows; what a client's library does is the program's.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import time
import traceback
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

BASE_URL = os.environ["BASE_URL"]
TOKEN = os.environ["TOKEN"]
MODEL = os.environ["MODEL"]

QUESTION = "What is in Austin?"
WRONG_JWT = "no-jwt"
WRONG_JWT_TEXT = "JWT is not three base64url parts"
UNKNOWN_MODEL = "gpt-9"
UNKNOWN_MODEL_TEXT = "The model 'gpt-9' does not exist"
OVERFLOW_TEXT = "maximum context length"
TOO_LONG = "one more word " * 4000
"""A prompt that is longer than any context of the campaign's services."""

LONG_ANSWER_TOKENS = 1500
"""An answer that goes on for seconds, at the mock's rate in the campaign and at the real model's."""

LEAVING_SECONDS = 3.0
"""Within this a row is free again after its client has left; the whole long answer takes longer."""

WEATHER_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Austin", "Paris"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Of a function `get_weather`: bounded, so that any model gets to the end of a call."""

SUNNY = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}
"""A form whose answer any model can end."""

Check = Callable[[], None] | Callable[[], Awaitable[None]]
Raised = TypeVar("Raised", bound=BaseException)


class Fault(Exception):
    """Say what a client got that it should not have got."""


def expect(condition: object, got: object) -> None:
    """Raise Fault with what was got unless the condition holds."""
    if not condition:
        raise Fault(f"got {got!r}")


def expect_raised(kind: type[Raised], call: Callable[[], object], text: str) -> Raised:
    """Return what `call` raises; raise Fault unless it is of a kind and has our text in its own."""
    try:
        answer = call()
    except kind as error:
        expect(text in str(error), f"{kind.__name__}: {error}")
        return error
    except Exception as error:
        raise Fault(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise Fault(f"no {kind.__name__} but {answer!r}")


async def expect_raised_later(kind: type[Raised], waited: Awaitable[object], text: str) -> None:
    """Raise Fault unless awaiting raises an error of a kind that has our text in its own."""
    try:
        answer = await waited
    except kind as error:
        expect(text in str(error), f"{kind.__name__}: {error}")
    except Exception as error:
        raise Fault(f"{type(error).__name__} instead of {kind.__name__}: {error}") from error
    else:
        raise Fault(f"no {kind.__name__} but {answer!r}")


def expect_weather_arguments(arguments: object) -> None:
    """Raise Fault unless a call's arguments keep to WEATHER_PARAMETERS; a text is read as JSON first."""
    given: Any = json.loads(arguments) if isinstance(arguments, str) else arguments
    expect(isinstance(given, dict) and given.keys() == {"city", "days"}, given)
    expect(given["city"] in ("Austin", "Paris") and given["days"] in range(1, 10), given)


def num_rows_in_use() -> int:
    """Return the number of rows in which something is generated now."""
    request = urllib.request.Request(f"{BASE_URL}/rows", headers={"Authorization": f"Bearer {TOKEN}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - the service's own address
        return int(json.load(answer)["num_rows_in_use"])


def expect_row_freed(leave: Callable[[], object]) -> None:
    """Raise Fault unless a row is in use, `leave` is called, and none is soon afterwards."""
    expect(num_rows_in_use() == 1, "no row in use while the stream is open")
    leave()
    expect_rows_free()


def expect_rows_free() -> None:
    """Raise Fault unless no row is in use within LEAVING_SECONDS."""
    began = time.monotonic()
    while num_rows_in_use():
        expect(time.monotonic() - began < LEAVING_SECONDS, "a row still in use after the client has left")
        time.sleep(0.02)


async def expect_rows_free_later() -> None:
    """Do the same while the event loop goes on: what leaves there is a task of the loop."""
    await asyncio.to_thread(expect_rows_free)


def run_checks(checks: Sequence[Check]) -> None:
    """Run the checks whose names the command line does not leave out; print name and fault of each."""
    left_out = sys.argv[1:]
    # One event loop for all: a client may outlive its check, and its connections the loop that they belong to.
    with asyncio.Runner() as runner:
        for check in checks:
            if check.__name__ not in left_out:
                print(json.dumps({"check": check.__name__, "fault": _fault_of(check, runner)}), flush=True)


def _fault_of(check: Check, runner: asyncio.Runner) -> str | None:
    try:
        waited = check()
        if inspect.iscoroutine(waited):
            runner.run(waited)
    except Fault as fault:
        return str(fault)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in where if "campaigns" in frame.filename and frame.filename != __file__]
        line = ours[-1].lineno if ours else None
        return f"{type(error).__name__}: {error} (line {line})"
    return None
