"""Hold what the parts that break a running service share: one run, its service, and its checks.

Each round draws from the seed and its own name alone, however many draws an earlier one made. Knows no fault.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator

import requests

from campaigns.part import Context
from tests.integration.service import Service


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One run of a part: where it counts, the service that it breaks, and its totals."""

    context: Context
    service: Service
    totals: dict[str, int]

    @property
    def port(self) -> int:
        """The proxy's."""
        return self.service.proxy_port or 0

    def random(self, name: str) -> random.Random:
        """Return a round's own generator."""
        return random.Random(f"{self.context.seed} {self.context.part} {name}")


@contextlib.contextmanager
def checked(context: Context, name: str) -> Iterator[None]:
    """Count the block as one check, which an AssertionError or a call without an answer fails."""
    fault = None
    try:
        yield
    except (AssertionError, requests.RequestException) as error:
        fault = f"{type(error).__name__}: {error}"
    context.count(name, fault)


def is_ready(service: Service) -> bool:
    """Tell whether /health/ready says 200; False while nobody listens."""
    try:
        return service.get("/health/ready").status_code == 200
    except requests.RequestException:
        return False
