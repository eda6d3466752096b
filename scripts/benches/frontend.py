"""Measure the front end alone: server and proxy in front of the mock engine, which costs next to nothing.

Three parts. Unthrottled: how many tokens a second reach the clients, beside a bare Flask generator; the mock makes
blocks of ids a row and step, as a speculating engine does, and for comparison single ones. Paced: 32 rows at 100 steps
a second, what a token costs and whether any comes late or in company. First token: what the server adds to the engine
and the proxy to the server. What is compared is run in turns. Every answer is checked digit by digit.
"""

from __future__ import annotations

import dataclasses
import sys
import time

from benches.figures import median, spread_ms
from benches.service import BenchError, Service, Target, running_service, running_wsgi
from benches.streams import Answer, make_request, run_streams

TEXT = "count"
PACED_ROWS = 32
STEPS_PER_SECOND = 100
UNTHROTTLED_ROWS = 256
LATE_SECONDS = 2.0 / STEPS_PER_SECOND
"""A gap of two steps: one token was late by a whole step."""

NO_RATE = "0"
ENDLESS_RATE = "1e12"
"""A rate that is never reached: unlike no rate at all, it keeps the mock at one id a row and step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """How much a run measures: tokens a stream, streams that follow one another, repeats, first tokens."""

    tokens: int
    num_in_a_row: int
    rounds: int
    paced_tokens: int
    first_tokens: int


SIZES = {
    "full": Size(tokens=2000, num_in_a_row=8, rounds=5, paced_tokens=2000, first_tokens=1000),
    "quick": Size(tokens=2000, num_in_a_row=2, rounds=2, paced_tokens=500, first_tokens=100),
    "tiny": Size(tokens=8, num_in_a_row=1, rounds=1, paced_tokens=8, first_tokens=3),
}


def run(size_name: str) -> dict[str, object]:
    """Run all parts; return the figures. Raises BenchError if any answer is not what it must be."""
    size = SIZES[size_name]
    return {
        "unthrottled": _unthrottled(size) | _one_token_a_step(size),
        "paced": _paced(size),
        "first_token_ms": _first_tokens(size),
    }


def _unthrottled(size: Size) -> dict[str, object]:
    """Run each number of streams through each front in turns."""
    settings = {"INFERENCE_API_ROWS": str(UNTHROTTLED_ROWS), "INFERENCE_API_MOCK_TOKENS_PER_SECOND": NO_RATE}
    loads: dict[str, list[Load]] = {}
    with running_service(settings) as service, running_wsgi("benches.bare_flask:create_app()", settings) as bare:
        fronts = {"direct": service.direct, "proxy": service.proxied, "bare_flask": bare}
        for _ in range(size.rounds):
            for num_streams in (PACED_ROWS, UNTHROTTLED_ROWS):
                # The same number of tokens for each number of streams, so that runs last alike.
                num_requests = max(num_streams, size.num_in_a_row * PACED_ROWS)
                for name, target in fronts.items():
                    load = _load(target, num_streams, num_requests, size.tokens)
                    loads.setdefault(f"{name}_{num_streams}_streams", []).append(load)
                    print(f"unthrottled, {name}, {num_streams} streams: {load}", file=sys.stderr)
    figures: dict[str, object] = {name: _summarize_loads(its_loads) for name, its_loads in loads.items()}
    return {"rows": UNTHROTTLED_ROWS, "rounds": size.rounds, "errors": 0, **figures}


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What arrived as fast as it could."""

    tokens_per_second: float
    tokens_per_chunk: float

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s, {self.tokens_per_chunk:.1f} a chunk"


def _summarize_loads(loads: list[Load]) -> dict[str, float]:
    return {
        "tokens_per_second": median([load.tokens_per_second for load in loads], 0),
        "tokens_per_chunk": median([load.tokens_per_chunk for load in loads]),
    }


def _one_token_a_step(size: Size) -> dict[str, object]:
    """Run 32 streams with one id a row and step: the backend's scheduler is part of what is measured then."""
    settings = {"INFERENCE_API_ROWS": str(PACED_ROWS), "INFERENCE_API_MOCK_TOKENS_PER_SECOND": ENDLESS_RATE}
    with running_service(settings) as service:
        loads = [
            _load(service.direct, PACED_ROWS, PACED_ROWS * size.num_in_a_row, size.tokens) for _ in range(size.rounds)
        ]
    print(f"one token a step: {loads[-1]}", file=sys.stderr)
    return {"direct_32_streams_one_token_a_step": _summarize_loads(loads)}


def _load(target: Target, num_streams: int, num_requests: int, tokens: int) -> Load:
    request = _digits_request(target, tokens)
    recordings = run_streams(target, [request] * num_requests, num_streams)
    seconds = max(r.reads[-1][0] for r in recordings) - min(r.sent_at for r in recordings)
    num_chunks = 0
    for recording in recordings:
        answer = recording.parse()
        check_digits(answer, tokens)
        num_chunks += len(answer.chunks)
    return Load(num_requests * tokens / seconds, num_requests * tokens / num_chunks)


def _digits_request(target: Target, tokens: int, path: str = "/inference/falcon40b") -> bytes:
    return make_request(target, path, {"text": TEXT, "max_tokens": tokens})


def check_digits(answer: Answer, tokens: int) -> None:
    """Raise BenchError unless the answer is every digit that was ordered, in order, the first in its own chunk."""
    start = len(TEXT)
    expected = bytes(ord("0") + position % 10 for position in range(start, start + tokens))
    if answer.body != expected:
        raise BenchError(f"{len(answer.body)} digits of {tokens}, or wrong ones: {answer.body[:64]!r}")
    if len(answer.chunks[0][1]) != 1:
        raise BenchError(f"the first token came with others: {answer.chunks[0][1][:64]!r}")


def _paced(size: Size) -> dict[str, object]:
    """Run 32 rows at a fixed rate, directly and through the proxy in turns; return costs and lateness."""
    rate = PACED_ROWS * STEPS_PER_SECOND
    settings = {"INFERENCE_API_ROWS": str(PACED_ROWS), "INFERENCE_API_MOCK_TOKENS_PER_SECOND": str(rate)}
    runs: dict[str, list[PacedRun]] = {"direct": [], "proxy": []}
    with running_service(settings) as service:
        for _ in range(size.rounds):
            for name, target in (("direct", service.direct), ("proxy", service.proxied)):
                paced = _paced_run(service, target, size.paced_tokens)
                runs[name].append(paced)
                costs = ", ".join(f"{role} {cost:.1f}" for role, cost in paced.micros.items())
                print(f"paced, {name}: us a token: {costs}", file=sys.stderr)
    figures: dict[str, object] = {"rows": PACED_ROWS, "tokens_per_second": rate, "rounds": size.rounds}
    return figures | {name: _summarize(paced_runs) for name, paced_runs in runs.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class PacedRun:
    """What one paced run showed: processor time in microseconds a token, gaps, tokens that came in company."""

    micros: dict[str, float]
    gaps: list[float]
    num_chunks: int
    num_joined: int


def _paced_run(service: Service, target: Target, tokens: int) -> PacedRun:
    before, client_before = service.cpu_seconds(), time.process_time()
    recordings = run_streams(target, [_digits_request(target, tokens)] * PACED_ROWS, PACED_ROWS)
    spent = {role: seconds - before[role] for role, seconds in service.cpu_seconds().items()}
    spent["client"] = time.process_time() - client_before
    answers = [recording.parse() for recording in recordings]
    for answer in answers:
        check_digits(answer, tokens)
    chunks = [data for answer in answers for _, data in answer.chunks]
    return PacedRun(
        micros={role: 1e6 * seconds / (PACED_ROWS * tokens) for role, seconds in spent.items()},
        gaps=[gap for answer in answers for gap in answer.gaps],
        num_chunks=len(chunks),
        num_joined=sum(len(data) > 1 for data in chunks),
    )


def _summarize(runs: list[PacedRun]) -> dict[str, object]:
    gaps = [gap for run in runs for gap in run.gaps]
    micros = {role: median([run.micros[role] for run in runs]) for role in runs[0].micros}
    return {
        "cpu_us_per_token": micros,
        "gap_ms": spread_ms(gaps),
        "chunks": sum(run.num_chunks for run in runs),
        "chunks_with_several_tokens": sum(run.num_joined for run in runs),
        f"gaps_over_{1000 * LATE_SECONDS:.0f}_ms": sum(gap > LATE_SECONDS for gap in gaps),
    }


def _first_tokens(size: Size) -> dict[str, object]:
    """Ask for one token at a time, directly and through the proxy in turns, a connection each, nothing else running."""
    direct: list[float] = []
    proxied: list[float] = []
    added_by_server: list[float] = []
    with running_service({"INFERENCE_API_MOCK_TOKENS_PER_SECOND": NO_RATE}) as service:
        for _ in range(size.first_tokens):
            seconds, engine_seconds = _first_token(service.direct)
            direct.append(seconds)
            added_by_server.append(seconds - engine_seconds)
            proxied.append(_first_token(service.proxied)[0])
    added_by_proxy = [through - without for through, without in zip(sorted(proxied), sorted(direct), strict=True)]
    return {
        "direct": spread_ms(direct),
        "through_proxy": spread_ms(proxied),
        "added_by_server_over_engine": spread_ms(added_by_server),
        "added_by_proxy_at_equal_rank": spread_ms(added_by_proxy),
    }


def _first_token(target: Target) -> tuple[float, float]:
    """Return the seconds to a client's first token, and those that the backend counts from the Submit's arrival."""
    (recording,) = run_streams(target, [_digits_request(target, 1)], 1)
    answer = recording.parse()
    check_digits(answer, 1)
    stats = target.get_json(f"/v1/requests/{answer.headers['request-id']}")["stats"]
    if not isinstance(stats, dict):
        raise BenchError(f"the request has no figures: {stats!r}")
    return answer.first_token_seconds, float(stats["user_ttft_e2e_ms"]) / 1000
