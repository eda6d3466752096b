"""Name what the intake thread hands to the decode thread: the workers' messages, and some of its own.

Runs in PROCESS 2. Pure: knows no connections, no queue and no scheduler.
"""

from __future__ import annotations

import dataclasses

from inference_api.backend.mask_lanes import FormMask
from inference_api.backend.readers import Readers
from inference_api.messages import Abort, Dropped, Query, Submit


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerGone:
    """Say that a worker's connection is lost: its sessions have no reader any more."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True)
class MaskReady:
    """Say that a row which sat steps out for its mask may go on."""


@dataclasses.dataclass(frozen=True, slots=True)
class MaskedSubmit:
    """A Submit with a grammar, and what the grammar was compiled to: a mask for this one sequence."""

    submit: Submit
    mask: FormMask


@dataclasses.dataclass(frozen=True, slots=True)
class KeyedSubmit:
    """A Submit with an idempotency key, and its session as the first reader.

    One that `follows` computes nothing: it reads what another Submit with its key has made, or makes.
    """

    submit: Submit
    readers: Readers
    mask: FormMask | None = None
    follows: bool = False


InboxMessage = Submit | MaskedSubmit | KeyedSubmit | Abort | Query | Dropped | WorkerGone | MaskReady
