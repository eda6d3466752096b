"""Measure the edge: what letting a request in costs, how many connections the proxy holds, and who notices an attack.

Three parts, on the mock engine: the decision in microseconds and as a share of the time to the first token; memory for
each idle connection; first tokens without and beside each kind of slow client, in the same run, the clients' processor
time included. Raises BenchError for a wrong answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from benches import edge_decision
from benches.edge_clients import KINDS, Attack, Probe, first_tokens, resident_mib, worst
from benches.figures import spread_ms, table
from benches.service import Service, running_service

SETTINGS = {"INFERENCE_API_MOCK_TOKENS_PER_SECOND": "0"}


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: slow connections of a kind, idle ones, strangers who ask without a pause, first tokens,
    calls of the pure core.

    `opening_seconds` is how long the connections of a kind take to come; as long as the proxy waits for a head they
    are cut, and come again, one by one.
    """

    slow: int
    idle: int
    flood: int
    first_tokens: int
    calls: int
    opening_seconds: float = 10.0


SIZES = {
    "full": Size(slow=1000, idle=10_000, flood=100, first_tokens=1000, calls=20_000),
    "quick": Size(slow=1000, idle=2000, flood=100, first_tokens=300, calls=4000),
    "tiny": Size(slow=5, idle=10, flood=2, first_tokens=5, calls=40, opening_seconds=0.1),
}


def run(size_name: str) -> dict[str, object]:
    """Run all parts; return the figures."""
    size = SIZES[size_name]
    micros = edge_decision.run(size.calls)
    with running_service(SETTINGS) as service:
        kinds = {name: _attacked(service, name, size) for name in KINDS}
    alone = kinds["idle"].alone["p50"]
    print(_told(kinds), file=sys.stderr)
    return {
        "decision_us": micros,
        "decision_share_of_first_token_percent": {
            name: round((cost + micros["limits"] + micros["assertion_and_headers"]) / (10 * alone), 2)
            for name, cost in micros.items()
            if name.startswith("admit_")
        },
        "kinds": {name: figures.summary() for name, figures in kinds.items()},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What one kind of attack came to; first tokens in milliseconds."""

    num_connections: int
    alone: dict[str, float | int]
    beside: dict[str, float | int]
    probe: Probe
    mib_alone: float
    mib_attacked: float

    @property
    def kib_a_connection(self) -> float:
        """Memory of the proxy's process that a connection costs."""
        return round(1024 * (self.mib_attacked - self.mib_alone) / max(1, self.num_connections), 1)

    def summary(self) -> dict[str, object]:
        """Return what is printed."""
        return {
            "connections": self.num_connections,
            "first_token_ms_alone": self.alone,
            "first_token_ms_beside": self.beside,
            "health_ms": {
                "samples": len(self.probe.seconds),
                "failed": len(self.probe.faults),
                "max": worst(self.probe.seconds),
            },
            "proxy_mib_alone": self.mib_alone,
            "proxy_mib_attacked": self.mib_attacked,
            "proxy_kib_a_connection": self.kib_a_connection,
        }


def _attacked(service: Service, name: str, size: Size) -> Figures:
    number = {"idle": size.idle, "flood": size.flood, "flood_refused": size.flood}.get(name, size.slow)
    figures = asyncio.run(_attack(service, name, number, size))
    print(f"{number} of {name}: {figures.summary()}", file=sys.stderr)
    return figures


async def _attack(service: Service, name: str, number: int, size: Size) -> Figures:
    target, proxy = service.proxied, service.pids["proxy"]
    alone = await first_tokens(target, size.first_tokens)
    memory = resident_mib(proxy)
    attack, probe = Attack(target, KINDS[name], number, size.opening_seconds), Probe(target)
    async with attack.running():
        num_open, attacked_memory = attack.num_open, resident_mib(proxy)
        async with probe.running():
            beside = await first_tokens(target, size.first_tokens)
    return Figures(num_open, spread_ms(alone), spread_ms(beside), probe, memory, attacked_memory)


def _told(kinds: dict[str, Figures]) -> str:
    columns = ["kind", "connections", "alone ms", "beside ms", "KiB a connection"]
    lines = [
        [name, figures.num_connections, str(figures.alone), str(figures.beside), figures.kib_a_connection]
        for name, figures in kinds.items()
    ]
    return table(columns, lines)
