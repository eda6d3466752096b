"""Say where a client can leave a request, and how: twelve points, each a way to get there through the proxy.

For the part `leaving`. A point brings a connection to where it leaves and says what the service then holds for it; it
never looks at what becomes of it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import jwt

from tests.integration.proxy_process import RawClient
from tests.integration.service import SECRET, Service, wait_for

LONG = {"text": "x", "max_tokens": 2000}
LONG_PROMPT = {"text": "x" * 1500, "max_tokens": 1}
FEW_TOKENS = 3
FLOOD_PATH = "/v1/chat/completions"
FLOOD = {
    "model": "mock",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1000,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 4,
}
"""An answer of several hundred kilobytes, however its events are joined: more than the proxy and the kernel keep."""

SMALL_BUFFER_BYTES = 4096
OVERFLOW = {**FLOOD, "max_tokens": 2000, "top_logprobs": 20}
"""The same in larger events, so that the kernel's buffer is full within a second of a slow row, and the row goes on."""

FULL_SECONDS = 5.0
UNMOVED_SECONDS = 0.1

MAX_CALLS = 12
"""That the leavers' bearer may have open at once: a call that is not given back after its client left is missed."""

Leave = Callable[[RawClient], None]


def limited_bearer() -> dict[str, str]:
    """Return the header of a bearer that may have few calls open."""
    claims = {"team_id": "alpha", "token_id": "leaver", "scope": "inference", "q": {"connections": MAX_CALLS}}
    return {"Authorization": f"Bearer {jwt.encode(claims, SECRET, 'HS256')}"}


def close(client: RawClient) -> None:
    """Leave with FIN, or with RST where something was left unread (RFC 9293 section 3.6.1)."""
    client.sock.close()


def half_close(client: RawClient) -> None:
    """Send FIN and stay to listen: nobody can tell it from leaving."""
    client.sock.shutdown(1)


WAYS: Sequence[Leave] = (close, RawClient.reset, half_close)


@dataclasses.dataclass(frozen=True, slots=True)
class LeavePoint:
    """A point: the streams that run beside it, how a client gets there, what it then holds, and how it leaves."""

    name: str
    reach: Callable[[RawClient], None]
    num_beside: int = 0
    holds: str = ""
    """`row`, `place` in the queue, or nothing that is sure to be there when the client leaves."""
    ways: Sequence[Leave] = WAYS
    receive_buffer_bytes: int | None = None


def send(client: RawClient, path: str, body: object, *, part: float = 1.0, of_head: bool = False) -> None:
    """Send a request, or the first part of its head or of its body."""
    content = json.dumps(body).encode()
    own = limited_bearer()["Authorization"]
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: {own}", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode()
    data = head[: int(part * len(head))] if of_head else head + content[: int(part * len(content))]
    client.send(data)


def _read_tokens(client: RawClient, body: object, num_tokens: int) -> None:
    send(client, "/inference/mock", body)
    client.read_head()
    num_read = 0
    while num_read < num_tokens:
        num_read += len(client.read_chunk())


def _read_whole(client: RawClient) -> None:
    send(client, "/inference/mock", {"text": "x", "max_tokens": FEW_TOKENS})
    status, _, body = client.read_answer()
    if (status, len(body)) != (200, FEW_TOKENS):
        raise RuntimeError(f"a short answer came as {status} {body!r}")


def _fill_buffer(client: RawClient) -> None:
    """Take nothing of an answer until the proxy can write no more of it."""
    send(client, FLOOD_PATH, OVERFLOW)
    client.read_head()
    unsent, since = 0, time.monotonic()

    def is_full() -> bool:
        nonlocal unsent, since
        if (now_unsent := unsent_bytes(client)) != unsent:
            unsent, since = now_unsent, time.monotonic()
        return unsent > 0 and time.monotonic() - since > UNMOVED_SECONDS

    wait_for(is_full, FULL_SECONDS, "a full buffer")


def unsent_bytes(client: RawClient) -> int:
    """Return how much the kernel holds of what the other end has written to a client (proc_net_tcp, tx_queue)."""
    ends = [f"{client.sock.getpeername()[1]:04X}", f"{client.sock.getsockname()[1]:04X}"]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _number, local, remote, _state, queues, *_rest = line.split()
        if [local.partition(":")[2], remote.partition(":")[2]] == ends:
            return int(queues.partition(":")[0], 16)
    return 0


def points(num_rows: int) -> list[LeavePoint]:
    """Return the twelve points on a service of so many rows."""
    few = {"text": "x", "max_tokens": FEW_TOKENS}
    return [
        LeavePoint("in the head", lambda client: send(client, "/inference/mock", LONG, part=0.5, of_head=True)),
        LeavePoint("in the body", lambda client: send(client, "/inference/mock", LONG, part=0.5)),
        LeavePoint("after the body", lambda client: send(client, "/inference/mock", LONG)),
        LeavePoint("in the queue", lambda client: send(client, "/inference/mock", LONG), num_rows, "place"),
        LeavePoint("before its first token", lambda it: send(it, "/inference/mock", LONG_PROMPT), 1, "row"),
        LeavePoint("at its first token", lambda client: _read_tokens(client, LONG, 1), holds="row"),
        LeavePoint("between two tokens", lambda client: _read_tokens(client, LONG, 5), holds="row"),
        LeavePoint("in a full buffer", _fill_buffer, holds="row", receive_buffer_bytes=SMALL_BUFFER_BYTES),
        LeavePoint("at its last token", lambda client: _read_tokens(client, few, FEW_TOKENS)),
        LeavePoint("after its end", _read_whole),
        LeavePoint("with FIN", lambda client: _read_tokens(client, LONG, 3), 1, "row", (half_close,)),
        LeavePoint("with RST", lambda client: _read_tokens(client, LONG, 3), 1, "row", (RawClient.reset,)),
    ]


def open_beside(service: Service, num_streams: int, stack: ExitStack) -> None:
    """Let long streams decode in so many rows until the stack is closed."""
    for _ in range(num_streams):
        client = stack.enter_context(RawClient(service.proxy_port or 0))
        _read_tokens(client, LONG, 1)


def fault_of_wait(condition: Callable[[], object], seconds: float) -> str | None:
    """Wait until a state has come (blocking); return None, or what to say if it did not come in time."""
    try:
        wait_for(condition, seconds, "a state")
    except AssertionError as error:
        return str(error)
    return None
