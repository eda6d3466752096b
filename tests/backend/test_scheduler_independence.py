"""Check that a row's ids depend on its own prompt and seed alone, through scheduler and mock engine together.

Whatever happens around a request: neighbours, rows, chunks, a bound on the KV cache, prefixes of other requests and
other tenants, drafts. Controls that break an engine on purpose show that the check can fail.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_api.backend.engines.base import RowResult, StepPlan, StepResult
from inference_api.backend.engines.mock import MockEngine, MockScript
from inference_api.backend.step_planning import SchedulerOptions
from inference_api.messages import QueryKind
from tests.backend.factories import DIGITS, ECHO, NOISE, Rig

_TEXT = st.binary(min_size=1, max_size=40).filter(lambda text: 0 not in text)
CONTEXT_TOKENS = 128
NUM_HISTORIES = 60


@settings(max_examples=60, deadline=None)
@given(data=st.data(), prompt=_TEXT, seed=st.integers(0, 2**63 - 1))
def test_ids_depend_on_prompt_and_seed_alone_whatever_the_neighbours_row_chunks_and_batch(
    data: st.DataObject, prompt: bytes, seed: int
) -> None:
    alone = Rig(1)
    alone.submit("own", prompt, seed=seed, max_tokens=12)
    alone.run()
    chunk = data.draw(st.integers(1, 40), "chunk")
    rig = Rig(data.draw(st.integers(1, 32), "rows"), budget=(chunk, chunk), queue=(99, 65536))
    known = data.draw(st.integers(0, 8), "ids known from an earlier attempt")
    num_before = data.draw(st.integers(0, rig.engine.info.num_rows - 1), "neighbours before")
    for number in range(num_before):
        rig.submit(f"before-{number}", bytes([97 + number]) * 3, max_tokens=30, seed=number)
    for _ in range(data.draw(st.integers(0, 5), "steps before")):
        rig.step()
    rig.submit("own", prompt + bytes(alone.ids["own"][:known]), num_prompt_tokens=len(prompt), seed=seed, max_tokens=12)
    for number in range(200):
        if "own" in rig.ends:
            break
        match data.draw(st.sampled_from(["step", "come", "leave"]), "event"):
            case "come" if number < 20:
                rig.submit(f"after-{number}", b"neighbour", max_tokens=5, seed=number)
            case "leave" if num_before:
                rig.abort(f"before-{number % num_before}")
        rig.step()
    rig.run()
    assert rig.ids["own"] == alone.ids["own"][known:]


@dataclasses.dataclass(frozen=True)
class Job:
    """One request of a history, and the step before which it comes and may be aborted."""

    prompt: bytes
    seed: int
    tenant: str
    max_tokens: int
    comes_at: int
    aborted_at: int | None


def make_jobs(chance: random.Random) -> list[Job]:
    """Draw requests that share much of their text, as the turns of a few conversations do."""
    stems = [bytes(chance.choices(b"abcd ", k=chance.randint(20, 60))) for _ in range(3)]
    return [
        Job(
            prompt=chance.choice(stems)[: chance.randint(10, 60)]
            + bytes(chance.choices(b"xyz", k=chance.randint(1, 30))),
            seed=chance.randint(0, 3),
            tenant=chance.choice(["alpha", "alpha", "beta"]),
            max_tokens=chance.randint(1, 40),
            comes_at=chance.randint(0, 40),
            aborted_at=chance.randint(0, 90) if chance.random() < 0.2 else None,
        )
        for _ in range(chance.randint(4, 24))
    ]


def play(rig: Rig, jobs: list[Job]) -> None:
    """Let every job come at its step, be aborted at its step, and run to its end."""
    for step in range(91):
        for number, job in enumerate(jobs):
            if job.comes_at == step:
                rig.submit(f"s{number}", job.prompt, seed=job.seed, tenant=job.tenant, max_tokens=job.max_tokens)
            if job.aborted_at == step:
                rig.abort(f"s{number}", job.tenant)
        rig.step()
    rig.run()


def ids_alone(job: Job, mode: MockScript) -> list[int]:
    """Return the ids of a job that nothing else touches."""
    rig = Rig(1, script=mode, context_tokens=CONTEXT_TOKENS)
    rig.submit("own", job.prompt, seed=job.seed, max_tokens=job.max_tokens)
    rig.run()
    return rig.ids["own"]


def wrong_jobs(seed: int, mode: MockScript, break_engine: Callable[[MockEngine], None]) -> tuple[int, dict[str, float]]:
    """Play a random history with everything shared; return how many jobs got other ids than alone, and the figures."""
    chance = random.Random(seed)
    chunk = chance.randint(4, 64)
    options = SchedulerOptions(chance.choice([0, CONTEXT_TOKENS, 160, 200]), True, chance.randint(1, 8))
    rig = Rig(
        chance.choice([1, 2, 3, 8]),
        script=mode,
        context_tokens=CONTEXT_TOKENS,
        queue=(99, 65536),
        budget=(chunk, chunk),
        options=options,
    )
    break_engine(rig.engine)
    jobs = make_jobs(chance)
    play(rig, jobs)
    num_wrong = 0
    for number, job in enumerate(jobs):
        made, expected = rig.ids[f"s{number}"], ids_alone(job, mode)
        num_wrong += made != (expected if job.aborted_at is None else expected[: len(made)])
    return num_wrong, rig.query(QueryKind.METRICS).metrics


@pytest.mark.parametrize("mode", [NOISE, ECHO, DIGITS], ids=lambda mode: mode.mode)
def test_prefixes_preemption_and_drafts_change_no_id_of_any_request(mode: MockScript) -> None:
    figures = {"prefix_hits": 0.0, "preemptions": 0.0, "accepted_draft_tokens": 0.0}
    for seed in range(NUM_HISTORIES):
        num_wrong, metrics = wrong_jobs(seed, mode, lambda engine: None)
        assert num_wrong == 0, f"history {seed}"
        for name in figures:
            figures[name] += metrics.get(name, 0)
    assert min(figures.values()) > 10, figures


def keep_stale_ids(engine: MockEngine) -> None:
    """Break an engine: a row that begins with a prefix of its own keeps an id too many, one too old."""
    execute = engine.execute

    def stale(plan: StepPlan) -> StepResult:
        for row in plan.rows:
            if row.prefix is not None:
                held = engine._rows[row.prefix.source_row]
                held[row.prefix.num_tokens - 1] = held[0] ^ 1
        return execute(plan)

    engine.execute = stale


def accept_wrong_drafts(engine: MockEngine) -> None:
    """Break an engine: it keeps the first draft of a row whatever the draw says."""
    execute = engine.execute

    def accepting(plan: StepPlan) -> StepResult:
        results = {result.row: result for result in execute(plan).rows}
        for row in plan.rows:
            if row.draft_ids and results[row.row].token_ids[0] != row.draft_ids[0]:
                engine._rows[row.row].append(row.draft_ids[0])
                results[row.row] = RowResult(row.row, (row.draft_ids[0], results[row.row].token_ids[0]))
        return StepResult(tuple(results.values()))

    engine.execute = accepting


@pytest.mark.parametrize("break_engine", [keep_stale_ids, accept_wrong_drafts])
def test_an_engine_that_shares_wrongly_is_caught(break_engine: Callable[[MockEngine], None]) -> None:
    assert sum(wrong_jobs(seed, NOISE, break_engine)[0] for seed in range(5)) > 0
