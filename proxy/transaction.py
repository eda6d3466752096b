"""Own the one log line of a forwarded or refused request.

Pure but for the logger it is given. It knows which values may be logged: path, address, status, tenant, bearer id, the
server's statistics and the duration. No prompt, header, query or JWT ever reaches it; every value is escaped.
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


@dataclass(slots=True)
class Transaction:
    """Collect what is known of one request; `finish` writes the line once."""

    path: str
    client_address: str
    now: Callable[[], float]
    logger: logging.Logger
    started: float = field(init=False)
    # What is true when nothing was decided before an unexpected end.
    status_code: int = 500
    claims: Claims | None = None
    stats: object = None

    def __post_init__(self) -> None:
        """Start the clock (monotonic seconds)."""
        self.started = self.now()

    def finish(self, *, client_left: bool) -> None:
        """Write the line; a health probe that went well, which comes every few seconds, is not worth one."""
        if self.claims is None and self.status_code == HTTPStatus.OK and not client_left:
            return
        self.logger.info(
            "[Transaction] path=%s client_address=%s status_code=%d jwt=%s stats=%s duration_ms=%d",
            escape(self.path),
            escape(self.client_address),
            CLIENT_LEFT_STATUS if client_left else self.status_code,
            self._identity(),
            "-" if self.stats is None else json.dumps(self.stats, separators=(",", ":"))[: 4 * _MAX_VALUE],
            (self.now() - self.started) * 1000,
        )

    def _identity(self) -> str:
        if self.claims is None:
            return "-"
        identity = {"team_id": self.claims.tenant, "token_id": self.claims.token_id}
        return json.dumps(identity, separators=(",", ":"))


def escape(value: str) -> str:
    """Make a value one printable ASCII word of bounded length: no new line, no terminal code, no forged field."""
    text = value.encode("unicode_escape").decode("ascii").replace(" ", "\\x20").replace("=", "\\x3d")
    return text[:_MAX_VALUE] or "-"
