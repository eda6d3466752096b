"""Turn sequences into the views that cross the wire: a tenant sees its own, and of the others only that a row is taken.

Pure; used by the scheduler alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several

from inference_api.backend.sequence import Sequence, SequenceStatus
from inference_api.messages import RequestView, RowView

_STATES = [
    status.value
    for status in (
        SequenceStatus.DECODING,
        SequenceStatus.PREFILLING,
        SequenceStatus.WAITING,
        SequenceStatus.FINISHED,
    )
]
"""A request is in the first of these that one of its sequences is in."""


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


def request_view(sequence: Sequence, now: float, waiting: Iterable[Sequence] = ()) -> RequestView:
    """Return what one sequence makes its request look like; `waiting` is the queue in which its place is counted.

    One that waits has no row. A prompt's ids count with the first of its answers alone: the others share it.
    """
    is_first = sequence.submit.choice == 0
    has_had_row = sequence.row >= 0 and sequence.status is not SequenceStatus.WAITING
    return RequestView(
        request_id=sequence.submit.request_id,
        state=sequence.status.value,
        num_prompt_tokens=sequence.submit.num_prompt_tokens if is_first else 0,
        num_completion_tokens=sequence.num_completion_tokens,
        place=next((place for place, other in enumerate(waiting, 1) if other is sequence), None),
        row=sequence.row if has_had_row else None,
        finish_reason=sequence.finish_reason,
        timing=sequence.timing(now),
        error=sequence.error,
        num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
    )


def folded_view(views: Several[RequestView]) -> RequestView:
    """Return one view of a request's sequences, of which those that have ended come first, in the order of their ends.

    Token counts are sums. The state is that of the sequence that is farthest without having ended; the place, while
    none runs, that of the next to run. The end is the last one, or the first failure, and none while one is open.
    Several sequences have neither one row nor one timing.
    """
    if len(views) == 1:
        return views[0]
    failed = next((view for view in views if view.error is not None), None)
    state = min((view.state for view in views), key=_STATES.index)
    is_ended = state == SequenceStatus.FINISHED.value
    places = [view.place for view in views if view.place is not None]
    return RequestView(
        request_id=views[0].request_id,
        state=state,
        num_prompt_tokens=sum(view.num_prompt_tokens for view in views),
        num_completion_tokens=sum(view.num_completion_tokens for view in views),
        place=min(places, default=None) if state == SequenceStatus.WAITING.value else None,
        finish_reason=(failed or views[-1]).finish_reason if is_ended else None,
        error=failed.error if failed is not None else None,
        num_cached_tokens=sum(view.num_cached_tokens for view in views),
    )
