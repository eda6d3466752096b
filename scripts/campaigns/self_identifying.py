"""Send requests whose answers say whose they are, over many clients at once, and judge every byte that comes back.

For scripts/prove-isolation and the campaign; asks of a server what any client can, by URL and bearers. On a server that
echoes, an answer is its own prompt; on any other it is held to its own text by a form. An answer, whole, cut or left
early, may hold nothing but the beginning of its own text. Starts no server.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TIMEOUT_SECONDS = 120.0
REFUSED_SECONDS = 0.5
"""How long a client that was refused, or whose connection broke, waits before its next request."""

PEEKING_SHARE = 0.02
"""Of the requests, those after which a client asks for the request of another tenant by its id."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: close(2) sends RST (socket(7))."""

OUTCOMES = ("answered", "left", "refused", "broken", "short", "foreign")


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """A way to ask for one's own text: the path, the body, and the texts that a body, whole or not, holds."""

    path: str
    body: Mapping[str, Any]
    own_members: Callable[[str], Mapping[str, Any]]
    """The members of the body that the own text is in."""
    texts: Callable[[bytes], list[str]]
    """One text of each answer; what came of the last event is left out if it is not whole."""


def _raw_text(body: bytes) -> list[str]:
    return [body.decode(errors="ignore")]  # the last character may be cut


def _streamed_texts(body: bytes) -> list[str]:
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n")[:-1]]
    parts = [choice for event in events if event.startswith(b"{") for choice in json.loads(event).get("choices", ())]
    texts: dict[int, str] = {}
    for part in parts:
        text = part.get("text") or part.get("delta", {}).get("content") or ""
        texts[part["index"]] = texts.get(part["index"], "") + text
    return list(texts.values())


def _whole_texts(body: bytes) -> list[str]:
    try:
        choices = json.loads(body)["choices"]
    except ValueError:
        return []  # cut: nothing can be read of it
    return [choice.get("text") or choice["message"]["content"] for choice in choices]


def echo_forms(model: str) -> list[Form]:
    """Return the ways to ask a server that echoes its prompt."""
    body: dict[str, Any] = {"model": model, "max_tokens": 120}
    path = urllib.parse.quote(f"/inference/{model}")
    return [
        Form(path, {"max_tokens": 120}, lambda text: {"text": text}, _raw_text),
        Form("/v1/completions", {**body, "stream": True}, lambda text: {"prompt": text}, _streamed_texts),
        Form("/v1/completions", {**body, "n": 2}, lambda text: {"prompt": text}, _whole_texts),
    ]


def held_forms(model: str) -> list[Form]:
    """Return the ways to ask any server: the form of the answer allows one's own text and nothing else."""
    body: dict[str, Any] = {"model": model, "max_tokens": 120}

    def chat(text: str) -> Mapping[str, Any]:
        message = {"role": "user", "content": f"Say {text}"}
        return {"messages": [message], "structured_outputs": {"choice": [text]}}

    def completion(text: str) -> Mapping[str, Any]:
        return {"prompt": f"Say {text}:", "structured_outputs": {"choice": [text]}}

    return [
        Form("/v1/chat/completions", {**body, "stream": True}, chat, _streamed_texts),
        Form("/v1/completions", body, completion, _whole_texts),
    ]


def text_of(number: int) -> str:
    """Return a text that only request `number` may see, of 5 to 30 bytes."""
    return f"[{number:x}é]" * (1 + number % 3)


def judge(texts: Sequence[str], own: str, *, whole: bool) -> str:
    """Return what an answer is: answered or broken; short if it only says that it is whole; foreign otherwise."""
    if not all(own.startswith(text) for text in texts):
        return "foreign"
    if not whole:
        return "broken"
    return "answered" if texts and all(text == own for text in texts) else "short"


@dataclasses.dataclass(slots=True)
class Result:
    """What a run came to: how many requests ended how, and how many looks at other tenants' requests were answered."""

    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)
    peeks: Counter[int] = dataclasses.field(default_factory=Counter)
    """By status; nothing but 404 and, while a server is away, 5xx may be among them."""
    examples: list[str] = dataclasses.field(default_factory=list)
    """Of foreign and short answers."""

    @property
    def leaks(self) -> int:
        """Looks that told something of another tenant's request."""
        return sum(count for status, count in self.peeks.items() if status != 404 and status < 500)

    @property
    def faults(self) -> int:
        """What must be 0."""
        return self.outcomes["foreign"] + self.outcomes["short"] + self.leaks

    def figures(self) -> dict[str, int]:
        """Return the totals; the requests are the sum of their outcomes."""
        told = {name: self.outcomes[name] for name in OUTCOMES}
        return {"requests": self.outcomes.total(), **told, "peeks": self.peeks.total(), "leaks": self.leaks}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """How much is asked, and how."""

    requests: int
    clients: int
    leaving_share: float
    seed: int
    first: int = 0
    """Number of the first request: two loads at once share no text."""


class Target:
    """A server, the bearers of one or more tenants, and the ways to ask it."""

    def __init__(self, url: str, bearers: Sequence[str], model: str = "") -> None:
        """`bearers` are JWTs, or nothing for a server that asks for none; the model is asked for if it is not given.

        Raises ValueError for what is no URL of a server.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:1223")
        secure = parts.scheme == "https"
        self._connection_class = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._address = (parts.hostname, parts.port)
        self._prefix = parts.path.rstrip("/")
        self.headers = [{"Authorization": f"Bearer {bearer}"} for bearer in bearers] or [{}]
        self.model = model
        self.forms: list[Form] = []
        self.kind = ""
        """`echo`, or `form` on a server whose answers must be held to their text."""

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection, which opens itself."""
        return self._connection_class(*self._address, timeout=TIMEOUT_SECONDS)

    def probe(self) -> None:
        """Find out how the server can be asked (blocking); raises OSError or ValueError if it does not serve."""
        if not self.model:
            self.model = self._get_json("/v1/models")["data"][0]["id"]
        connection = self.connect()
        own = text_of(6)
        status, texts = ask_whole(self, connection, echo_forms(self.model)[0], own)
        connection.close()
        if status != 200:
            raise ValueError(f"the server answered {status}")
        self.kind = "echo" if texts == [own] else "form"
        self.forms = echo_forms(self.model) if self.kind == "echo" else held_forms(self.model)

    def send(self, connection: http.client.HTTPConnection, tenant: int, form: Form, own: str) -> None:
        """Send a request for one's own text."""
        body = json.dumps({**form.body, **form.own_members(own)}).encode()
        headers = {"Content-Type": "application/json", **self.headers[tenant]}
        connection.request("POST", self._prefix + form.path, body, headers)

    def peek(self, connection: http.client.HTTPConnection, tenant: int, request_id: str) -> int:
        """Ask for a request by its id; return the status."""
        connection.request("GET", f"{self._prefix}/v1/requests/{request_id}", headers=self.headers[tenant])
        answer = connection.getresponse()
        answer.read()
        return answer.status

    def _get_json(self, path: str) -> Any:
        connection = self.connect()
        try:
            connection.request("GET", self._prefix + path, headers=self.headers[0])
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"GET {path} was answered {answer.status}")
        return json.loads(body)


def ask_whole(target: Target, connection: http.client.HTTPConnection, form: Form, own: str) -> tuple[int, list[str]]:
    """Send one request and read its answer (blocking)."""
    target.send(connection, 0, form, own)
    answer = connection.getresponse()
    body = answer.read()
    return answer.status, form.texts(body) if answer.status == 200 else []


class Prover:
    """Ask a target with a load; one object, one run."""

    def __init__(self, target: Target, load: Load) -> None:
        self.target = target
        self.load = load
        self._numbers = itertools.count(load.first)
        self._lock = threading.Lock()
        self._last_ids: dict[int, str] = {}
        self.result = Result()

    def run(self) -> Result:
        """Send all requests (blocking) and return what came of them."""
        with concurrent.futures.ThreadPoolExecutor(self.load.clients) as clients:
            for done in [clients.submit(self._be_client, index) for index in range(self.load.clients)]:
                done.result()
        return self.result

    @property
    def num_done(self) -> int:
        """Requests that have ended so far."""
        return self.result.outcomes.total()

    def _be_client(self, index: int) -> None:
        draw = random.Random(f"{self.load.seed} {index}")
        tenant = index % len(self.target.headers)
        connection = self.target.connect()
        try:
            for number in self._own_numbers():
                outcome = self._ask(connection, tenant, number, draw)
                with self._lock:
                    self.result.outcomes[outcome] += 1
                if outcome in ("refused", "broken"):
                    time.sleep(REFUSED_SECONDS)
                elif draw.random() < PEEKING_SHARE:
                    self._peek(connection, tenant)
        finally:
            connection.close()

    def _own_numbers(self) -> Iterator[int]:
        while True:
            with self._lock:
                number = next(self._numbers)
            if number >= self.load.first + self.load.requests:
                return
            yield number

    def _ask(self, connection: http.client.HTTPConnection, tenant: int, number: int, draw: random.Random) -> str:
        form, own = draw.choice(self.target.forms), text_of(number)
        leaves_after = draw.randrange(3) if draw.random() < self.load.leaving_share else None
        body = b""
        whole = False
        try:
            self.target.send(connection, tenant, form, own)
            if leaves_after == 0:
                _leave(connection, draw)
                return "left"
            answer = connection.getresponse()
            self._last_ids[tenant] = answer.headers.get("Request-Id", "")
            if answer.status != 200:
                answer.read()
                return "refused" if answer.status in (429, 502, 503, 504) else self._wrong("foreign", number, answer)
            while part := answer.read1(65536):
                body += part
                if leaves_after is not None:
                    _leave(connection, draw)
                    outcome = judge(form.texts(body), own, whole=False)
                    return "left" if outcome == "broken" else self._wrong(outcome, number, body)
            whole = not answer.length
            answer.close()  # read1 leaves one with a length open
        except (OSError, http.client.HTTPException):
            connection.close()
        outcome = judge(form.texts(body), own, whole=whole and not _failed(body))
        return self._wrong(outcome, number, body) if outcome in ("foreign", "short") else outcome

    def _wrong(self, outcome: str, number: int, told: object) -> str:
        text = f"{outcome}: request {number:x} was told {getattr(told, 'status', told)!r}"
        with self._lock:
            self.result.examples.append(text[:500])
        return outcome

    def _peek(self, connection: http.client.HTTPConnection, tenant: int) -> None:
        others = [request_id for other, request_id in self._last_ids.items() if other != tenant and request_id]
        if not others:
            return
        try:
            status = self.target.peek(connection, tenant, others[0])
        except (OSError, http.client.HTTPException):
            connection.close()
            return
        with self._lock:
            self.result.peeks[status] += 1


def _failed(body: bytes) -> bool:
    """Tell whether a stream of events says itself that it is not whole."""
    return body.startswith(b"data: ") and not body.endswith(b"data: [DONE]\n\n")


def _leave(connection: http.client.HTTPConnection, draw: random.Random) -> None:
    """Close a connection, with FIN or with RST."""
    if draw.random() < 0.5 and connection.sock is not None:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    connection.close()
