"""Write a session's events in the backend into the debug log: queued, first token, ended; and the aborts that come in.

Runs in PROCESS 2 and only in the debug mode, around the decode loop: what comes in passes a TracedInbox, what goes out
a TracedOutbox. Gives ids, counts, lengths and times; never a token id.
"""

from __future__ import annotations

from inference_api.backend.decode_loop import Inbox, Outbox
from inference_api.backend.inbox_messages import InboxMessage, KeyedSubmit, MaskedSubmit
from inference_api.debug_log import DebugLog
from inference_api.messages import Finished, Message, SequenceOutput, StepOutput, Submit


class TracedInbox(Inbox):
    """An Inbox that tells the debug log of every session that takes a place."""

    def __init__(self, debug_log: DebugLog) -> None:
        super().__init__()
        self._debug_log = debug_log

    def put(self, worker: str, message: InboxMessage) -> None:
        """Add a message; called by the intake thread."""
        submit = message.submit if isinstance(message, MaskedSubmit | KeyedSubmit) else message
        if isinstance(submit, Submit):
            self._debug_log.write(
                "queued",
                submit.session_id,
                request_id=submit.request_id,
                worker=worker,
                num_prompt_tokens=submit.num_prompt_tokens,
                max_tokens=submit.max_tokens,
            )
        super().put(worker, message)


class TracedOutbox:
    """An Outbox that tells the debug log of first tokens and ends; called by the decode thread."""

    def __init__(self, outbox: Outbox, debug_log: DebugLog) -> None:
        self._outbox = outbox
        self._debug_log = debug_log

    def send(self, worker: str, message: Message) -> None:
        """Send one message to a worker, then write its events."""
        self._outbox.send(worker, message)
        if not isinstance(message, StepOutput):
            return
        for output in message.outputs:
            if output.index == 0 and output.token_ids:
                self._debug_log.write("first_token", output.session_id, row=output.row, epoch=output.epoch)
            if output.finished is not None:
                self._write_end(output, output.finished)

    def _write_end(self, output: SequenceOutput, finished: Finished) -> None:
        timing = finished.timing
        self._debug_log.write(
            "ended",
            output.session_id,
            row=output.row,
            reason=finished.reason.value,
            code=finished.error.code if finished.error is not None else None,
            num_completion_tokens=finished.num_completion_tokens,
            queue_seconds=timing.queue_seconds,
            prefill_seconds=timing.prefill_seconds,
            decode_seconds=timing.decode_seconds,
            batch_size=timing.batch_size,
            context_tokens=timing.context_tokens,
        )
