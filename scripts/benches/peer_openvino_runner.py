"""Drive OpenVINO GenAI's continuous batching pipeline: `… MODEL.gguf ROWS`, jobs on stdin, times of tokens on stdout.

Runs in that peer's own environment and imports nothing of this project; `peer_piped` describes the lines. Who has an
end submits the next job, between two steps of the pipeline.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

CACHE_GIB = 2
STEP_TOKENS = 256
"""Tokens a step, the pipeline's own default; twice as many were no faster at 32 users."""


class Users:
    """Submit jobs to a pipeline and note when their tokens come."""

    def __init__(self, pipeline: Any, jobs: list[tuple[list[int], int]]) -> None:
        self._genai, self._openvino, self._numpy = map(importlib.import_module, ("openvino_genai", "openvino", "numpy"))
        self._pipeline = pipeline
        self._waiting: Iterator[tuple[int, tuple[list[int], int]]] = iter(enumerate(jobs))
        self._running: dict[int, tuple[Any, int]] = {}
        self.timelines: list[tuple[float, list[float]]] = []

    def run(self, num_users: int) -> None:
        """Run all jobs, `num_users` at a time; blocks to the end of the last one."""
        for _ in range(num_users):
            self._submit_next()
        while self._running:
            self._pipeline.step()
            now = time.monotonic()
            for number, (handle, num_tokens) in list(self._running.items()):
                arrivals = self.timelines[number][1]
                while handle.can_read():
                    arrivals += [now] * sum(len(output.generated_ids) for output in handle.read().values())
                if len(arrivals) >= num_tokens:
                    del self._running[number]
                    self._submit_next()

    def _submit_next(self) -> None:
        for number, (prompt_ids, num_tokens) in self._waiting:
            wanted = self._genai.GenerationConfig()
            wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = num_tokens, True, False
            ids = self._openvino.Tensor(self._numpy.array([prompt_ids], dtype=self._numpy.int64))
            self.timelines.append((time.monotonic(), []))
            self._running[number] = self._pipeline.add_request(number, ids, wanted), num_tokens
            return


def load(model: str, num_rows: int) -> Any:
    """Return the pipeline on all cores, with nothing of a prompt reused; blocks for seconds."""
    genai = importlib.import_module("openvino_genai")
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = CACHE_GIB, num_rows
    scheduling.max_num_batched_tokens, scheduling.dynamic_split_fuse = STEP_TOKENS, True
    scheduling.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(model, scheduling, "CPU", {})


def main() -> int:
    """Load the pipeline, say so, then answer each line of stdin until it ends."""
    pipeline = load(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        users = Users(pipeline, request["jobs"])
        users.run(request["users"])
        print(json.dumps(users.timelines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
