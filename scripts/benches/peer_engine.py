"""Drive the `fused` engine with nothing around it: `… IMAGE CONTEXT`, jobs on stdin, times of ids on stdout.

No scheduler, queue, tokenizer or socket: what it reaches is what the service's figure is set beside. A step carries an
id of every row that decodes, and prompts as far as PROMPT_TOKENS go. `peer_piped` describes the lines. Runs in a
process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benches.row_steps import GREEDY
from inference_api.backend.engines.base import Engine, RowPlan, SampleSpec, StepPlan
from inference_api.backend.main import load_engine
from inference_api.config import Settings
from inference_api.model_image import ModelImage

PROMPT_TOKENS = 512
"""Prompt tokens of a step."""


@dataclasses.dataclass(slots=True)
class Row:
    """One job in a row: its ids so far, how many of them are computed, when the drawn ones came."""

    ids: list[int]
    num_tokens: int
    sent_at: float
    num_computed: int = 0
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def timeline(self) -> tuple[float, list[float]]:
        """What stands in the answer."""
        return self.sent_at, self.times


class Rows:
    """Keep the engine's rows full of jobs until none is left."""

    def __init__(self, engine: Engine, jobs: Sequence[tuple[list[int], int]]) -> None:
        self._engine = engine
        self._waiting = iter(jobs)
        self._rows: dict[int, Row] = {}
        self.begun: list[Row] = []

    def run(self, num_users: int) -> None:
        """Compute all jobs, `num_users` at a time; blocks to the end of the last one."""
        for number in range(num_users):
            self._begin(number)
        while self._rows:
            self._step()

    def _begin(self, number: int) -> None:
        for prompt_ids, num_tokens in self._waiting:
            self._rows[number] = Row(list(prompt_ids), num_tokens, time.monotonic())
            self.begun.append(self._rows[number])
            return

    def _step(self) -> None:
        plan = self._plan()
        result = self._engine.execute(plan)
        now = time.monotonic()
        for planned in plan.rows:
            self._rows[planned.row].num_computed += len(planned.token_ids)
        for drawn in result.rows:
            if drawn.error is not None:
                raise RuntimeError(f"{drawn.error.code}: {drawn.error.message}")
            row = self._rows[drawn.row]
            row.ids += drawn.token_ids
            row.times += [now] * len(drawn.token_ids)
            if len(row.times) >= row.num_tokens:
                self._engine.release(drawn.row)
                del self._rows[drawn.row]
                self._begin(drawn.row)

    def _plan(self) -> StepPlan:
        budget = PROMPT_TOKENS
        plans = []
        for number, row in sorted(self._rows.items()):
            start = row.num_computed
            if row.times:
                chunk = row.ids[start:]
            else:
                chunk = row.ids[start : start + budget]
                budget -= len(chunk)
            if chunk:
                known = start + len(chunk)
                sample = SampleSpec(GREEDY, 0, known) if known == len(row.ids) else None
                plans.append(RowPlan(number, start, tuple(chunk), sample))
        return StepPlan(tuple(plans))


def main() -> int:
    """Load the engine, say so, then answer each line of stdin until it ends."""
    image, context_tokens = ModelImage.open(Path(sys.argv[1])), int(sys.argv[2])
    settings = dataclasses.replace(Settings.from_environ(), engine="fused")
    engine = load_engine(settings, image, context_tokens)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        rows = Rows(engine, request["jobs"])
        rows.run(request["users"])
        print(json.dumps([row.timeline for row in rows.begun]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
