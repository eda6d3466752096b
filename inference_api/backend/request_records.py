"""Own what can be asked about requests: which sequences each one has, and the figures of those that ended.

Pure; used by the scheduler alone, in the decode thread. A request belongs to its tenant: a foreign one is unknown.
Knows nothing of rows or of who runs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from inference_api.backend.sequence import Sequence
from inference_api.backend.views import folded_view, request_view
from inference_api.messages import RequestView

MAX_ENDED_REQUESTS = 1024
"""Ended requests whose figures can still be asked for."""


Ended = dict[int, RequestView]
"""What has ended of a request, by part: a part of a call with an idempotency key that is gone on with counts once.

Of calls without a key all that has ended is one part, _UNKEYED.
"""

_UNKEYED = -1


@dataclasses.dataclass(slots=True)
class _OpenRequest:
    """A request that has not ended: its open sequences, and views of those that have ended."""

    sequences: list[Sequence]
    ended: Ended


class RequestRecords:
    """Find the open sequences of a request, and one view of all that it has and had."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _OpenRequest] = {}
        self._ended: collections.OrderedDict[tuple[str, str], Ended] = collections.OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Record a sequence that has just come, maybe after the others of its request have ended."""
        key = _key(sequence)
        if key not in self._open:
            self._open[key] = _OpenRequest([], self._ended.pop(key, {}))
        self._open[key].sequences.append(sequence)
        if _part(sequence) != _UNKEYED:
            self._open[key].ended.pop(_part(sequence), None)

    def end(self, sequence: Sequence, now: float) -> None:
        """Record that a sequence has finished; the oldest record goes when there are too many."""
        key = _key(sequence)
        request = self._open[key]
        request.sequences.remove(sequence)
        part, view = _part(sequence), request_view(sequence, now)
        earlier = request.ended.get(part) if part == _UNKEYED else None
        request.ended[part] = view if earlier is None else folded_view([earlier, view])
        if request.sequences:
            return
        del self._open[key]
        self._ended[key] = request.ended
        if len(self._ended) > MAX_ENDED_REQUESTS:
            self._ended.popitem(last=False)

    def open_sequences(self, tenant: str, request_id: str) -> list[Sequence]:
        """Return the sequences of a tenant's request that have not ended."""
        request = self._open.get((tenant, request_id))
        return list(request.sequences) if request is not None else []

    def view(self, tenant: str, request_id: str, now: float, waiting: Iterable[Sequence]) -> RequestView | None:
        """Return a tenant's request as it may see it; None if there is none of that name, or no more.

        Several sequences, of one call or of calls that share a name, are told as one (`folded_view`): each prompt's ids
        count once and every completion's count.
        """
        request = self._open.get((tenant, request_id))
        if request is None:
            ended = self._ended.get((tenant, request_id))
            return folded_view(list(ended.values())) if ended is not None else None
        views = [request_view(sequence, now, waiting) for sequence in request.sequences]
        return folded_view([*request.ended.values(), *views])


def _key(sequence: Sequence) -> tuple[str, str]:
    return sequence.submit.tenant, sequence.submit.request_id


def _part(sequence: Sequence) -> int:
    idempotency = sequence.submit.idempotency
    return _UNKEYED if idempotency is None else idempotency.part
