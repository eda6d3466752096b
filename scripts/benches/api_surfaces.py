"""Price each surface of the API over the raw route, on the mock engine: what its words cost beside the same tokens.

Paced, 32 rows at 100 steps a second: the server's processor time a token, the client's apart. Unthrottled, one request
for one token at a time: the time to it, and a request's processor time. Surfaces take turns within each round, and what
one adds is its figure less the raw route's of the same round. Every answer is checked digit by digit.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from benches.api_surface import MODEL, RAW, SURFACES, Reading, Surface
from benches.figures import median, spread_ms, table
from benches.frontend import NO_RATE, PACED_ROWS, STEPS_PER_SECOND
from benches.service import Service, running_service
from benches.streams import make_request, run_streams

COLUMNS = (
    *("surface", "server us/token", "over raw", "client us/token", "tokens/event"),
    *("one token p50 ms", "over raw", "server CPU ms/request", "over raw"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: tokens a paced stream, requests for one token a turn, and rounds."""

    tokens: int
    num_requests: int
    rounds: int


SIZES = {
    "full": Size(tokens=1000, num_requests=200, rounds=3),
    "quick": Size(tokens=200, num_requests=50, rounds=2),
    "tiny": Size(tokens=8, num_requests=2, rounds=1),
}


@dataclasses.dataclass(slots=True)
class Costs:
    """What a surface came to, a number a round, and the seconds to every single token."""

    token_us: list[float] = dataclasses.field(default_factory=list)
    client_us: list[float] = dataclasses.field(default_factory=list)
    tokens_per_event: list[float] = dataclasses.field(default_factory=list)
    request_ms: list[float] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def one_token_ms(self) -> list[float]:
        """The typical time of each round to a request's only token."""
        return [1000 * statistics.median(turn) for turn in self.seconds]

    def figures(self, raw: Costs) -> dict[str, object]:
        """Return the medians, and what they are over the raw route's."""
        return {
            "server_us_per_token": median(self.token_us),
            "server_us_per_token_over_raw": _over(self.token_us, raw.token_us, 1),
            "client_us_per_token": median(self.client_us),
            "tokens_per_event": median(self.tokens_per_event, 2),
            "one_token_ms": spread_ms([seconds for turn in self.seconds for seconds in turn]),
            "one_token_ms_over_raw": _over(self.one_token_ms, raw.one_token_ms, 2),
            "server_ms_per_request": median(self.request_ms, 2),
            "server_ms_per_request_over_raw": _over(self.request_ms, raw.request_ms, 2),
        }


def run(size_name: str) -> dict[str, object]:
    """Measure all surfaces; return the figures and print a table. Raises BenchError if any answer is not whole."""
    size = SIZES[size_name]
    costs = {surface.name: Costs() for surface in SURFACES}
    _measure_tokens(size, costs)
    _measure_requests(size, costs)
    figures = {name: its_costs.figures(costs[RAW.name]) for name, its_costs in costs.items()}
    print(surfaces_table(figures))
    return {"rows": PACED_ROWS, "steps_per_second": STEPS_PER_SECOND, "rounds": size.rounds, "surfaces": figures}


def surfaces_table(figures: Mapping[str, Mapping[str, object]]) -> str:
    """Return a line a surface."""
    lines = []
    for name, of in figures.items():
        one_token = of["one_token_ms"]
        p50 = one_token["p50"] if isinstance(one_token, dict) else None
        token = (of["server_us_per_token"], of["server_us_per_token_over_raw"], of["client_us_per_token"])
        request = (of["server_ms_per_request"], of["server_ms_per_request_over_raw"])
        lines.append((name, *token, of["tokens_per_event"], p50, of["one_token_ms_over_raw"], *request))
    return table(COLUMNS, lines)


def _measure_tokens(size: Size, costs: Mapping[str, Costs]) -> None:
    rate = str(PACED_ROWS * STEPS_PER_SECOND)
    with _running(INFERENCE_API_MOCK_TOKENS_PER_SECOND=rate, INFERENCE_API_ROWS=str(PACED_ROWS)) as service:
        for surface in SURFACES:
            _ask(service, surface, 1, PACED_ROWS, PACED_ROWS)  # its first request pays for what all others share
        for _ in range(size.rounds):
            for surface in SURFACES:
                before, client_before = service.cpu_seconds()["server"], time.process_time()
                readings, client = _ask(service, surface, size.tokens, PACED_ROWS, PACED_ROWS)
                num_tokens = size.tokens * PACED_ROWS
                of = costs[surface.name]
                of.token_us.append(1e6 * (service.cpu_seconds()["server"] - before) / num_tokens)
                of.client_us.append(1e6 * (client - client_before) / num_tokens)
                of.tokens_per_event.append(num_tokens / sum(len(reading.arrivals) for _, reading in readings))
                print(f"paced, {surface.name}: {of.token_us[-1]:.1f} us a token", file=sys.stderr)


def _measure_requests(size: Size, costs: Mapping[str, Costs]) -> None:
    with _running(INFERENCE_API_MOCK_TOKENS_PER_SECOND=NO_RATE) as service:
        for surface in SURFACES:
            _ask(service, surface, 1, 1, 1)
        for _ in range(size.rounds):
            for surface in SURFACES:
                before = service.cpu_seconds()["server"]
                readings, _ = _ask(service, surface, 1, size.num_requests, 1)
                of = costs[surface.name]
                of.request_ms.append(1e3 * (service.cpu_seconds()["server"] - before) / size.num_requests)
                of.seconds.append([reading.arrivals[0] - sent_at for sent_at, reading in readings])
                print(f"one token, {surface.name}: {of.request_ms[-1]:.2f} ms of CPU a request", file=sys.stderr)


def _running(**settings: str) -> AbstractContextManager[Service]:
    return running_service({"INFERENCE_API_SERVED_MODEL_NAMES": MODEL, **settings})


def _ask(
    service: Service, surface: Surface, tokens: int, num_requests: int, num_users: int
) -> tuple[list[tuple[float, Reading]], float]:
    """Send the requests; return when each was sent and what was read, and the client's processor time before that."""
    request = make_request(service.direct, surface.path, surface.body(tokens))
    recordings = run_streams(service.direct, [request] * num_requests, num_users)
    client_seconds = time.process_time()
    readings = [(recording.sent_at, surface.read(recording.parse())) for recording in recordings]
    for _, reading in readings:
        reading.check_digits(tokens)
    return readings, client_seconds


def _over(values: Sequence[float], raw: Sequence[float], digits: int) -> float:
    """Return the median of what each round's figure is over the raw route's."""
    return median([value - base for value, base in zip(values, raw, strict=True)], digits)
