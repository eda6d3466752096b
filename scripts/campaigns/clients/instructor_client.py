"""Check Instructor over OpenAI's client: objects by calls, by schemas and by JSON in the text, whole and in parts."""

from __future__ import annotations

import logging
from typing import Any

import instructor  # type: ignore[import-not-found]
import openai
import pydantic
from instructor.core.exceptions import InstructorRetryException  # type: ignore[import-not-found]

from campaigns.clients import checks
from campaigns.clients.checks import MODEL, expect, expect_raised

HELLO = [{"role": "user", "content": checks.QUESTION}]


class Weather(pydantic.BaseModel):
    """An object that any model can make."""

    model_config = pydantic.ConfigDict(extra="forbid")
    sunny: bool
    days: int = pydantic.Field(ge=1, le=9)


def asking(mode: Any, jwt: str = checks.TOKEN) -> Any:
    """Return OpenAI's client with Instructor around it; nothing is sent twice."""
    return instructor.from_openai(
        openai.OpenAI(base_url=f"{checks.BASE_URL}/v1", api_key=jwt, max_retries=0), mode=mode
    )


def make(mode: Any, **members: Any) -> Any:
    """Return a Weather of the service's."""
    settings = {"model": MODEL, "messages": HELLO, "response_model": Weather, "max_tokens": 100, "max_retries": 0}
    return asking(mode).create(**{**settings, **members})


def objects_by_calls() -> None:
    """Make an object by a forced call."""
    expect(isinstance(make(instructor.Mode.TOOLS), Weather), "no object")


def objects_by_schemas() -> None:
    """Make an object by a schema."""
    expect(isinstance(make(instructor.Mode.JSON_SCHEMA), Weather), "no object")


def raw_answer() -> None:
    """Make an object, and read the usage of the answer that it was made of."""
    client = asking(instructor.Mode.TOOLS)
    made, answer = client.create_with_completion(
        model=MODEL, messages=HELLO, response_model=Weather, max_tokens=100, max_retries=0
    )
    expect(isinstance(made, Weather) and answer.usage.completion_tokens > 0, answer)


def streamed_parts() -> None:
    """Make an object from a stream, part by part."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = asking(mode)
        parts = list(client.create_partial(model=MODEL, messages=HELLO, response_model=Weather, max_tokens=100))
        expect(parts and parts[-1].sunny in (True, False) and parts[-1].days in range(1, 10), (mode, parts[-1:]))


def text() -> None:
    """Ask for a text: without a model of an object it is OpenAI's own answer."""
    answer = make(instructor.Mode.TOOLS, response_model=None, max_tokens=8, temperature=0)
    expect(answer.choices[0].message.content, answer)


def wrong_jwt() -> None:
    """Show a wrong JWT."""
    stranger = asking(instructor.Mode.TOOLS, checks.WRONG_JWT)
    expect_failed(
        openai.AuthenticationError,
        lambda: stranger.create(model=MODEL, messages=HELLO, response_model=Weather, max_retries=0),
        checks.WRONG_JWT_TEXT,
    )


def unknown_model() -> None:
    """Name a model that is not served."""
    unknown = checks.UNKNOWN_MODEL
    expect_failed(openai.NotFoundError, lambda: make(instructor.Mode.TOOLS, model=unknown), checks.UNKNOWN_MODEL_TEXT)


def context_overflow() -> None:
    """Send a prompt that is too long."""
    long = [{"role": "user", "content": checks.TOO_LONG}]
    expect_failed(openai.BadRequestError, lambda: make(instructor.Mode.TOOLS, messages=long), checks.OVERFLOW_TEXT)


def bad_parameter() -> None:
    """Send a value that is out of bounds."""
    expect_failed(openai.BadRequestError, lambda: make(instructor.Mode.TOOLS, temperature=3.5), "temperature")


def cancel() -> None:
    """Leave a stream of text after its first chunk: of objects, Instructor hands out a list only when all is there."""
    stream = make(
        instructor.Mode.TOOLS,
        response_model=None,
        stream=True,
        max_tokens=checks.LONG_ANSWER_TOKENS,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    checks.expect_row_freed(stream.close)


def expect_failed(kind: type[Exception], call: Any, text: str) -> None:
    """Raise Fault unless Instructor gives up because of an error of a kind, with our text."""
    error = expect_raised(InstructorRetryException, call, text)
    causes = [error, error.__cause__, *(attempt.exception for attempt in getattr(error, "failed_attempts", None) or [])]
    expect(any(isinstance(cause, kind) for cause in causes), [type(cause).__name__ for cause in causes])


if __name__ == "__main__":
    # It logs each error that is expected here.
    logging.disable(logging.ERROR)
    checks.run_checks(
        [
            objects_by_calls,
            objects_by_schemas,
            raw_answer,
            streamed_parts,
            text,
            wrong_jwt,
            unknown_model,
            context_overflow,
            bad_parameter,
            cancel,
        ]
    )
