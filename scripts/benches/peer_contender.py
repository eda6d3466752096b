"""Fix what the `peers` bench asks of everything that it compares: jobs in, the times of tokens out.

A contender is a server or a process that is loaded once, and then takes turns with the others on the same cores;
between its turns it is held still. Knows neither how one is started nor what its figures are for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Protocol

from benches.streams import Answer

OURS, ENGINE = "ours", "engine_alone"
"""Names of this service and of its engine with nothing around it; every other contender is a peer."""


@dataclasses.dataclass(frozen=True, slots=True)
class PeerJob:
    """One greedy generation of exactly `num_tokens` ids; `text` encodes to exactly `prompt_ids`."""

    prompt_ids: tuple[int, ...]
    text: str
    num_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """One answer as its client saw it, in monotonic seconds: several tokens may share an arrival."""

    sent_at: float
    ended_at: float
    arrivals: tuple[float, ...]
    num_tokens: int

    @property
    def first_token_seconds(self) -> float:
        """From the send to the first token."""
        return self.arrivals[0] - self.sent_at

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """When each arrival but the first came, and the seconds since the one before it."""
        return [(later, later - earlier) for earlier, later in itertools.pairwise(self.arrivals)]


class Contender(Protocol):
    """Something loaded and ready to take a turn."""

    @property
    def pid(self) -> int:
        """The process whose tree holds all of its memory."""
        ...

    def serve(self, jobs: Sequence[PeerJob], num_users: int) -> list[Timeline]:
        """Run the jobs, `num_users` at a time and in their order; blocks to the end of the last one.

        Returns the timelines in the order in which the jobs were sent. Raises BenchError if an answer is not whole.
        """
        ...


def read_events(
    answer: Answer, is_token: Callable[[dict[str, object]], bool]
) -> tuple[list[float], list[dict[str, object]]]:
    """Take a stream of server-sent events apart: when each one came for which `is_token` holds, and all of them.

    An event may span chunks; it has arrived with the chunk that ends it.
    """
    arrivals: list[float] = []
    events: list[dict[str, object]] = []
    rest = b""
    for at, data in answer.chunks:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                event: dict[str, object] = json.loads(line.removeprefix(b"data: "))
                events.append(event)
                if is_token(event):
                    arrivals.append(at)
    return arrivals, events
