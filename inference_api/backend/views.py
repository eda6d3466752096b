"""Turn sequences into the views that cross the wire: a tenant sees its own, and of the others only that a row is taken.

Pure; used by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.messages import RequestView, RowView


def row_view(row: int, sequence: Sequence | None, tenant: str, now: float) -> RowView:
    """Return one row as `tenant` may see it."""
    if sequence is None:
        return RowView(row, "free")
    if sequence.submit.tenant != tenant:
        return RowView(row, "other")
    return RowView(
        row=row,
        state=sequence.status.value,
        tenant=tenant,
        request_id=sequence.submit.request_id,
        num_prompt_tokens=sequence.submit.num_prompt_tokens,
        num_completion_tokens=sequence.num_completion_tokens,
        running_seconds=round(sequence.running_seconds(now), 3),
    )


def request_view(sequence: Sequence, now: float, waiting: Several[Sequence] = ()) -> RequestView:
    """Return a request's state; `waiting` is the queue in which its place is counted. One that waits has no row."""
    has_had_row = sequence.row >= 0 and sequence.status is not SequenceStatus.WAITING
    return RequestView(
        request_id=sequence.submit.request_id,
        state=sequence.status.value,
        num_prompt_tokens=sequence.submit.num_prompt_tokens,
        num_completion_tokens=sequence.num_completion_tokens,
        place=next((place for place, other in enumerate(waiting, 1) if other is sequence), None),
        row=sequence.row if has_had_row else None,
        finish_reason=sequence.finish_reason,
        timing=sequence.timing(now),
        error=sequence.error,
    )
