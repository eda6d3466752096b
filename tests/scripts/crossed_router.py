"""Enter PROCESS 1 with a planted fault: now and then two open sessions get each other's ids.

Started by a test as gunicorn's application, in processes of its own; what finds foreign tokens must find these. Both
sessions' outputs fit their streams, so that no check of the router itself notices.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import Flask

from inference_api.server import app
from inference_api.server.output_router import OutputRouter, SessionStream

CROSSED_EVERY = 8


class CrossedRouter(OutputRouter):
    """Swap every eighth session with another that has got nothing yet."""

    num_opened = 0

    def open(self, session_id: str, on_news: Callable[[], None] | None = None) -> SessionStream:
        """Open a session, maybe under another's id."""
        stream = super().open(session_id, on_news)
        with self._lock:
            self.num_opened += 1
            unread = [name for name, other in self._streams.items() if not other.token_ids and name != session_id]
            if self.num_opened % CROSSED_EVERY == 0 and unread:
                self._streams[session_id], self._streams[unread[0]] = self._streams[unread[0]], stream
        return stream


def create_mock_server() -> Flask:
    """Return the application of a worker whose router crosses sessions."""
    app.OutputRouter = CrossedRouter  # type: ignore[misc]
    return app.create_server_app(app.Settings.from_environ())
