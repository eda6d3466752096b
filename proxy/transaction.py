"""Own the one log line of a forwarded or refused request: its text, and the values of its JSON object.

Pure but for the logger it is given. It knows which values may be logged: path, address, status, tenant, bearer id, the
server's statistics, the duration, the trace. No prompt, header, query or JWT ever reaches it; every value is escaped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from proxy.auth import Claims

# nginx's number for "client closed request"; it never goes on the wire.
CLIENT_LEFT_STATUS = 499
_MAX_VALUE = 256
_MAX_STATS = 1024


@dataclass(slots=True)
class Transaction:
    """Collect what is known of one request; `finish` writes the line once."""

    path: str
    client_address: str
    now: Callable[[], float]
    logger: logging.Logger
    trace_id: str
    started: float = field(init=False)
    # What is true when nothing was decided before an unexpected end.
    status_code: int = 500
    claims: Claims | None = None
    stats: object = None

    def __post_init__(self) -> None:
        """Start the clock (monotonic seconds)."""
        self.started = self.now()

    def finish(self, *, client_left: bool, cut_reason: str | None = None) -> None:
        """Write the line; a health probe that went well, which comes every few seconds, is not worth one.

        `cut_reason` says why the proxy itself ended the connection under the request.
        """
        if self.claims is None and self.status_code == HTTPStatus.OK and not client_left:
            return
        status_code = CLIENT_LEFT_STATUS if client_left else self.status_code
        jwt = {"team_id": self.claims.tenant, "token_id": self.claims.token_id} if self.claims is not None else None
        duration_ms = (self.now() - self.started) * 1000
        self.logger.info(
            "[Transaction] path=%s client_address=%s status_code=%d jwt=%s stats=%s duration_ms=%d trace_id=%s%s",
            escape(self.path),
            escape(self.client_address),
            status_code,
            _compact(jwt),
            _compact(self.stats)[:_MAX_STATS],
            duration_ms,
            self.trace_id,
            f" cut_reason={cut_reason}" if cut_reason else "",
            extra={
                "fields": {
                    "message": "transaction",
                    "path": self.path[:_MAX_VALUE],
                    "client_address": self.client_address,
                    "status_code": status_code,
                    "jwt": jwt,
                    "stats": self.stats if len(_compact(self.stats)) <= _MAX_STATS else None,
                    "duration_ms": round(duration_ms, 3),
                    "trace_id": self.trace_id,
                    **({"cut_reason": cut_reason} if cut_reason else {}),
                }
            },
        )


def _compact(value: object) -> str:
    return "-" if value is None else json.dumps(value, separators=(",", ":"))


def escape(value: str) -> str:
    """Make a value one printable ASCII word of bounded length: no new line, no terminal code, no forged field."""
    text = value.encode("unicode_escape").decode("ascii").replace(" ", "\\x20").replace("=", "\\x3d")
    return text[:_MAX_VALUE] or "-"
