"""Own what can be asked about requests: which sequences each one has, and the figures of the last that ended.

Pure; used by the scheduler alone, in the decode thread. A request belongs to its tenant: a foreign one is unknown.
Knows nothing of rows or of who runs.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence as Several

from inference_api.backend.sequence import Sequence
from inference_api.backend.views import request_view
from inference_api.messages import RequestView

MAX_ENDED_REQUESTS = 1024
"""Ended requests whose figures can still be asked for."""


class RequestRecords:
    """Find the open sequences of a request, and the view of one that ended."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[Sequence]] = {}
        self._ended: collections.OrderedDict[tuple[str, str], RequestView] = collections.OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Record a sequence that has just come."""
        self._open.setdefault(_key(sequence), []).append(sequence)

    def end(self, sequence: Sequence, now: float) -> None:
        """Record that a sequence has finished; the oldest record goes when there are too many."""
        key = _key(sequence)
        self._open[key].remove(sequence)
        if not self._open[key]:
            del self._open[key]
        self._ended[key] = request_view(sequence, now)
        self._ended.move_to_end(key)
        if len(self._ended) > MAX_ENDED_REQUESTS:
            self._ended.popitem(last=False)

    def open_sequences(self, tenant: str, request_id: str) -> list[Sequence]:
        """Return the sequences of a tenant's request that have not ended."""
        return list(self._open.get((tenant, request_id), ()))

    def view(self, tenant: str, request_id: str, now: float, waiting: Several[Sequence]) -> RequestView | None:
        """Return a tenant's request as it may see it; None if there is none of that name, or no more."""
        sequences = self._open.get((tenant, request_id))
        return request_view(sequences[0], now, waiting) if sequences else self._ended.get((tenant, request_id))


def _key(sequence: Sequence) -> tuple[str, str]:
    return sequence.submit.tenant, sequence.submit.request_id
