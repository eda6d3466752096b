"""Speak to a running service as any client does: where it is, a bearer, streams whose chunks carry arrival times.

Runs in the programs and tests of this folder, never in the service. Stands on http.client alone, so that a figure holds
little of the client's own time. Knows the routes and the answers' form; it does not know who started the service.
"""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tests.integration.raw_http import Chunk

LEGACY_MODEL_NAME = "falcon40b"
TIMEOUT_SECONDS = 120.0
"""Longest silence of a server; its own deadline for a first token is as long."""

OVERLOADED_TEXT = b"Service overloaded, try again later."
MIN_P99_SAMPLES = 1000
_ROUTE = re.compile(r"(?P<base>.*)/(?P<route>inference|predictions|chat)/(?P<model>[^/]+)/?")


class TargetError(Exception):
    """Say in one line why the server cannot be used, and what to do."""


@dataclass(frozen=True)
class Target:
    """Where the service is, and as whom to call it; `route` and `model` are what programs use unless told otherwise.

    The prompts are instructions: many a model has nothing to add to one as raw text, and much to answer to a user.
    """

    base_url: str
    authorization: str = field(default="", repr=False)
    route: str = "predictions"
    model: str = LEGACY_MODEL_NAME

    @classmethod
    def parse(cls, url: str, authorization: str = "") -> Target:
        """Read a base URL, or the full URL of a generation route; raise TargetError for anything else."""
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid or parts.query or parts.fragment:
            raise TargetError(f"{url!r} is no address of a service; give http://HOST:PORT or a route's full URL")
        if not re.fullmatch(r"[ -~]*", authorization):
            raise TargetError("AUTHORIZATION holds characters that no header may have; give 'Bearer ' and the JWT")
        root = f"{parts.scheme}://{parts.netloc}"
        if match := _ROUTE.fullmatch(parts.path):
            return cls(root + match["base"], authorization, match["route"], match["model"])
        return cls(root + parts.path.rstrip("/"), authorization)


class Stream:
    """One answer, read chunk by chunk; closing it early tells the server that its client has left."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, sent_at: float):
        self._connection, self._response = connection, response
        self.sent_at = sent_at
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.chunks: list[Chunk] = []
        self.whole = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def body(self) -> bytes:
        """The body so far."""
        return b"".join(chunk.data for chunk in self.chunks)

    @property
    def request_id(self) -> str:
        """The public id that the service gave this request."""
        return self.headers.get("request-id", "")

    @property
    def ttft_seconds(self) -> float:
        """Time from the connect to the first chunk; infinite without one."""
        return self.chunks[0].at - self.sent_at if self.chunks else math.inf

    @property
    def gap_seconds(self) -> list[float]:
        """Times between one chunk and the next."""
        return [after.at - before.at for before, after in zip(self.chunks, self.chunks[1:], strict=False)]

    def read_chunk(self) -> bytes | None:
        """Block for the next chunk; None at the end: `whole` tells an honest end from a cut."""
        try:
            data = self._response.read1(-1)
        except (http.client.HTTPException, ConnectionError):
            return None
        if not data:
            # A body with a Content-Length that was cut still lacks bytes; a chunked one has raised.
            self.whole = not self._response.length
            return None
        self.chunks.append(Chunk(data, time.monotonic()))
        return data

    def read_all(self) -> bytes:
        """Read to the end of the body, whole or cut, and return it."""
        while self.read_chunk() is not None:
            continue
        return self.body

    @property
    def is_overloaded(self) -> bool:
        """Whether the service said in time that it is full, and when to come back; other 503 are faults."""
        return self.status == 503 and "retry-after" in self.headers and OVERLOADED_TEXT in self.body

    def json(self) -> Any:
        """Return the whole body as JSON."""
        return json.loads(self.read_all())

    def close(self) -> None:
        """Close the connection."""
        self._response.close()
        self._connection.close()


class Client:
    """Calls of one target; any number of threads may share it, every call has a connection of its own."""

    def __init__(self, target: Target, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.target = target
        self.info: dict[str, Any] = {}
        self._timeout_seconds = timeout_seconds
        self._parts = urlsplit(target.base_url)

    def connect(self) -> Self:
        """Ask /info and keep it; raise TargetError if nobody answers, or refuses this caller."""
        url = self.target.base_url
        try:
            with self.get("/info") as answer:
                body = answer.read_all().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            # A server that speaks no HTTP has its own first line quoted.
            reason = _one_line(str(getattr(error, "strerror", None) or error))
            raise TargetError(
                f"nothing answers at {url} ({reason}); start it with scripts/serve, or use --mock"
            ) from None
        message = _message_of(body)
        if answer.status in (401, 403):
            named = "is not accepted" if self.target.authorization else "is missing"
            raise TargetError(
                f"AUTHORIZATION {named} at {url} ({answer.status}: {message}); scripts/jwt_util.py makes one"
            )
        info = _service_info(body) if answer.status == 200 else None
        if info is None:
            raise TargetError(f"{url}/info answers {answer.status}: {message}; is this the service, and is it ready?")
        self.info = info
        return self

    @property
    def model(self) -> str:
        """The model's own name, the first that the service tells."""
        return str(self.info["models"][0])

    @property
    def counts_digits(self) -> bool:
        """Whether the engine is the mock in the mode that answers with digits: its answers are known in advance."""
        return str(self.info["digest"]).startswith("mock-digits")

    def get(self, path: str) -> Stream:
        """GET a path of the service."""
        return self._send("GET", path, None, {})

    def post(self, path: str, body: bytes, content_type: str = "application/json") -> Stream:
        """POST bytes; blocks for the head of the answer."""
        return self._send("POST", path, body, {"Content-Type": content_type})

    def generate(self, text: str, *, route: str = "", model: str = "", **parameters: Any) -> Stream:
        """Ask for a generation, by default on the target's route and model; blocks for the head of the answer."""
        path = f"/{route or self.target.route}/{model or self.target.model}"
        return self.post(path, json.dumps({"text": text, **parameters}).encode())

    def view(self, request_id: str) -> dict[str, Any]:
        """Return what GET /v1/requests/<id> says; the service keeps ended requests for a while only."""
        with self.get(f"/v1/requests/{request_id}") as answer:
            body: dict[str, Any] = answer.json()
        return body

    def num_tokens(self, stream: Stream) -> int:
        """Return how many tokens an answer had: chunks cannot tell, several tokens may share one."""
        count = self.view(stream.request_id).get("num_completion_tokens")
        if not isinstance(count, int):
            raise TargetError(f"{self.target.base_url}/v1/requests tells no number of tokens; is this the service?")
        return count

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Stream:
        secure = self._parts.scheme == "https"
        connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        sent_at = time.monotonic()
        connection = connection_class(self._parts.netloc, timeout=self._timeout_seconds)
        if self.target.authorization:
            headers = {**headers, "Authorization": self.target.authorization}
        try:
            connection.request(method, self._parts.path + path, body, headers)
            return Stream(connection, connection.getresponse(), sent_at)
        except BaseException:
            connection.close()
            raise


def _message_of(body: str) -> str:
    """Return an error body's message, or the beginning of whatever came instead, in one line."""
    try:
        return _one_line(str(json.loads(body)["message"]))
    except (ValueError, KeyError, TypeError):
        return _one_line(body) or "nothing"


def _one_line(text: str) -> str:
    """Return the beginning of a text as one line that no terminal obeys."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))[:200]


def _service_info(body: str) -> dict[str, Any] | None:
    """Return what /info tells, or None if it is not what this service tells there."""
    try:
        info = json.loads(body)
    except ValueError:
        return None
    if not isinstance(info, dict) or not all(isinstance(info.get(name), str) for name in ("engine", "digest")):
        return None
    models = info.get("models")
    return info if isinstance(models, list) and models and isinstance(models[0], str) else None


def chat_events(body: bytes) -> list[tuple[str, Any]]:
    """Parse server-sent events with one JSON data line each (WHATWG HTML, section 9.2); comments are left out."""
    events = []
    for block in body.decode().split("\n\n"):
        match = re.fullmatch(r"event: (\w+)\ndata: (.*)", block)
        if match:
            events.append((match[1], json.loads(match[2])))
        elif block and not block.startswith(":"):
            raise ValueError(f"no event: {block!r}")
    return events


def text_of(route: str, body: bytes) -> str:
    """Return the text of an answer so far: the body itself, or the message of the last whole `answer` event."""
    if route != "chat":
        return body.decode(errors="ignore")
    whole = body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
    messages = [data["message"] for name, data in chat_events(whole) if name == "answer"]
    return str(messages[-1]) if messages else ""


def digits(prompt: str, num_tokens: int) -> str:
    """Return what the mock makes of a prompt: each token is the last digit of its position."""
    first = len(prompt.encode())
    return "".join(str((first + index) % 10) for index in range(num_tokens))


def spread(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Summarize times in milliseconds; a 99th percentile only of 1,000 samples or more, else the bound of all."""
    ordered = sorted(seconds)
    milliseconds = [round(value * 1000, 2) for value in ordered]
    if not ordered:
        return {"num": 0, "p50": None, "p99": None, "all_below": None}
    p99 = milliseconds[math.ceil(0.99 * len(ordered)) - 1] if len(ordered) >= MIN_P99_SAMPLES else None
    return {"num": len(ordered), "p50": milliseconds[len(ordered) // 2], "p99": p99, "all_below": milliseconds[-1]}


def spread_text(summary: dict[str, float | int | None]) -> str:
    """Return `spread` as a few words."""
    if not summary["num"]:
        return "none"
    last = f"all below {summary['all_below']}" if summary["p99"] is None else f"p99 {summary['p99']}"
    return f"p50 {summary['p50']}, {last} (of {summary['num']})"


def start_threads(num_threads: int, job: Callable[[int], None]) -> list[threading.Thread]:
    """Start `job(0)` to `job(num_threads - 1)` in threads that do not keep an interrupted program alive."""
    threads = [threading.Thread(target=job, args=(index,), daemon=True) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads
