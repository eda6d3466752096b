"""Name what the intake thread hands to the decode thread: the workers' messages, and two of its own.

Runs in PROCESS 2. Pure: knows no connections, no queue and no scheduler.
"""

from __future__ import annotations

import dataclasses

from inference_api.backend.engines.base import TokenMask
from inference_api.messages import Abort, Dropped, Query, Submit


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerGone:
    """Say that a worker's connection is lost: its sessions have no reader any more."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedSubmit:
    """A Submit with a grammar, and what the grammar was compiled to: a mask for this one sequence."""

    submit: Submit
    mask: TokenMask


InboxMessage = Submit | MaskedSubmit | Abort | Query | Dropped | WorkerGone
