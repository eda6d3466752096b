"""Write a session's events in the server into the debug log: opened, accepted or refused, first token, closed.

Runs in PROCESS 1, in the request's own thread, and only in the debug mode: without it a plain Generation runs and none
of this is on its path. Gives ids, counts, lengths and times; never a text or a token id.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from inference_api.debug_log import DebugLog
from inference_api.errors import InferenceApiError
from inference_api.messages import Submit
from inference_api.server.backend_client import BackendClient
from inference_api.server.disconnects import DisconnectWatcher
from inference_api.server.generation import Generation, Piece
from inference_api.server.tokenizer import IncrementalDecoder
from inference_api.stop import TextStop


class TracedGeneration(Generation):
    """A Generation that tells the debug log what happens to it."""

    def __init__(
        self,
        client: BackendClient,
        watcher: DisconnectWatcher,
        decoder: IncrementalDecoder,
        text_stop: TextStop,
        debug_log: DebugLog,
    ) -> None:
        super().__init__(client, watcher, decoder, text_stop)
        self._debug_log = debug_log
        self._session_id = ""
        self._has_begun = False

    def start(
        self, submit: Submit, client_socket: socket.socket | None, on_news: Callable[[], None] | None = None
    ) -> None:
        """Submit, between the events `opened` and `accepted` or `refused`."""
        self._session_id = submit.session_id
        self._debug_log.write(
            "opened",
            submit.session_id,
            request_id=submit.request_id,
            tenant=submit.tenant,
            num_prompt_tokens=submit.num_prompt_tokens,
            max_tokens=submit.max_tokens,
            num_stop_sequences=len(submit.stop_sequences),
        )
        try:
            super().start(submit, client_socket, on_news)
        except InferenceApiError as error:
            self._debug_log.write("refused", submit.session_id, code=error.code)
            raise
        self._debug_log.write("accepted", submit.session_id)

    def next_piece(self, timeout_seconds: float | None = None) -> Piece | None:
        """Return the next piece; the first one that brings ids is an event."""
        piece = super().next_piece(timeout_seconds)
        if not self._has_begun and self.num_delivered_tokens:
            self._has_begun = True
            self._debug_log.write("first_token", self._session_id, row=self.row)
        return piece

    def close(self) -> None:
        """Close the generation; the event says what had come from the backend by then."""
        super().close()
        finished = self.wait_finished(0.0)
        self._debug_log.write(
            "closed",
            self._session_id,
            reason=finished.reason.value if finished is not None else None,
            code=finished.error.code if finished is not None and finished.error is not None else None,
            num_delivered_tokens=self.num_delivered_tokens,
            abandoned=self.abandoned,
        )
