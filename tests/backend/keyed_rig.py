"""Extend the small backend of the tests by calls with idempotency keys: it decides about them as the intake does."""

from __future__ import annotations

from typing import Any

from inference_api.backend.idempotency import IdempotencyRecords
from inference_api.backend.inbox_messages import KeyedSubmit
from inference_api.backend.readers import Readers
from inference_api.messages import Abort, IdempotencyKey, RefusalReason, Submit
from tests.backend.factories import START_SECONDS, WORKER, Rig, make_submit

TTL_SECONDS = 600.0


def keyed_submit(session_id: str, *, key: str = "key", digest: bytes = b"one", part: int = 0, **changes: Any) -> Submit:
    """Return a Submit of a call with a key; the session's name is the call's too."""
    request_id = changes.pop("request_id", f"req-{key}")
    created = changes.pop("created", int(START_SECONDS))
    idempotency = IdempotencyKey(key, digest, part)
    named = {"idempotency": idempotency, "created": created, "request_id": request_id, "call_id": session_id}
    return make_submit(session_id, **{**named, **changes})


class KeyedRig(Rig):
    """A backend that knows keys. `told` holds what each accepted call was told of the time of an earlier one."""

    def __init__(self, *arguments: Any, records: IdempotencyRecords | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.records = records if records is not None else IdempotencyRecords(TTL_SECONDS)
        self.told: dict[str, int] = {}

    def call(self, session_id: str, *, worker: str = WORKER, mask: object = None, **changes: Any) -> str:
        """Make a call with a key; return what becomes of it: refused, full, follows or computes."""
        message = self.claimed(keyed_submit(session_id, **changes), worker, mask)
        if isinstance(message, str):
            return message
        self.apply(message, worker)
        return "follows" if message.follows else "computes"

    def claimed(self, submit: Submit, worker: str = WORKER, mask: Any = None) -> KeyedSubmit | str:
        """Decide as the intake does; return what it would hand to the decode thread, or why not."""
        verdict = self.records.claim(submit, self.now)
        if verdict.recording is None:
            return "refused"
        readers = Readers(self.records, verdict.recording)
        readers.add(submit, worker)
        if verdict.is_repeat:
            self.told[submit.session_id] = verdict.recording.created
            return KeyedSubmit(submit, readers, follows=True)
        submit = verdict.recording.continued(submit)
        if isinstance(self.admission.take(len(submit.token_ids)), RefusalReason):
            return "full"
        self.told[submit.session_id] = readers.begin()
        return KeyedSubmit(submit, readers, mask)

    def leave(self, session_id: str, key: str = "key", tenant: str = "alpha") -> None:
        """Let the client of one call leave."""
        self.apply(Abort(f"req-{key}", tenant, session_id))

    def delete(self, key: str = "key", tenant: str = "alpha") -> None:
        """Let the owner end the request."""
        self.apply(Abort(f"req-{key}", tenant))
