"""Say what a part of the campaign is: a module with `run(context: Context) -> dict[str, int]`, its own totals.

A part counts each check that it makes, passed or failed, and goes on after a failure if the next check can still mean
something; it raises CampaignError when none can. It draws at random from `context.random` alone, so that a seed repeats
it, and asks of the service what any client can. Knows no part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benches.service import running_service

MODEL = "smollm2-135m-instruct"
"""The name that every service of the campaign serves its model under."""

MODEL_START_SECONDS = 600.0
"""The first start on a machine prepares the model and compiles its kernels."""


class CampaignError(Exception):
    """End a part: something failed, and nothing that would follow means anything. Counts as one failed check."""


@dataclasses.dataclass(slots=True)
class Tally:
    """What the checks of a part came to: how many passed, and the names of the others with their fault or reason."""

    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    not_run: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceUnderTest:
    """A running service as its clients see it: the proxy's address, a bearer that is good for it, the model's name."""

    url: str
    direct_url: str
    """The server itself, without the proxy."""
    jwt: str
    model: str
    pids: Mapping[str, int]
    """Of the backend, the server's worker and the proxy's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """What a part is given: how much to do, where its randomness comes from, services, and a place to count checks."""

    part: str
    counts: Mapping[str, int]
    seed: int
    folder: Path
    """In the cache: for environments and for what is worth keeping between runs."""
    tally: Tally = dataclasses.field(default_factory=Tally)

    @property
    def random(self) -> random.Random:
        """Return a new generator, the same for the same seed and part, whatever other parts run."""
        return random.Random(f"{self.seed} {self.part}")

    def log(self, text: str) -> None:
        """Tell how far the part is, on stderr."""
        print(f"{self.part}: {text}", file=sys.stderr, flush=True)

    def count(self, name: str, fault: str | None = None) -> None:
        """Count one check as passed, or as failed with its fault, which is told at once."""
        if fault is None:
            self.tally.passed += 1
        else:
            self.tally.failed.append(f"{name}: {fault}")
            self.log(f"FAILED {name}: {fault}")

    def count_not_run(self, name: str, reason: str) -> None:
        """Count a check that this machine has no means for; in continuous integration that fails the campaign."""
        self.tally.not_run.append(f"{name}: {reason}")
        self.log(f"not run: {name}: {reason}")

    @contextlib.contextmanager
    def service(self, *, mock: bool = True, **settings: str) -> Iterator[ServiceUnderTest]:
        """Run the whole service behind its proxy until the block ends, with the mock engine or the real model.

        `settings` are environment variables by their names. Nothing of the caller's environment reaches it but where
        the model and the caches are. Raises BenchError, which ends the part, if it does not come up.
        """
        given = {"SERVED_MODEL_NAMES": MODEL, "INFERENCE_API_INSECURE_DEV": "0", **settings}
        start_seconds = 60.0 if mock else MODEL_START_SECONDS
        with running_service(given, mock=mock, start_seconds=start_seconds) as running:
            yield ServiceUnderTest(
                url=f"http://127.0.0.1:{running.proxied.port}",
                direct_url=f"http://127.0.0.1:{running.direct.port}",
                jwt=running.proxied.bearer or "",
                model=given["SERVED_MODEL_NAMES"].split(",")[0],
                pids=running.pids,
            )
