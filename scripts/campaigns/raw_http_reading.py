"""Read requests and answers of the part `raw_http` with h11, a strict parser that this service does not use.

Pure: bytes in, values out. What h11 makes of a connection's bytes bounds what the service may have made of them, and
every byte of an answer has to belong to one message. It does not know routes or what an answer should be.
"""

from __future__ import annotations

import dataclasses
import json

import h11

_EXCHANGE = (h11.Request(method="GET", target="/", headers=[("Host", "x")]), h11.EndOfMessage())
_MAX_HEAD_BYTES = 1 << 20


class AnswerFault(ValueError):
    """Tell that bytes that came from the service are no answers in a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Echo:
    """A request as the upstream got it: its first line and its headers by lower-case name."""

    line: str
    headers: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One answer: status (0 for one of HTTP/0.9, which has no head), headers by lower-case name, body."""

    status: int
    headers: dict[str, str]
    body: bytes
    num_continues: int = 0

    @property
    def echoed(self) -> Echo | None:
        """What the echo upstream says of the request that it got; None if the answer is not its own."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return None
        if not isinstance(value, dict) or not {"line", "headers"} <= value.keys():
            return None
        return Echo(value["line"], {name.lower(): text for name, text in value["headers"]})


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRequest:
    """One request as h11 reads it."""

    method: str
    path: str
    num_body_bytes: int


def read_answers(data: bytes, *, headless: bool = False) -> list[Answer]:
    """Read answers that follow one another; raise AnswerFault for a 101, a rest, or one that is not whole.

    With `headless`, the last may be one of HTTP/0.9, which is a body alone.
    """
    answers: list[Answer] = []
    while data:
        if headless and not data.startswith(b"HTTP/"):
            return [*answers, Answer(0, {}, data)]
        answer, data, is_last = _read_answer(data)
        answers.append(answer)
        if data and is_last:
            raise AnswerFault(f"bytes after an answer that ends the connection: {data[:80]!r}")
    return answers


def _read_answer(data: bytes) -> tuple[Answer, bytes, bool]:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    for sent in _EXCHANGE:
        connection.send(sent)
    connection.receive_data(data)
    status, num_continues, body = 0, 0, bytearray()
    headers: dict[str, str] = {}
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.InformationalResponse) and event.status_code == 100:
                num_continues += 1
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                if not {"content-length", "transfer-encoding"} & headers.keys():
                    raise AnswerFault("an answer that only the connection's end would end")
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                raise AnswerFault(f"an answer that is not whole, or none: {event!r} in {data[:80]!r}")
    except h11.RemoteProtocolError as fault:
        raise AnswerFault(f"{fault}: {data[:80]!r}") from None
    is_last = connection.their_state is h11.MUST_CLOSE
    return Answer(status, headers, bytes(body), num_continues), connection.trailing_data[0], is_last


def read_requests(data: bytes) -> list[ReadRequest]:
    """Return the requests that are whole in a connection's bytes, up to what h11 refuses or the last one."""
    found: list[ReadRequest] = []
    while True:
        # RFC 9112 section 2.2: empty lines before a request may be ignored.
        data = data.lstrip(b"\r\n")
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        connection.receive_data(data)
        method, path, num_body_bytes = "", "", 0
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    method, path = event.method.decode(), event.target.decode("latin-1").partition("?")[0]
                elif isinstance(event, h11.Data):
                    num_body_bytes += len(event.data)
                else:
                    return found
        except h11.RemoteProtocolError:
            return found
        found.append(ReadRequest(method, path, num_body_bytes))
        if connection.their_state is h11.MUST_CLOSE:
            return found
        data = connection.trailing_data[0]
