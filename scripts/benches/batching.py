"""Compare three ways to serve the same mixed requests with the real model, over HTTP and in turns.

Continuous: 32 users, who has an answer sends the next request. Static batches: 32 requests at once, the next 32 when
all have ended. One at a time: one user. The server is the same; only when the clients send differs, so that the
difference is what refilling rows between steps is worth.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence

from benches.figures import median, spread_ms
from benches.real_model import (
    NUM_USERS,
    Batch,
    load_tokenizer,
    prepare_image,
    run_jobs,
    running_model,
)
from benches.service import Target
from benches.workload import SIZES, Job, make_jobs

ROUNDS = {"full": 2, "quick": 1, "tiny": 1}
"""How often each way runs, by size."""

NUM_JOBS_ALONE = {"full": 4, "quick": 4, "tiny": 1}
"""How many of the jobs run one at a time, by size."""


def run(size_name: str) -> dict[str, object]:
    """Run each way in turns, as often as the size says; return the figures."""
    size, rounds = SIZES[size_name], ROUNDS[size_name]
    jobs = make_jobs(size.num_jobs, size.lengths, load_tokenizer(prepare_image()))
    ways: dict[str, tuple[Callable[[Target, Sequence[Job]], Batch], Sequence[Job]]] = {
        "continuous": (_continuous, jobs),
        "static_32": (_static, jobs),
        "one_at_a_time": (_one_at_a_time, jobs[: NUM_JOBS_ALONE[size_name]]),
    }
    batches: dict[str, list[Batch]] = {name: [] for name in ways}
    with running_model({}) as service:
        for _ in range(rounds):
            for name, (serve, its_jobs) in ways.items():
                batch = serve(service.direct, its_jobs)
                batches[name].append(batch)
                print(f"{name}: {batch.tokens_per_second:.1f} tokens/s, {batch.seconds:.1f} s", file=sys.stderr)
    rates = {name: median([batch.tokens_per_second for batch in runs]) for name, runs in batches.items()}
    return {
        "prompt_tokens": size.lengths.prompt,
        "answer_tokens": size.lengths.answer,
        "rounds": rounds,
        **{name: _summarize(runs) for name, runs in batches.items()},
        "continuous_over_static": round(rates["continuous"] / rates["static_32"], 2),
        "continuous_over_one_at_a_time": round(rates["continuous"] / rates["one_at_a_time"], 2),
    }


def _continuous(target: Target, jobs: Sequence[Job]) -> Batch:
    return run_jobs(target, jobs, NUM_USERS)


def _one_at_a_time(target: Target, jobs: Sequence[Job]) -> Batch:
    return run_jobs(target, jobs, 1)


def _static(target: Target, jobs: Sequence[Job]) -> Batch:
    batches = [run_jobs(target, jobs[start : start + NUM_USERS], NUM_USERS) for start in range(0, len(jobs), NUM_USERS)]
    return Batch(
        sum(batch.num_tokens for batch in batches),
        sum(batch.seconds for batch in batches),
        list(itertools.chain.from_iterable(batch.answers for batch in batches)),
    )


def _summarize(runs: Sequence[Batch]) -> dict[str, object]:
    answers = [answer for batch in runs for answer in batch.answers]
    return {
        "tokens_per_second": median([batch.tokens_per_second for batch in runs]),
        "requests_a_round": len(runs[0].answers),
        "tokens_a_round": runs[0].num_tokens,
        "first_token_ms": spread_ms([answer.first_token_seconds for answer in answers]),
        "gap_ms": spread_ms([gap for answer in answers for gap in answer.gaps]),
    }
