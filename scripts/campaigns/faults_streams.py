"""Open streams that identify themselves, and judge how each one ended, for the parts of the campaign that break things.

The mock echoes: what a stream has to say is its own prompt, letters drawn from the seed, so that a byte of another
stream or of an earlier owner of its row shows, and so does one that is missing. Seven surfaces, each with its own way
to say that an answer is whole, or that it failed. A thread a stream. Knows no fault and starts no service.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import string
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from tests.integration.raw_http import RawStream

ECHO: Mapping[str, Any] = {"INFERENCE_API_MOCK_MODE": "echo"}
MODEL = "mock"
HUNG_SECONDS = 20.0
"""A stream without a byte for so long hangs."""


class Outcome(Enum):
    """How a stream ended, as its client sees it."""

    WHOLE = "whole"
    CUT = "cut"
    REFUSED = "refused"
    HUNG = "hung"


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What a body says: its text, whether the answer is complete, whether it failed."""

    text: str
    ended: bool
    failed: bool


Events = list[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Surface:
    """A way to ask for a stream, and to read it."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    says: Callable[[str], str]
    """What the mock echoes of a prompt."""
    read: Callable[[Events], Told] | None
    """None: the body is the text itself, and its last chunk says that it is whole."""


def _read_chat(events: Events) -> Told:
    names = [name for name, _ in events]
    messages = [data["message"] for name, data in events if name == "answer"]
    return Told(messages[-1] if messages else "", "close" in names, "error" in names)


def _read_openai(events: Events) -> Told:
    bodies = [data for _, data in events if isinstance(data, dict)]
    parts = [choice for data in bodies for choice in data.get("choices", ())]
    text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
    return Told(text, any(data == "[DONE]" for _, data in events), any("error" in data for data in bodies))


def _read_tgi(events: Events) -> Told:
    bodies = [data for _, data in events]
    tokens = [data["token"] for data in bodies if data.get("token")]
    text = "".join(token["text"] for token in tokens if not token["special"])
    return Told(
        text, any(data.get("generated_text") is not None for data in bodies), any("error" in it for it in bodies)
    )


def _read_messages(events: Events) -> Told:
    text = "".join(data["delta"].get("text", "") for name, data in events if name == "content_block_delta")
    names = [name for name, _ in events]
    return Told(text, "message_stop" in names, "error" in names)


def _read_responses(events: Events) -> Told:
    text = "".join(data["delta"] for name, data in events if name == "response.output_text.delta")
    names = {name for name, _ in events}
    return Told(
        text, bool(names & {"response.completed", "response.incomplete"}), bool(names & {"response.failed", "error"})
    )


def _ask(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _templated(prompt: str) -> str:
    # The echo ends where it comes to the id that ends a turn.
    return f"user\n{prompt}"


SURFACES: Mapping[str, Surface] = {
    "raw": Surface(f"/inference/{MODEL}", lambda text, n: {"text": text, "max_tokens": n}, str, None),
    "chat": Surface(
        f"/chat/{MODEL}",
        lambda text, n: {"text": text, "max_tokens": n},
        lambda text: f"User: {text}\nAI: ",
        _read_chat,
    ),
    "completions": Surface(
        "/v1/completions",
        lambda text, n: {"model": MODEL, "prompt": text, "max_tokens": n, "stream": True},
        str,
        _read_openai,
    ),
    "chat completions": Surface(
        "/v1/chat/completions",
        lambda text, n: {"model": MODEL, "messages": _ask(text), "max_tokens": n, "stream": True},
        _templated,
        _read_openai,
    ),
    "generate_stream": Surface(
        "/generate_stream", lambda text, n: {"inputs": text, "parameters": {"max_new_tokens": n}}, str, _read_tgi
    ),
    "messages": Surface(
        "/v1/messages",
        lambda text, n: {"model": MODEL, "messages": _ask(text), "max_tokens": n, "stream": True},
        _templated,
        _read_messages,
    ),
    "responses": Surface(
        "/v1/responses",
        lambda text, n: {"model": MODEL, "input": text, "max_output_tokens": n, "stream": True},
        _templated,
        _read_responses,
    ),
}


class Witness:
    """One self-identifying stream, read in a thread of its own until it ends; the facts are there once it has."""

    def __init__(self, port: int, surface: str, prompt: str, headers: Mapping[str, str]) -> None:
        """Send the request; the thread reads from now on."""
        self.surface = surface
        self._says = SURFACES[surface].says(prompt)
        self._opened = threading.Event()
        self.status = 0
        self.told = Told("", ended=False, failed=False)
        self.retry_after: str | None = None
        self.outcome = Outcome.HUNG
        self.ended_at = 0.0
        self._transport_whole = False
        self.num_bytes = 0
        # Room for the template's own ids too: the echo ends by itself.
        body = SURFACES[surface].body(prompt, len(prompt) + 64)
        self._thread = threading.Thread(target=self._read, args=(port, body, headers), name=f"witness {surface}")
        self._thread.start()

    def wait_open(self, timeout_seconds: float) -> bool:
        """Block until its first piece has come, or its end; return whether one did."""
        return self._opened.wait(timeout_seconds)

    def join(self) -> None:
        """Block until it has ended; a hung one ends after HUNG_SECONDS."""
        self._thread.join()

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return not self._thread.is_alive()

    def fault(self) -> str | None:
        """Return what is wrong with what it was told, whatever was broken meanwhile; None: all of it is true."""
        told = self.told
        if self.outcome is Outcome.HUNG:
            return f"{self.surface}: no byte for {HUNG_SECONDS:g} s after {len(told.text)} characters"
        if self.outcome is Outcome.REFUSED:
            if self.status not in (0, 502, 503):
                return f"{self.surface}: status {self.status}"
            is_told = self.status != 503 or int(self.retry_after or 0) >= 1
            return None if is_told else f"{self.surface}: 503 without Retry-After"
        if not self._says.startswith(told.text):
            return f"{self.surface}: {told.text[-40:]!r} is not its own"
        if told.ended and told.failed:
            return f"{self.surface}: says that it is whole and that it failed"
        if told.ended and told.text != self._says:
            return f"{self.surface}: says that it is whole after {len(told.text)} of {len(self._says)} characters"
        if not told.ended and not told.failed and self._transport_whole:
            return f"{self.surface}: ended without a sign after {len(told.text)} of {len(self._says)} characters"
        return None

    def _read(self, port: int, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        try:
            with RawStream(port, SURFACES[self.surface].path, body, headers) as stream:
                stream.sock.settimeout(HUNG_SECONDS)
                self._follow(stream)
        except TimeoutError:
            self.outcome = Outcome.HUNG
        except OSError:  # refused, or broken before the head
            self.outcome = Outcome.REFUSED
        finally:
            self.ended_at = time.monotonic()
            self._opened.set()

    def _follow(self, stream: RawStream) -> None:
        self.status = stream.status
        if self.status != 200:
            self.retry_after = stream.headers.get("retry-after")
            stream.read_all()
            self.outcome = Outcome.REFUSED
            return
        while (piece := stream.read_chunk()) is not None:
            self.num_bytes += len(piece)
            self._opened.set()
        self._transport_whole = stream.whole
        read = SURFACES[self.surface].read
        if read is None:
            self.told = Told(stream.body.decode(), ended=stream.whole, failed=not stream.whole)
        else:
            self.told = read(list(parse_events(stream.body)))
        self.outcome = Outcome.WHOLE if self.told.ended else Outcome.CUT


def parse_events(body: bytes) -> Iterator[tuple[str, Any]]:
    """Yield each whole server-sent event: its name and its data, parsed where that is JSON."""
    blocks = body.decode().split("\n\n")
    for block in blocks[:-1]:
        lines = dict(line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            data: Any = lines["data"]
            with contextlib.suppress(ValueError):
                data = json.loads(data)
            yield lines.get("event", ""), data


def draw_prompt(rng: random.Random, length: int) -> str:
    """Return a prompt that no other stream has."""
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def open_witnesses(port: int, rng: random.Random, count: int, length: int, headers: Mapping[str, str]) -> list[Witness]:
    """Open so many streams over all surfaces in turn, each with `length` letters to say."""
    names = list(SURFACES)
    offset = rng.randrange(len(names))
    return [
        Witness(port, names[(offset + index) % len(names)], draw_prompt(rng, length), headers) for index in range(count)
    ]


def join_all(witnesses: Iterable[Witness]) -> list[str]:
    """Wait for the end of all, and return what was wrong with each that was told something wrong."""
    faults = []
    for witness in witnesses:
        witness.join()
        fault = witness.fault()
        if fault is not None:
            faults.append(fault)
    return faults
