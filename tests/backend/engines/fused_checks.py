"""Record the logits of every draw of the `fused` engine, and set a job's alone beside those in company."""

from __future__ import annotations

import random

import torch

from inference_api.backend.engines.base import StepPlan, StepResult
from inference_api.backend.engines.fused import FusedEngine
from tests.backend.engines import tiny_models as tiny

Trace = dict[int, list[torch.Tensor]]


class Recorded:
    """An engine that keeps the logits of every draw, by the choice that the job carries."""

    def __init__(self, engine: FusedEngine) -> None:
        self._engine = engine
        self.info = engine.info
        self.release = engine.release
        self.traces: Trace = {}

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._engine.execute(plan)
        drawing = [row.sample for row in plan.rows if row.sample is not None]
        # A row that is refused or drafts has none or several logits, and all after it would be taken for another's.
        assert [len(row.token_ids) for row in result.rows] == [1] * len(drawing)
        for sample, logits in zip(drawing, self._engine._logits[: len(drawing)], strict=True):
            self.traces.setdefault(sample.choice, []).append(logits.clone())
        return result


def traces_of(engine: FusedEngine, jobs: list[tiny.Job], chunk_tokens: int, seed: int) -> Trace:
    """Take jobs through rows chosen at random; return the logits of each."""
    for choice, job in enumerate(jobs):
        job.choice = choice
    recorded = Recorded(engine)
    chooser = random.Random(seed)
    tiny.drive(recorded, jobs, chunk_tokens, row_of=lambda free: chooser.choice(sorted(free)))
    return recorded.traces


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Say whether two traces are equal in every bit; no two kinds of zero or NaN are taken for one."""
    return len(first) == len(second) and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, second, strict=True)
    )


def is_independent(engine: FusedEngine, prompts: list[list[int]], num_tokens: int, seed: int) -> bool:
    """Say whether every prompt gives the same ids and logits alone, and among all others in random chunks and rows."""
    chooser = random.Random(seed)
    jobs = [tiny.Job(prompt, num_tokens, arrival=chooser.randrange(12)) for prompt in prompts]
    together = traces_of(engine, jobs, chooser.randint(1, 40), seed)
    for choice, job in enumerate(jobs):
        alone = tiny.Job(job.prompt, num_tokens)
        trace = traces_of(engine, [alone], chooser.randint(1, 200), seed + choice)[0]
        if alone.output != job.output or not same_bits(trace, together[choice]):
            return False
    return True
